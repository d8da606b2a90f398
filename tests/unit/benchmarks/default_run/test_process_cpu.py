import os

import pytest

from benchmarks.default_run import process_cpu
from benchmarks.default_run.process_cpu import OTHER, Meter, Sampled

GROWING = [(10.0, 0.0), (12.0, 4.0), (14.0, 5.0)]


@pytest.mark.parametrize(
    ("start_s", "end_s", "grown"),
    [
        (10.0, 14.0, 5.0),
        (11.0, 13.0, 2.5),  # from 2.0 to 4.5
        (0.0, 11.0, 2.0),  # zero before its start
        (13.0, 99.0, 0.5),  # zero after its last sample
        (20.0, 30.0, 0.0),
        (0.0, 5.0, 0.0),
    ],
)
def test_growth_between_two_samples_is_linear(start_s: float, end_s: float, grown: float) -> None:
    assert process_cpu.between(GROWING, start_s, end_s) == pytest.approx(grown)


def test_an_empty_series_has_no_growth() -> None:
    assert process_cpu.between([], 0.0, 10.0) == 0.0


def test_a_process_belongs_to_its_nearest_named_ancestor() -> None:
    # server(1) ─ child(2);  worker(3) ─ flow(4) ─ judge(5) ─ judge's child(6);  a foreign child(7)
    parents = {1: 0, 2: 1, 3: 0, 4: 3, 5: 4, 6: 5, 7: 99}
    seen = [Sampled(pid, parent, []) for pid, parent in parents.items()]
    result = process_cpu.components(seen, {1: "server", 3: "workers", 4: "rollout"})
    assert result == {
        1: "server",
        2: "server",
        3: "workers",
        4: "rollout",
        5: "rollout",
        6: "rollout",
        7: OTHER,
    }


def test_a_cycle_of_ancestors_ends_the_search() -> None:
    assert process_cpu.components([Sampled(1, 2, []), Sampled(2, 1, [])], {}) == {
        1: OTHER,
        2: OTHER,
    }


def test_cpu_time_is_summed_by_component_within_the_window() -> None:
    seen = [
        Sampled(1, 0, GROWING),
        Sampled(2, 1, [(12.0, 0.0), (14.0, 2.0)]),
        Sampled(3, 0, GROWING),
    ]
    assert process_cpu.spent(seen, {1: "server", 3: "trainers"}, 12.0, 13.0) == {
        "server": pytest.approx(0.5 + 1.0),
        "trainers": pytest.approx(0.5),
    }


def test_shares_add_up_to_one_or_are_zero() -> None:
    assert process_cpu.shares({"a": 1.0, "b": 3.0}) == {"a": 0.25, "b": 0.75}
    assert process_cpu.shares({"a": 0.0}) == {"a": 0.0}


def test_a_meter_samples_only_the_given_processes() -> None:
    meter = Meter("/no/such/home", (os.getpid(),))
    meter.sample(2e9)
    assert [(process.pid, process.parent) for process in meter.processes.values()] == [
        (os.getpid(), os.getppid())
    ]
    (only,) = meter.processes.values()
    assert only.series[0][1] == 0.0
    assert only.series[1][1] > 0.0
