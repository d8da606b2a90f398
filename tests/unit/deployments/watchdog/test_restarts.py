import json
from pathlib import Path

import pytest

from deployments.paths import Home
from deployments.watchdog import restarts
from deployments.watchdog.restarts import LIVED_S, LONGEST_S, RestartPolicy, Restarts


def test_a_process_that_keeps_ending_is_started_later_each_time() -> None:
    policy = RestartPolicy()
    pauses = [policy.note_end("mlflow", pid, 1.0, 1000.0) for pid in range(1, 12)]
    assert pauses == [0, 2, 4, 8, 16, 32, 64, 128, 256, LONGEST_S, LONGEST_S]
    assert policy.counts == {"mlflow": Restarts(ends=11, in_a_row=11)}
    assert not policy.is_due("mlflow", 1000.0 + LONGEST_S - 0.1)
    assert policy.is_due("mlflow", 1000.0 + LONGEST_S)
    assert policy.is_due("prefect-server", 0.0)


def test_a_process_that_worked_begins_a_new_series() -> None:
    policy = RestartPolicy()
    for pid in (1, 2):
        policy.note_end("mlflow", pid, LIVED_S - 0.1, 0.0)
    assert policy.counts["mlflow"].in_a_row == 2
    assert policy.note_end("mlflow", 3, LIVED_S, 50.0) == 0
    assert policy.counts == {"mlflow": Restarts(ends=3, in_a_row=1)}
    assert policy.is_due("mlflow", 50.0)


def test_the_end_of_a_process_is_counted_once() -> None:
    policy = RestartPolicy()
    assert policy.note_end("mlflow", 7, 1.0, 0.0) == 0
    assert policy.note_end("mlflow", 7, 2.0, 1.0) is None
    assert policy.counts == {"mlflow": Restarts(ends=1, in_a_row=1)}


def test_a_start_that_was_not_possible_is_tried_again_after_a_pause() -> None:
    policy = RestartPolicy()
    policy.note_end("worker-control", 7, 1000.0, 0.0)
    policy.postpone("worker-control", 10.0)
    assert not policy.is_due("worker-control", 11.9)
    assert policy.is_due("worker-control", 12.0)
    assert policy.counts["worker-control"].in_a_row == 1


def test_a_clock_that_was_set_back_postpones_no_start() -> None:
    policy = RestartPolicy()
    for pid in range(1, 12):
        policy.note_end("mlflow", pid, 1.0, 10_000.0)
    assert not policy.is_due("mlflow", 10_000.0)
    assert policy.is_due("mlflow", 9_999.9)


@pytest.mark.parametrize(
    "body",
    [
        '{"mlflow": {"ends": -1, "in_a_row": 0}}',
        '{"mlflow": {"ends": 1}}',
        '{"mlflow": {"ends": true, "in_a_row": 0}}',
        '{"mlflow": {"ends": 2147483648, "in_a_row": 0}}',
        "[]",
        "x",
        "[" * 100_000,
    ],
)
def test_a_damaged_record_has_no_restarts(tmp_path: Path, body: str) -> None:
    home = Home(tmp_path)
    assert restarts.load(home) == {}
    home.watchdog.write_text(body)
    assert restarts.load(home) == {}


def test_the_record_has_what_was_saved(tmp_path: Path) -> None:
    home, counts = Home(tmp_path), {"mlflow": Restarts(ends=5, in_a_row=2)}
    restarts.save(home, counts)
    assert restarts.load(home) == counts
    assert home.watchdog.stat().st_mode & 0o777 == 0o600
    home.watchdog.write_text(json.dumps({str(n): {"ends": 1, "in_a_row": 0} for n in range(999)}))
    assert len(restarts.load(home)) == restarts.SHOWN_MAX
