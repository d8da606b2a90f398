"""The fold of a promotion log, and the adding of decisions beside other writers."""

from dataclasses import replace
from typing import Any

import pytest

from storage.errors import ConfigError, ConflictError
from storage.promotion import promotions
from storage.promotion.promotions import PromotionLog
from storage.records.promotions import DecisionKind, PromotionDecision, TeamVersion
from storage.store.object_store import ObjectStore
from tasks.promotion import decision_log
from tasks.promotion.decision_log import Standing, add, fold, require_known

PROMOTED, REJECTED, BACK = DecisionKind.PROMOTED, DecisionKind.REJECTED, DecisionKind.ROLLED_BACK


def decision(
    number: int, kind: DecisionKind, team: str, returns_to: int | None = None
) -> PromotionDecision:
    """Decision about the team that is one version of run `team`."""
    version = TeamVersion(run_id=team, version=1, digest=f"digest of {team}")
    return PromotionDecision(
        name="tiny", number=number, kind=kind, at_s=float(number), by="ada", reason="",
        team={"solver": version}, returns_to=returns_to,
    )  # fmt: skip


def log(*entries: tuple[DecisionKind, str] | tuple[DecisionKind, str, int] | str) -> PromotionLog:
    """Log with decisions 1, 2, …; a text is an unreadable one."""
    readable, unreadable = [], {}
    for number, entry in enumerate(entries, start=1):
        if isinstance(entry, str):
            unreadable[number] = entry
        else:
            readable.append(decision(number, *entry))
    return PromotionLog("tiny", tuple(readable), unreadable)


def roles(standing: Standing) -> tuple[str, str, str]:
    """The runs of champion, previous and challenger, each with the decision's number."""
    return tuple(
        "" if each is None else f"{each.team['solver'].run_id}{each.number}"
        for each in (standing.champion, standing.previous, standing.challenger)
    )  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([], ("", "", "")),
        ([(PROMOTED, "a")], ("a1", "", "")),
        ([(REJECTED, "a")], ("", "", "a1")),
        ([(PROMOTED, "a"), (PROMOTED, "b")], ("b2", "a1", "")),
        ([(PROMOTED, "a"), (REJECTED, "b"), (REJECTED, "c")], ("a1", "", "c3")),
        ([(PROMOTED, "a"), (REJECTED, "b"), (PROMOTED, "c")], ("c3", "a1", "")),
        # a rollback takes its champion out of the line
        ([(PROMOTED, "a"), (PROMOTED, "b"), (BACK, "a", 1)], ("a3", "", "")),
        (
            [(PROMOTED, "a"), (PROMOTED, "b"), (PROMOTED, "c"), (BACK, "b", 2)],
            ("b4", "a1", ""),
        ),
        (
            [(PROMOTED, "a"), (PROMOTED, "b"), (PROMOTED, "c"), (BACK, "b", 2), (BACK, "a", 1)],
            ("a5", "", ""),
        ),
        ([(PROMOTED, "a"), (PROMOTED, "b"), (BACK, "a", 1), (PROMOTED, "c")], ("c4", "a3", "")),
        # forward again, to the champion that was rolled back, or to a rollback
        ([(PROMOTED, "a"), (PROMOTED, "b"), (BACK, "a", 1), (BACK, "b", 2)], ("b4", "a1", "")),
        (
            [(PROMOTED, "a"), (PROMOTED, "b"), (BACK, "a", 1), (PROMOTED, "c"), (BACK, "a", 3)],
            ("a5", "", ""),
        ),
        ([(PROMOTED, "a"), (PROMOTED, "b"), (REJECTED, "c"), (BACK, "a", 1)], ("a4", "", "")),
    ],
)
def test_the_fold_names_champion_previous_and_challenger(
    entries: list[Any], expected: tuple[str, str, str]
) -> None:
    standing = fold(log(*entries))
    assert roles(standing) == expected
    assert (standing.unknown, standing.unknown_previous) == ("", "")


@pytest.mark.parametrize(
    ("entries", "expected", "is_known"),
    [
        ([(PROMOTED, "a"), "torn"], ("", "", ""), False),
        ([(PROMOTED, "a"), "torn", (REJECTED, "b")], ("", "", "b3"), False),
        ([(PROMOTED, "a"), "torn", (PROMOTED, "b")], ("b3", "", ""), True),
        ([(PROMOTED, "a"), (PROMOTED, "b"), "torn", (BACK, "b", 2)], ("b4", "a1", ""), True),
        (["torn", (PROMOTED, "a"), (PROMOTED, "b")], ("b3", "a2", ""), True),
        ([(BACK, "a", 7)], ("a1", "", ""), True),
    ],
)
def test_after_an_unreadable_decision_the_champion_is_unknown_until_one_is_named(
    entries: list[Any], expected: tuple[str, str, str], is_known: bool
) -> None:
    standing = fold(log(*entries))
    assert roles(standing) == expected
    assert (standing.unknown == "") == is_known


@pytest.mark.parametrize(
    ("entries", "previous", "unknown"),
    [
        ([(PROMOTED, "a"), "torn"], "", ""),  # the champion itself is unknown
        (["torn", (PROMOTED, "a")], "", "torn"),
        (["torn", (PROMOTED, "a"), (REJECTED, "b")], "", "torn"),
        ([(PROMOTED, "a"), "torn", (PROMOTED, "b")], "", "torn"),
        (["torn", (PROMOTED, "a"), (PROMOTED, "b")], "a2", ""),
        # a rollback has the previous champion of the decision to which it returns
        (["torn", (PROMOTED, "a"), (PROMOTED, "b"), (BACK, "a", 2)], "", "torn"),
        ([(PROMOTED, "a"), (PROMOTED, "b"), "torn", (BACK, "b", 2)], "a1", ""),
        ([(PROMOTED, "a"), "torn", (BACK, "a", 1)], "", ""),
        (
            ["torn", (PROMOTED, "a"), (BACK, "b", 1)],
            "",
            "decision 1, to which decision 3 returned, cannot be read",
        ),
    ],
)
def test_the_champion_before_is_unknown_where_an_unreadable_decision_may_name_it(
    entries: list[Any], previous: str, unknown: str
) -> None:
    standing = fold(log(*entries))
    assert (roles(standing)[1], standing.unknown_previous) == (previous, unknown)


def test_the_standing_after_each_decision_is_that_of_the_log_until_then() -> None:
    entries: list[Any] = [
        (PROMOTED, "a"),
        (REJECTED, "b"),
        "torn",
        (PROMOTED, "c"),
        (PROMOTED, "d"),
    ]
    whole = [*decision_log.standings(log(*entries))]
    assert [number for number, _ in whole] == [1, 2, 3, 4, 5]
    for number, standing in whole:
        assert standing == fold(log(*entries[:number]))
    assert [standing.unknown != "" for _, standing in whole] == [False, False, True, False, False]


def test_nothing_is_promoted_over_an_unknown_champion(memory_store: ObjectStore) -> None:
    require_known(memory_store, fold(log((PROMOTED, "a"))))
    with pytest.raises(
        ConfigError,
        match=r"champion of tiny is not known: torn; put the object back .*rollback tiny --to NUMBER",
    ):
        require_known(memory_store, fold(log((PROMOTED, "a"), "torn")))


def drafted(kind: DecisionKind, team: str) -> PromotionDecision:
    return replace(decision(0, kind, team), name="draft")


def test_decisions_are_numbered_from_one(memory_store: ObjectStore) -> None:
    for team in "abc":
        add(memory_store, "tiny", lambda standing, log, team=team: drafted(PROMOTED, team))
    stored = promotions.read_log(memory_store, "tiny").readable
    assert [(each.number, each.team["solver"].run_id) for each in stored] == [
        (1, "a"),
        (2, "b"),
        (3, "c"),
    ]
    assert all(each.name == "tiny" and each.at_s > 1e9 for each in stored)


def test_a_writer_that_loses_drafts_again_with_what_the_winner_wrote(
    memory_store: ObjectStore,
) -> None:
    """The rival adds its decision between the first draft and its create."""
    seen = []

    def draft(standing: Standing, log: PromotionLog) -> PromotionDecision:
        seen.append(roles(standing)[0])
        if len(seen) == 1:
            add(memory_store, "tiny", lambda standing, log: drafted(PROMOTED, "rival"))
        return drafted(PROMOTED, "mine")

    assert add(memory_store, "tiny", draft).number == 2
    assert seen == ["", "rival1"]
    assert roles(fold(promotions.read_log(memory_store, "tiny"))) == ("mine2", "rival1", "")


def test_a_draft_that_refuses_adds_nothing(memory_store: ObjectStore) -> None:
    def draft(standing: Standing, log: PromotionLog) -> PromotionDecision:
        raise ConfigError("no")

    with pytest.raises(ConfigError):
        add(memory_store, "tiny", draft)
    assert promotions.read_log(memory_store, "tiny").next_number == 1


def test_a_writer_that_loses_every_time_gives_up_with_the_remedy(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision_log, "TRIES_MAX", 3)

    def draft(standing: Standing, log: PromotionLog) -> PromotionDecision:
        promotions.create(memory_store, decision(log.next_number, PROMOTED, "rival"))
        return drafted(PROMOTED, "mine")

    with pytest.raises(ConflictError, match=r"promotions/tiny: 3 times another writer .* again"):
        add(memory_store, "tiny", draft)


@pytest.mark.parametrize("kind", [PROMOTED, REJECTED])
def test_the_same_decision_is_not_added_twice(
    memory_store: ObjectStore, kind: DecisionKind
) -> None:
    first = add(memory_store, "tiny", lambda standing, log: drafted(kind, "a"))
    second = add(memory_store, "tiny", lambda standing, log: drafted(kind, "a"))
    assert second.number == first.number == 1
    assert promotions.read_log(memory_store, "tiny").next_number == 2


def test_a_champion_that_is_promoted_again_after_another_is_a_new_decision(
    memory_store: ObjectStore,
) -> None:
    for team in "aba":
        add(memory_store, "tiny", lambda standing, log, team=team: drafted(PROMOTED, team))
    assert roles(fold(promotions.read_log(memory_store, "tiny"))) == ("a3", "b2", "")


def test_a_rejected_champion_is_a_new_decision(memory_store: ObjectStore) -> None:
    add(memory_store, "tiny", lambda standing, log: drafted(PROMOTED, "a"))
    assert add(memory_store, "tiny", lambda standing, log: drafted(REJECTED, "a")).number == 2


def test_other_weights_of_the_same_version_are_another_team(memory_store: ObjectStore) -> None:
    one = drafted(PROMOTED, "a")
    other = replace(one, team={"solver": replace(one.team["solver"], digest="other")})
    add(memory_store, "tiny", lambda standing, log: one)
    assert add(memory_store, "tiny", lambda standing, log: other).number == 2


def test_long_texts_are_cut_and_half_characters_replaced(memory_store: ObjectStore) -> None:
    draft = replace(drafted(PROMOTED, "a"), reason="\ud800" + "x" * 10_000, by="y" * 1000)
    added = add(memory_store, "tiny", lambda standing, log: draft)
    stored = promotions.read(memory_store, "tiny", added.number)
    assert stored.reason == "?" + "x" * (decision_log.REASON_MAX - 1)
    assert stored.by == "y" * decision_log.BY_MAX
