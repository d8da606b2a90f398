"""Measure the CPU time of a Prefect task, in the submitting process and in an idle server.

Two flows run one after the other, with few tasks and with many, and are measured for the same time:
the difference is the cost of the tasks, without that of flow and server.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

FEW, MANY = 20, 220
SPAN_S = 25.0
"""Time from the start of a flow until the server has recorded all its events."""


@dataclass(frozen=True)
class TaskCost:
    """CPU milliseconds of one task."""

    client_ms: float
    server_ms: float

    @property
    def total_ms(self) -> float:
        return self.client_ms + self.server_ms


@dataclass(frozen=True)
class Spent:
    """CPU seconds of a flow with `tasks` tasks."""

    tasks: int
    client_s: float
    server_s: float


def cost(few: Spent, many: Spent) -> TaskCost:
    """Compute the cost of one task: 10 tasks in 1 s and 110 tasks in 2 s give 10 ms a task."""
    tasks = many.tasks - few.tasks
    return TaskCost(
        1000 * (many.client_s - few.client_s) / tasks, 1000 * (many.server_s - few.server_s) / tasks
    )


def measure(server_pid: int) -> TaskCost:
    """Run the two flows, after `deployments.stack.environment.adopt` set the server's address."""
    run = _flow()
    run(FEW)  # imports, connections, caches
    time.sleep(SPAN_S / 5)
    return cost(_measured(run, FEW, server_pid), _measured(run, MANY, server_pid))


def _measured(run: Callable[[int], None], tasks: int, server_pid: int) -> Spent:
    client, server = psutil.Process(), psutil.Process(server_pid)
    before = _cpu_s(client), _cpu_s(server)
    end_s = time.monotonic() + SPAN_S
    run(tasks)
    time.sleep(max(0.0, end_s - time.monotonic()))
    return Spent(tasks, _cpu_s(client) - before[0], _cpu_s(server) - before[1])


def _flow() -> Callable[[int], None]:
    from prefect import flow, task
    from prefect.cache_policies import NO_CACHE

    @task(
        name="nothing",
        task_run_name="nothing {orders}",
        cache_policy=NO_CACHE,
        persist_result=False,
    )
    def nothing(orders: list[int]) -> int:
        return len(orders)

    @flow(name="task-cost")
    def task_cost(tasks: int) -> None:
        for future in [nothing.submit([number]) for number in range(tasks)]:
            future.result()

    return task_cost


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
