"""A parallel `map` with results in the order of the inputs and a limit on the work in progress."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

X = TypeVar("X")
Y = TypeVar("Y")


def ordered_map(
    work: Callable[[X], Y],
    inputs: Iterable[X],
    *,
    threads: int,
    budget: float,
    cost: Callable[[X], float] = lambda _: 1.0,
) -> Iterator[Y]:
    """Yield `work` of every input, in the order of the inputs, computed on `threads` threads.

    Args:
        budget: limit on the total cost of inputs whose results were not yielded yet. One input may
            exceed it alone.

    Raises:
        Exception: that of `work`, in the place of its result. No further work is started then.
    """
    pool = ThreadPoolExecutor(threads)
    pending: deque[tuple[float, Future[Y]]] = deque()
    pending_cost = 0.0
    try:
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
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
