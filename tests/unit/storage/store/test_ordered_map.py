import threading
from collections.abc import Iterator

import pytest

from storage.store.ordered_map import ordered_map
from tests.support.patience import PATIENCE_S


def test_results_are_in_the_order_of_the_inputs() -> None:
    second_done = threading.Event()

    def work(number: int) -> int:
        if number == 0:
            assert second_done.wait(PATIENCE_S)
        if number == 1:
            second_done.set()
        return number * 10

    with ordered_map(work, range(20), threads=4, budget=8) as results:
        assert list(results) == [number * 10 for number in range(20)]


@pytest.mark.parametrize(("budget", "most"), [(1, 1), (25, 2), (30, 3), (5, 1)])
def test_pending_work_is_within_the_budget_or_one_input(budget: float, most: int) -> None:
    begun: list[int] = []
    with ordered_map(
        begun.append, range(12), threads=12, budget=budget, cost=lambda _: 10.0
    ) as results:
        for taken, _ in enumerate(results):
            assert len(begun) <= taken + 1 + most


def test_each_consumed_result_frees_its_part_of_the_budget() -> None:
    pulled: list[int] = []

    def inputs() -> Iterator[int]:
        for number in range(12):
            pulled.append(number)
            yield number

    with ordered_map(
        lambda number: number, inputs(), threads=3, budget=30, cost=lambda _: 10.0
    ) as results:
        # three in work, and the next input taken
        assert [(taken, len(pulled)) for taken in results] == [
            (taken, min(12, taken + 4)) for taken in range(12)
        ]


def test_a_failure_is_raised_in_order_and_no_new_work_is_started() -> None:
    begun: list[int] = []

    def inputs() -> Iterator[int]:
        for number in range(100):
            begun.append(number)
            yield number

    def work(number: int) -> int:
        if number == 3:
            raise ValueError("three")
        return number

    with ordered_map(work, inputs(), threads=2, budget=4) as results:
        assert [next(results) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="three"):
            next(results)
    assert len(begun) <= 9


def test_work_in_progress_at_the_end_of_the_block_is_finished_and_the_rest_dropped() -> None:
    begun, let_go, ended = [], threading.Event(), []

    def work(number: int) -> int:
        begun.append(number)
        if number:
            assert let_go.wait(PATIENCE_S)
            ended.append(number)
        return number

    waiting = threading.Timer(0.2, let_go.set)

    def consume() -> None:
        with ordered_map(work, range(10), threads=2, budget=6) as results:
            assert next(results) == 0
            waiting.start()
            raise KeyError("of the consumer")

    with pytest.raises(KeyError, match="of the consumer"):
        consume()
    assert sorted(ended) == sorted(number for number in begun if number)
    assert len(begun) <= 3
    waiting.join()


def test_a_generator_that_is_abandoned_in_the_block_does_not_wait() -> None:
    begun, let_go, ended = threading.Event(), threading.Event(), threading.Event()

    def work(number: int) -> int:
        if number:
            begun.set()
            assert let_go.wait(PATIENCE_S)
            ended.set()
        return number

    def consume() -> Iterator[int]:
        with ordered_map(work, range(10), threads=1, budget=6) as results:
            yield from results

    consumer = consume()
    assert next(consumer) == 0
    assert begun.wait(PATIENCE_S)
    del consumer  # as the garbage collector does, in any thread and within any call
    assert not ended.is_set()
    let_go.set()
    assert ended.wait(PATIENCE_S)
