import io
from dataclasses import replace

import pytest
from rich.console import Console

from deployments.cli.output import live_view, tables
from deployments.cli.output.live_view import View
from storage.records.control import ClosingStep, WaitReason
from tasks.monitoring.budget_status import BudgetStatus
from tasks.monitoring.status import (
    Closing,
    EvalStatus,
    MemberStatus,
    PolicyStatus,
    RegionStatus,
    Status,
)


def _policy(step: int, **measured: float) -> PolicyStatus:
    nothing = dict.fromkeys(
        ("wait_fraction", "reward_mean", "accuracy", "staleness_mean", "staleness_max")
    )
    values = {**nothing, **measured}
    return PolicyStatus(
        step=step, steps=80, version=step, batches=step, tokens_trained=12_345, **values
    )


def _status(state: str = "running") -> Status:
    return Status(
        run_id="tiny-1",
        state=state,  # type: ignore[arg-type]  # one of the literals
        reason="",
        deployment="astraflow/multi-policy",
        started=0.0,
        elapsed_s=65.0,
        steps=80,
        policies={
            "solver": _policy(
                40,
                reward_mean=0.5,
                accuracy=0.75,
                staleness_mean=1.25,
                staleness_max=4.0,
                wait_fraction=0.1,
            ),
            "verifier": _policy(20),
        },
        regions={"us-east": RegionStatus(workers=1, tokens_per_s=1234.5, orders_done=17)},
        evals=[
            EvalStatus(
                versions={"solver": 0, "verifier": 0},
                dataset="d",
                workflow="single_turn",
                accuracy=0.33,
                n=500,
            ),
            EvalStatus(
                versions={"solver": 0, "verifier": 0},
                dataset="d",
                workflow="actor_and_verify",
                accuracy=0.57,
                n=500,
            ),
            EvalStatus(
                versions={"solver": 20, "verifier": 18},
                dataset="d",
                workflow="single_turn",
                accuracy=0.8,
                n=500,
            ),
        ],
        members=[],
        counts={},
    )


def _member(
    name: str, state: str, wait_reason: WaitReason = WaitReason.NONE, note: str = ""
) -> MemberStatus:
    return MemberStatus(
        id=name,
        kind="rollout",
        state=state,
        wait_reason=wait_reason,
        age_s=1.0,
        attempt=0,
        region="",
        note=note,
    )


def _drawn(view: View) -> list[str]:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - the console keeps it
    console.print(live_view.picture(view))
    console.file.close()
    return [" ".join(line.strip("│ ").split()) for line in console.export_text().splitlines()]


def test_the_view_shows_all_numbers_of_policies_regions_and_evaluations() -> None:
    lines = _drawn(
        View(
            run_id="tiny-1",
            elapsed_s=65.0,
            flow_state="Running",
            status=_status(),
            links={"Prefect": "http://x/runs/1"},
        )
    )
    assert "tiny-1 running 1:05" in lines[0]
    assert "solver 40/80 0.50 75.0% 1.2 / 4 10.0% 12,345" in lines
    assert "verifier 20/80 – – – / – – 12,345" in lines
    assert "us-east 1 1,234 17" in lines
    assert "0 33.0% 57.0% 500" in lines
    assert "solver 20, verifier 18 80.0% – 500" in lines
    assert "Prefect http://x/runs/1" in lines
    assert any(line.endswith("20 of 80 steps") for line in lines)


@pytest.mark.parametrize(("used", "style"), [(6.3, "dim"), (6.4, "yellow")])
def test_view_line_and_status_show_the_used_budget_and_when_little_is_left(
    used: float, style: str
) -> None:
    budget = {
        "hours": BudgetStatus(used=used, limit=8.0),
        "tokens": BudgetStatus(used=5e5, limit=2e9),
    }
    words = f"budget: hours {used} of 8, tokens 500,000 of 2,000,000,000"
    status = _status().model_copy(update={"budget": budget})
    view = View(run_id="tiny-1", elapsed_s=65.0, flow_state="Running", status=status)
    assert words in _drawn(view)
    assert live_view.line(view).endswith(words)
    console = Console(width=140, file=io.StringIO())
    console.print(tables.status_picture(status))
    assert f"\n{words}" in console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    assert live_view.budget_line(status).style == style
    without = replace(view, status=_status())
    assert not any("budget" in line for line in [*_drawn(without), live_view.line(without)])


def test_the_last_line_of_the_view_is_empty_for_the_echo_of_ctrl_c() -> None:
    assert (
        _drawn(View(run_id="tiny-1", elapsed_s=65.0, flow_state="Running", status=_status()))[-1]
        == ""
    )


def test_replicated_bytes_are_shown_in_one_line_per_region() -> None:
    regions = {
        "us-east": RegionStatus(
            workers=1,
            tokens_per_s=0.0,
            orders_done=1,
            weights_in_home={"solver": 12_000_000, "verifier": 100_000},
            weights_in_mirror={"solver": 48_400_000},
            mirrored={"solver": 12_000_000},
            shards_out=3_200_000,
        ),
        "eu-west": RegionStatus(
            workers=1, tokens_per_s=0.0, orders_done=1, weights_in_home={"solver": 60_000_000}
        ),
        "idle": RegionStatus(workers=0, tokens_per_s=0.0, orders_done=0),
    }
    assert live_view.traffic_lines(_status().model_copy(update={"regions": regions})) == [
        "us-east: 12.1 MB of weights from home, 48.4 MB from its mirror, 12.0 MB copied into the "
        "mirror; 3.2 MB of shards",
        "eu-west: 60.0 MB of weights from home; 0 bytes of shards",
    ]


def test_members_that_wait_for_a_base_model_are_shown_during_the_start() -> None:
    base, both = WaitReason.BASE_MODEL, "waits for the base model of solver, verifier"
    members = [
        _member("trainer-solver", "waiting", base, "waits for the base model of solver"),
        _member("rollout-us-0", "waiting", base, both),
        _member("rollout-eu-0", "waiting", base, both),
        _member("base-model", "working", WaitReason.NONE, "teaching the skill"),
        _member("dataflow", "waiting", WaitReason.SHARDS),
        _member("mirror-eu", "waiting", WaitReason.STORE, "solver is not mirrored: no route"),
        _member("evaluation", "waiting", WaitReason.VERSION, "waits for version 4 of solver"),
    ]
    status = _status("starting").model_copy(update={"members": members})
    shown = [
        "mirror-eu: solver is not mirrored: no route",
        "trainer-solver: waits for the base model of solver",
        "rollout-eu-0, rollout-us-0: waits for the base model of solver, verifier",
    ]
    view = View(
        run_id="tiny-1",
        elapsed_s=3.0,
        flow_state="Running",
        status=status,
        base_model=0.25,
        note="teaching the skill",
    )
    assert [line for line in _drawn(view) if ": " in line[:60]] == shown
    assert live_view.line(view) == (
        f"[0:03] starting  building the base models 25% teaching the skill; {'; '.join(shown)}"
    )
    assert live_view.line(replace(view, base_model=None)) == (
        f"[0:03] starting  the supervisor is starting; {'; '.join(shown)}"
    )
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(tables.status_picture(status))
    printed = console.export_text()
    assert [line for line in shown if line not in printed] == []
    assert live_view.waiting_lines(status.model_copy(update={"state": "running"})) == []


def test_the_view_shows_the_progress_of_building_base_models() -> None:
    view = View(
        run_id="tiny-1",
        elapsed_s=3.0,
        flow_state="Running",
        status=_status("starting"),
        base_model=0.25,
        note="skill",
    )
    assert any(line.endswith("building the base models, 25% skill") for line in _drawn(view))
    assert live_view.line(view) == "[0:03] starting  building the base models 25% skill"


def test_a_line_has_steps_rewards_throughput_and_the_newest_scores() -> None:
    assert live_view.line(
        View(run_id="tiny-1", elapsed_s=65.0, flow_state="Running", status=_status())
    ) == (
        "[1:05] running  solver 40/80 reward 0.50  verifier 20/80 reward –  1 worker 1,234 "
        "tokens/s  "
        "alone 80.0%@20  team (actor_and_verify) 57.0%@0"
    )


@pytest.mark.parametrize(("state", "shown"), [("Scheduled", " (Prefect: Scheduled)"), ("", "")])
def test_before_the_run_exists_the_view_has_the_prefect_state_that_is_known(
    state: str, shown: str
) -> None:
    view = View(run_id="x", elapsed_s=0.0, flow_state=state, status=None)
    assert live_view.line(view) == f"[0:00] starting  waiting for the supervisor{shown}"
    assert f"waiting for the supervisor to begin{shown}" in _drawn(view)


@pytest.mark.parametrize(
    ("closing", "words"),
    [
        (Closing(step=ClosingStep.LEAVING, part="", share=0.0), "waiting for members to leave"),
        (Closing(step=ClosingStep.VERIFYING, part="", share=0.0), "verifying every invariant"),
        (
            Closing(step=ClosingStep.VERIFYING, part="weights of solver", share=0.5),
            "verifying weights of solver 50%",
        ),
        (Closing(step=ClosingStep.REPORTING, part="", share=0.0), "writing the report"),
        (
            Closing(step=ClosingStep.NOTIFYING, part="", share=0.0),
            "showing the end of the run in Prefect",
        ),
    ],
)
def test_the_closing_step_is_in_the_line_the_view_and_the_status(
    closing: Closing, words: str
) -> None:
    status = _status("completed").model_copy(update={"closing": closing})
    view = View(run_id="tiny-1", elapsed_s=65.0, flow_state="Running", status=status)
    assert live_view.line(view) == f"[1:05] completed  {words}"
    assert any(line.endswith(f"20 of 80 steps {words}") for line in _drawn(view))
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(tables.status_picture(status))
    assert words in console.export_text().splitlines()


def test_times_are_written_as_a_clock() -> None:
    assert [live_view.clock(seconds) for seconds in (0.9, 61, 3661)] == ["0:00", "1:01", "1:01:01"]


@pytest.mark.parametrize("state", ["starting", "running", "completed"])
def test_stored_text_adds_no_line_to_the_view_and_the_status(state: str) -> None:
    """Reasons, notes and faults have the text that a writer of the store chose."""
    forged = "out of disk\nverify: clean"
    members = [_member("mirror-eu", "waiting", WaitReason.STORE, forged)]
    changes = {"reason": forged, "problems": [forged], "members": members}
    status = _status(state).model_copy(update=changes)
    view = View(
        run_id="tiny-1",
        elapsed_s=65.0,
        flow_state="Running",
        status=status,
        base_model=0.5,
        note=forged,
    )
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(tables.status_picture(status))
    for lines in (_drawn(view), console.export_text().splitlines()):
        assert any("out of disk verify: clean" in line for line in lines)
        assert "verify: clean" not in lines


def test_members_with_problems_are_shown_during_the_run() -> None:
    members = [
        _member("mirror-eu", "waiting", WaitReason.STORE, "solver is not mirrored: no route"),
        _member("trainer-solver", "waiting", WaitReason.BATCH, "starts from version 0"),
        _member("trainer-verifier", "waiting", WaitReason.BASE_MODEL, "any words for people"),
        _member("rollout-us-0", "silent"),
        _member("rollout-eu-0", "working", WaitReason.NONE, "starts from version 0"),
        _member("dataflow", "working", WaitReason.UNTRAINABLE, "64 groups held nothing"),
    ]
    status = _status().model_copy(update={"members": members})
    assert live_view.trouble_lines(status) == [
        "mirror-eu: waiting, solver is not mirrored: no route",
        "rollout-us-0: silent",
        "dataflow: working, 64 groups held nothing",
    ]
    assert live_view.trouble_lines(status.model_copy(update={"state": "completed"})) == []
