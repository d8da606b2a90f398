"""Lines about the progress of a service: when one is written, and what it says."""

import logging
from dataclasses import replace
from typing import Any

import pytest

from storage.coordination.progress_log import ProgressLog, line
from storage.records.control import Heartbeat, ServiceState, WaitReason
from storage.records.progress import (
    PROGRESS_OF,
    BaseModelProgress,
    DataflowProgress,
    EvaluationProgress,
    MirrorProgress,
    Progress,
    RolloutProgress,
    ServiceKind,
    SupervisorProgress,
    TrainerNodeProgress,
    TrainerProgress,
)
from tests.support.runs import builders


def beat(kind: ServiceKind, progress: Progress, **changes: Any) -> Heartbeat:
    written = builders.heartbeat(kind, f"{kind}-1", attempt=0, beats=1)
    fields: dict[str, Any] = {"progress": progress, "versions": {}, "note": "", **changes}
    return replace(written, **fields)


class Service:
    """A trainer whose heartbeats a log observes, with a manual clock."""

    def __init__(self, every_s: float, every_steps: int) -> None:
        self.now_s = 0.0
        self.log = ProgressLog(every_s, every_steps, lambda: self.now_s)

    def at(self, seconds: float, step: int, **changes: Any) -> None:
        self.now_s = seconds
        self.log.observe(beat("trainer", TrainerProgress(step=step), **changes))


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "storage.coordination.progress_log")
    return caplog


def test_a_line_is_written_after_the_interval_and_not_before(
    lines: pytest.LogCaptureFixture,
) -> None:
    service = Service(every_s=60.0, every_steps=1000)
    written = []
    for seconds in (2.0, 61.9, 62.0, 64.0, 121.9, 122.0):
        service.at(seconds, step=1)
        written.append(len(lines.records))
    assert written == [0, 0, 1, 1, 1, 2]
    assert {record.levelname for record in lines.records} == {"INFO"}


def test_a_trainer_writes_a_line_when_it_has_passed_a_multiple_of_the_steps(
    lines: pytest.LogCaptureFixture,
) -> None:
    service = Service(every_s=3600.0, every_steps=10)
    written = []
    for step in (0, 9, 10, 11, 19, 20, 35):
        service.at(1.0, step)
        written.append(len(lines.records))
    assert written == [0, 0, 1, 1, 1, 2, 3]


def test_steps_before_the_first_heartbeat_are_not_counted(
    lines: pytest.LogCaptureFixture,
) -> None:
    service = Service(every_s=3600.0, every_steps=10)
    service.at(1.0, step=40)
    service.at(2.0, step=49)
    assert lines.records == []


@pytest.mark.parametrize("state", [ServiceState.DONE, ServiceState.FAILED])
def test_the_last_heartbeat_is_always_written(
    lines: pytest.LogCaptureFixture, state: ServiceState
) -> None:
    Service(every_s=3600.0, every_steps=1000).at(0.1, step=3, state=state)
    (record,) = lines.records
    assert record.getMessage().startswith(f"{state}; step 3")


LINES: dict[str, tuple[ServiceKind, Progress, str]] = {
    "trainer": (
        "trainer",
        TrainerProgress(
            step=40,
            tokens_trained=9216,
            tokens_per_s=3120.4,
            reward_mean=-0.25,
            staleness_mean=0.7,
            staleness_max=2.0,
        ),
        "step 40, reward -0.25, staleness 0.7 (max 2), 3,120 tokens/s, 9,216 tokens trained",
    ),
    "a trainer before its first step": (
        "trainer",
        TrainerProgress(),
        "step 0, 0 tokens/s, 0 tokens trained",
    ),
    "dataflow": (
        "dataflow",
        DataflowProgress(
            orders=120,
            batches={"solver": 40, "verifier": 0},
            waiting={"solver": 12, "verifier": 0},
            trained={"solver": 3840},
            filtered={"solver": 2240},
            expired={"solver": 1260},
        ),
        "120 orders, solver: 40 batches (12 waiting, 3,840 trained, 2,240 filtered, 1,260 expired), "
        "verifier: 0 batches",
    ),
    "rollout": (
        "rollout",
        RolloutProgress(
            orders_done=82, episodes=5248, episodes_failed=3, tokens=90000, tokens_per_s=5206.0
        ),
        "82 orders, 5,248 episodes (3 failed), 90,000 tokens, 5,206 tokens/s",
    ),
    "evaluation": ("evaluation", EvaluationProgress(episodes=1500), "1,500 episodes"),
    "mirror": (
        "mirror",
        MirrorProgress(mirrored_bytes={"a": 1000, "b": 1}),
        "1,001 bytes mirrored",
    ),
    "trainer node": ("trainer_node", TrainerNodeProgress(), ""),
    "base model": ("base_model", BaseModelProgress(base_model=0.42), "42% of the base models"),
    "supervisor": (
        "supervisor",
        SupervisorProgress(members=7, members_done=2),
        "2 of 7 members done",
    ),
}


@pytest.mark.parametrize(("kind", "progress", "words"), LINES.values(), ids=LINES.keys())
def test_every_kind_of_service_says_what_it_counts(
    kind: ServiceKind, progress: Progress, words: str
) -> None:
    assert line(beat(kind, progress)) == "; ".join(filter(None, ("working", words)))


def test_every_kind_of_service_has_a_line() -> None:
    assert {kind for kind, _, _ in LINES.values()} == set(PROGRESS_OF)


def test_a_line_has_the_reason_of_a_wait_the_versions_and_the_note_in_one_line() -> None:
    written = line(
        beat(
            "trainer",
            TrainerProgress(step=1),
            state=ServiceState.WAITING,
            wait_reason=WaitReason.BATCH,
            versions={"solver": 1, "verifier": 2},
            note="a batch\n12:00 | INFO is lost" + "x" * 1000,
        )
    )
    assert written.startswith(
        "waiting for batch; step 1, 0 tokens/s, 0 tokens trained; "
        "versions: solver 1, verifier 2; a batch 12:00 | INFO is lostx"
    )
    assert len(written) < 450


def test_the_share_of_waiting_is_that_since_the_line_before() -> None:
    first = beat("evaluation", EvaluationProgress(), alive_s=100.0, seconds={"wait": 25.0})
    then = replace(first, alive_s=160.0, seconds={"wait": 70.0})
    assert line(first).endswith(", waited 25%")
    assert line(then, first).endswith(", waited 75%")
    assert line(replace(first, alive_s=10.0)).endswith(", waited 100%")
    assert "waited" not in line(replace(first, seconds={}))
    assert "waited" not in line(first, first)
