import io
import math
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rich.console import Console

from deployments.cli.output import tables
from deployments.cli.output.plain_console import PlainConsole
from storage.promotion.promotions import PromotionLog
from storage.records.control import RunEnd
from storage.records.numbers import TIME_MAX_S
from storage.records.promotions import (
    DecisionKind,
    GateRow,
    GateVerdict,
    PromotionDecision,
    Requirement,
    TeamVersion,
)
from storage.run.fates import LedgerCounts
from storage.verify.verify import Verdict
from storage.verify.violations import Invariant, Violation
from storage.weights.tags import Tag
from tasks.monitoring.status import RunSummary
from tasks.promotion.decision_log import fold
from tests.unit.deployments.cli.output.test_live_view import _status

BOOKS = LedgerCounts(batches=3, trained=384, replayed=1, filtered=20, expired=5, waiting=7)


def _verdict(*violations: Violation) -> Verdict:
    return Verdict(
        violations=violations,
        orders=12,
        shards=11,
        quarantined=1,
        sequences=1416,
        policies={"solver": BOOKS},
    )


def test_the_json_of_a_verification_has_the_documented_fields() -> None:
    broken = Violation(Invariant.LINEAGE, "weights/solver/00000002", "a digest differs")
    assert tables.verdict_json(_verdict(broken)) == {
        "ok": False,
        "violations": [
            {"invariant": 3, "where": "weights/solver/00000002", "what": "a digest differs"}
        ],
        "orders": 12,
        "shards": 11,
        "quarantined": 1,
        "sequences": 1416,
        "policies": {
            "solver": {
                "batches": 3,
                "trained": 384,
                "replayed": 1,
                "filtered": 20,
                "expired": 5,
                "waiting": 7,
            }
        },
    }


def test_a_verification_without_violations_is_one_line() -> None:
    assert tables.verdict_line(_verdict()) == (
        "clean: 12 orders, 11 shards, 1,416 sequences; solver 384 trained, 20 filtered, 5 expired, "
        "7 waiting"
    )
    assert tables.verdict_line(_verdict(Violation(Invariant.CONTIGUOUS, "a", "b"))).startswith(
        "1 violations: "
    )


def test_the_summary_compares_first_and_last_evaluation_of_each_workflow() -> None:
    assert tables.summary_lines(_status()) == [
        "the policy alone: 33.0% → 80.0% of 500 held-out problems (version 0 → solver 20, verifier "
        "18)",
        "the team (actor_and_verify): 57.0% → 57.0% of 500 held-out problems (version 0 → 0)",
    ]


def test_a_long_list_of_violations_is_shortened_with_a_note() -> None:
    many = [
        Violation(Invariant.CONTIGUOUS, f"orders/{number}", "missing")
        for number in range(tables.VIOLATIONS_SHOWN_MAX + 3)
    ]
    table = tables.violations_table(_verdict(*many))
    assert table.row_count == tables.VIOLATIONS_SHOWN_MAX + 1
    assert list(table.columns[2].cells)[-1] == "and 3 more; --json lists all of them"


@pytest.mark.parametrize(
    ("state", "reason", "words"),
    [
        ("exhausted", "budget: hours 8.0 of 8", "exhausted (budget: hours 8.0 of 8)"),
        ("exhausted", "x\n" + 200 * "y", f"exhausted (x {98 * 'y'})"),
        ("cancelled", "by a person", "cancelled"),
    ],
)
def test_the_list_of_runs_says_which_budget_is_used_up(
    state: RunEnd, reason: str, words: str
) -> None:
    run = RunSummary(
        run_id="tiny-1",
        state=state,
        reason=reason,
        deployment="",
        started=1.7e9,
        elapsed_s=108.0,
        steps=80,
        versions={},
    )
    assert [str(cell) for cell in tables.runs_table([run]).columns[1].cells] == [words]


@pytest.mark.parametrize(
    "run_id", ["tiny-20261121-023004-b6f1", "a-name-that-somebody-made-up-" + "x" * 70]
)
@pytest.mark.parametrize("width", [60, 80])
def test_a_run_id_is_complete_in_a_narrow_terminal(run_id: str, width: int) -> None:
    versions = {"solver": 80, "verifier": 80}
    run = RunSummary(
        run_id=run_id,
        state="completed",
        reason="",
        deployment="astraflow/multi-policy",
        started=1.7e9,
        elapsed_s=108.0,
        steps=80,
        versions=versions,
    )
    console = Console(width=width, file=io.StringIO())
    table = tables.runs_table([run])
    table.show_header = False
    console.print(table)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # a StringIO
    assert "".join(line.split()[0] for line in lines if not line.startswith(" ")) == run_id


def test_a_gate_decision_shows_the_gain_on_the_set_that_had_to_gain() -> None:
    row = GateRow(
        dataset="other", problems=9, champion_failed=0, candidate_failed=0, champion=0.5,
        candidate=0.4, gain=-0.1, low=-0.2, high=0.0, p_value=0.9, requirement=Requirement.LOSS,
        required=-0.3, passed=True, why="",
    )  # fmt: skip
    gained = replace(row, gain=0.031, requirement=Requirement.GAIN, low=math.nan)
    decision = PromotionDecision(
        name="tiny", number=1, kind=DecisionKind.PROMOTED, at_s=0.0, by="", reason="",
        team={"solver": TeamVersion(run_id="tiny-1", version=1, digest="")},
        gate=GateVerdict(passed=True, reason="", test="t", confidence=0.9, rows=(row, gained)),
    )  # fmt: skip
    log = PromotionLog("tiny", (decision,), {})
    table = tables.promotions_table([(fold(log), log)])
    assert [next(iter(column.cells)) for column in table.columns][3:7] == [
        "promoted",
        "champion",
        "solver@1 of tiny-1",
        "+3.1%",
    ]
    (listed,) = tables.promotions_json([(fold(log), log)])
    assert listed["gate"]["rows"][1]["low"] is None
    assert "write_id" not in listed


def test_the_gates_table_has_the_numbers_that_decided() -> None:
    row = GateRow(
        dataset="gsm8k", problems=1500, champion_failed=0, candidate_failed=0, champion=0.5, candidate=0.625,
        gain=0.125, low=0.0312, high=0.22, p_value=0.0042, requirement=Requirement.LOSS, required=-0.05, passed=True,
        why="change of +12.5%",
    )  # fmt: skip
    empty = replace(row, problems=0, champion=math.nan, low=math.nan, passed=False, why="too few")
    verdict = GateVerdict(
        passed=False, reason="", test="mcnemar", confidence=0.95, rows=(row, empty)
    )
    console = Console(file=io.StringIO(), width=200)
    console.print(tables.gate_table(verdict))
    assert isinstance(console.file, io.StringIO)
    header, first, second = (
        [cell.strip() for cell in line.split("  ") if cell.strip()]
        for line in console.file.getvalue().splitlines()
    )
    assert header == [
        "data set", "problems", "champion", "candidate", "gain", "at least", "at most", "p", "required", "passed",
        "why",
    ]  # fmt: skip
    assert first == [
        "gsm8k", "1,500", "50.0%", "62.5%", "+12.5%", "+3.1%", "+22.0%", "0.0042", "-5.0%", "yes", "change of +12.5%",
    ]  # fmt: skip
    assert (second[1:3], second[5], second[9:]) == (["0", "nan%"], "+nan%", ["no", "too few"])


@pytest.fixture
def easternmost(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC-14")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("easternmost")
def test_the_latest_time_of_a_stored_object_is_shown_in_any_time_zone() -> None:
    tag = Tag(name="best", policy="solver", version=1, at_s=TIME_MAX_S)
    output = io.StringIO()
    Console(file=output, width=200).print(tables.tags_table([tag]))
    assert "9999-12-31 14:00" in output.getvalue()


def test_a_terminal_of_no_width_has_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    output = io.StringIO()
    console = PlainConsole(file=output)
    console.print("text")
    assert (console.width, output.getvalue()) == (80, "text\n")
    monkeypatch.setenv("COLUMNS", "1")
    assert PlainConsole(file=output).width == 1
