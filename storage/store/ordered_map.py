"""Work that runs ahead on threads, and whose results come in order. Knows nothing of what the work
is.
"""

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
    """`work` of every input, in the order of the inputs, on up to `threads` threads.

    What is in work or waits to be taken costs at most `budget` together, but one input is always
    worked on. What `work` raises is raised in its place; nothing new is begun then.
    """
    pool = ThreadPoolExecutor(threads)
    ahead: deque[tuple[float, Future[Y]]] = deque()
    spent = 0.0
    try:
        for one in inputs:
            price = cost(one)
            while ahead and spent + price > budget:
                paid, first = ahead.popleft()
                yield first.result()
                spent -= paid
            ahead.append((price, pool.submit(work, one)))
            spent += price
        while ahead:
            yield ahead.popleft()[1].result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
