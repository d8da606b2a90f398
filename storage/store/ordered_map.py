"""A parallel `map` with results in the order of the inputs and a limit on the work in progress."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

X = TypeVar("X")
Y = TypeVar("Y")


@contextmanager
def ordered_map(
    work: Callable[[X], Y],
    inputs: Iterable[X],
    *,
    threads: int,
    budget: float,
    cost: Callable[[X], float] = lambda _: 1.0,
) -> Iterator[Iterator[Y]]:
    """Compute `work` of every input on `threads` threads; iterate over the results in order.

        with ordered_map(fetch, names, threads=8, budget=16) as bodies:
            for body in bodies:
                ...

    At the end of the block, work in progress is waited for and the rest is dropped. A generator
    whose block is abandoned does not wait: the garbage collector may end it in the middle of any
    other call, and a wait there can block the process for ever.

    Args:
        budget: limit on the total cost of inputs whose results were not taken yet. One input may
            exceed it alone.

    Raises:
        Exception: that of `work`, in the place of its result. No further work is started then.
    """
    pool = ThreadPoolExecutor(threads)
    is_abandoned = False
    try:
        yield _results(pool, work, inputs, budget, cost)
    except GeneratorExit:
        is_abandoned = True
        raise
    finally:
        pool.shutdown(wait=not is_abandoned, cancel_futures=True)


def _results(
    pool: ThreadPoolExecutor,
    work: Callable[[X], Y],
    inputs: Iterable[X],
    budget: float,
    cost: Callable[[X], float],
) -> Iterator[Y]:
    pending: deque[tuple[float, Future[Y]]] = deque()
    pending_cost = 0.0
    for item in inputs:
        item_cost = cost(item)
        while pending and pending_cost + item_cost > budget:
            oldest_cost, oldest = pending.popleft()
            yield oldest.result()
            pending_cost -= oldest_cost
        pending.append((item_cost, pool.submit(work, item)))
        pending_cost += item_cost
    while pending:
        yield pending.popleft()[1].result()
