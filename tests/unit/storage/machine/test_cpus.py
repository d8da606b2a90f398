"""The number of CPUs of a process."""

import os

import pytest

from storage.machine.cpus import num_cpus


def test_only_the_cpus_that_the_process_may_use_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 7}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert num_cpus() == 2


@pytest.mark.parametrize(("machine", "counted"), [(8, 8), (None, 1)])
def test_those_of_the_machine_are_counted_where_a_process_cannot_be_limited(
    monkeypatch: pytest.MonkeyPatch, machine: int | None, counted: int
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    assert num_cpus() == counted
