"""The page of a recurring training."""

import math
import re

from storage import layout
from storage.store.object_store import ObjectStore
from tasks.recurring import history
from tasks.reports import nights_page
from tests.support.runs.week_of_nights import NAME, NIGHTS, write_week


def page_of(store: ObjectStore) -> str:
    return nights_page.render(history.read(store, NAME))


def row_of(page: str, cell: str) -> str:
    found = re.search(rf"<tr><td[^>]*>{re.escape(cell)}</td>.*?</tr>", page, re.DOTALL)
    assert found is not None
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", found[0])).strip()


def test_a_night_is_a_row_with_its_end_and_the_gates_numbers(memory_store: ObjectStore) -> None:
    write_week(memory_store)
    page = page_of(memory_store)
    assert row_of(page, NIGHTS[0]) == (
        f"{NIGHTS[0]} promoted the recipe 40.0 % 65.0 % +25.0 +20.0 tiny-{NIGHTS[0]} gain 0.25"
    )
    assert row_of(page, NIGHTS[1]).startswith(
        f"{NIGHTS[1]} rejected decision 1 40.0 % 30.0 % -10.0"
    )
    assert row_of(page, NIGHTS[3]) == f"{NIGHTS[3]} skipped no row &lt;b&gt;"
    assert row_of(page, NIGHTS[4]) == f"{NIGHTS[4]} begun decision 4 tiny-{NIGHTS[4]}"
    assert page.index(NIGHTS[4]) < page.index(NIGHTS[0]), "the newest night is first"


def test_a_decision_is_a_row_with_the_roles_after_it(memory_store: ObjectStore) -> None:
    write_week(memory_store)
    page = page_of(memory_store)
    assert "solver 8 of tiny-20260103-0200 3 1 ada" in row_of(page, "3")
    assert "rolled_back" in row_of(page, "4")
    assert row_of(page, "4").endswith("ada by hand")


def test_the_cards_count_the_ends_and_name_the_champion(memory_store: ObjectStore) -> None:
    write_week(memory_store)
    text = re.sub(r"<[^>]+>", " ", page_of(memory_store))
    assert "2 promoted, 1 rejected, 1 without a verdict" in text
    assert "decision 4" in text
    assert "champion 40.0 %" in text


def test_both_figures_are_drawn_from_the_judged_nights(memory_store: ObjectStore) -> None:
    write_week(memory_store)
    page = page_of(memory_store)
    assert page.count("<svg") == 2
    assert "no gain" in page


def test_damage_is_shown_at_the_top(memory_store: ObjectStore) -> None:
    write_week(memory_store)
    memory_store.put(layout.promotion(NAME, 4), b"<b>")
    page = page_of(memory_store)
    assert "decision 4: " in page
    assert "unknown" in page
    assert "<b>" not in page


def test_a_training_without_nights_has_a_page(memory_store: ObjectStore) -> None:
    page = page_of(memory_store)
    assert "no night yet" in page
    assert "no decision yet" in page


def test_shares_and_differences_are_written_for_people() -> None:
    assert nights_page.percent(0.925) == "92.5 %"
    assert nights_page.points(-0.021) == "-2.1"
    assert nights_page.percent(math.nan) == nights_page.points(math.nan) == ""
