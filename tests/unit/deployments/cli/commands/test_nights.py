"""`astraflow nights`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from deployments.cli.app import app
from storage import layout
from storage.store.object_store import ObjectStore, open_store
from tests.support.runs.week_of_nights import NAME, NIGHTS, write_week
from tests.support.stores.resealed import resealed


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setenv("ASTRAFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ASTRAFLOW_STORE", str(tmp_path / "store"))
    monkeypatch.delenv("COLUMNS", raising=False)  # xdist sets it
    return open_store(str(tmp_path / "store"))


def call(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["nights", *arguments])
    assert result.exit_code == code, result.output
    return result


def test_the_nights_are_listed_oldest_first(store: ObjectStore) -> None:
    write_week(store)
    lines = call(NAME).stdout.splitlines()
    assert lines[1].split()[:7] == [NAME, NIGHTS[0], "promoted", "40.0%", "65.0%", "+25.0%", "1"]
    assert lines[5].split()[:3] == [NAME, NIGHTS[4], "begun"]
    assert call().stdout.splitlines() == lines


def test_the_list_as_json(store: ObjectStore) -> None:
    write_week(store)
    listed = json.loads(call(NAME, "--json").stdout)
    assert listed[1] == {
        "name": NAME,
        "night": NIGHTS[1],
        "end": "rejected",
        "reason": "gain -0.1",
        "run": f"{NAME}-{NIGHTS[1]}",
        "began_with": 1,
        "decision": 2,
    }
    assert (listed[3]["run"], listed[3]["end"]) == (None, "skipped")


def test_the_page_is_written(store: ObjectStore, tmp_path: Path) -> None:
    write_week(store)
    assert call(NAME, "--out", str(tmp_path / "week.html")).stdout.strip() == str(
        tmp_path / "week.html"
    )
    assert NIGHTS[2] in (tmp_path / "week.html").read_text()
    assert "give its NAME" in call("--out", str(tmp_path / "x.html"), code=2).stderr


def test_damage_is_named_beside_the_list(store: ObjectStore) -> None:
    write_week(store)
    store.put(layout.night_outcome(NAME, NIGHTS[1]), b"{")
    result = call(NAME)
    assert f"{NAME}, night {NIGHTS[1]}: " in result.stderr
    assert NIGHTS[2] in result.stdout


def test_a_very_long_reason_is_cut(store: ObjectStore) -> None:
    write_week(store)
    key = layout.night_outcome(NAME, NIGHTS[1])
    store.put(key, resealed(store.get(key), lambda outcome: outcome.update(reason="x" * 900_000)))
    assert len(call().stdout) < 10_000


def test_without_nights_the_command_says_how_to_begin_one(store: ObjectStore) -> None:
    assert "prefect deployment run astraflow/nightly" in call().stdout
    assert "cannot name a recurring training" in call("a/b", code=2).stderr


def test_a_damaged_promotion_log_hides_no_other_recurring_training(
    store: ObjectStore, tmp_path: Path
) -> None:
    write_week(store)
    (tmp_path / "store" / "nights" / "broken").mkdir()
    (tmp_path / "store" / "promotions" / "broken").write_bytes(b"x")
    result = call()
    assert NIGHTS[0] in result.stdout
    assert "broken is skipped, because it cannot be read: " in result.stderr
    assert "promotions/broken cannot be an object" in call("broken", code=2).stderr
