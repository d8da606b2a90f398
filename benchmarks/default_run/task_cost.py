"""What one Prefect task costs in CPU: in the process that submits it, and in the server. Needs a
server that runs nothing else.

Two flows run in turn, one with few tasks and one with many, and each is watched for the same time:
the difference is the tasks' alone, since whatever server and flow do anyway cancels.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

FEW, MANY = 20, 220
SPAN_S = 25.0
"""From the start of a flow until the server has written down all that it heard of it."""


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
    """CPU seconds of a flow with so many tasks."""

    tasks: int
    client_s: float
    server_s: float


def cost(few: Spent, many: Spent) -> TaskCost:
    """Of one task, from two flows. Example: 10 tasks in 1 s and 110 tasks in 2 s make 10 ms a
    task.
    """
    tasks = many.tasks - few.tasks
    return TaskCost(
        1000 * (many.client_s - few.client_s) / tasks, 1000 * (many.server_s - few.server_s) / tasks
    )


def measure(server_pid: int) -> TaskCost:
    """Runs the two flows. This process must already know the server's address
    (`deployments.stack.environment.adopt`).
    """
    run = _flow()
    run(FEW)  # imports, connections, caches
    time.sleep(SPAN_S / 5)
    return cost(_watched(run, FEW, server_pid), _watched(run, MANY, server_pid))


def _watched(run: Callable[[int], None], tasks: int, server_pid: int) -> Spent:
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
