from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from data_ops.algorithms.curators import AcceptAll
from data_ops.algorithms.protocols import Curate
from data_ops.dataflow.order_writer import REFUSALS_MAX, OrderWriter
from data_ops.prompts.stream import PromptStream
from storage import layout
from storage.errors import ConfigError, NotFoundError
from storage.records.rollouts import Order, Prompt, Shard
from storage.records.types import Json
from storage.run import orders, shards
from storage.store.object_store import ObjectStore
from tests.support.runs.builders import shard
from tests.support.runs.workers import write_orders


def ordering(run: ObjectStore, *curators: Curate) -> OrderWriter:
    stream = PromptStream(lambda index: Prompt(f"p/{index}", {"question": str(index)}), None, 0)
    return OrderWriter(run, stream, curators or (AcceptAll(),), prompts_per_order=2, seed=3)


def test_a_run_begins_where_its_recipe_says_and_goes_on_from_its_orders(
    memory_store: ObjectStore,
) -> None:
    def starting_at(position: int) -> OrderWriter:
        stream = PromptStream(lambda index: Prompt(f"p/{index}", {"question": "?"}), None, 0)
        start = {"epoch": 0, "position": position}
        return OrderWriter(
            memory_store, stream, (AcceptAll(),), prompts_per_order=2, seed=3, start=start
        )

    assert ids(write(memory_store, starting_at(7))) == ["p/7", "p/8"]
    assert ids(write(memory_store, starting_at(7))) == ["p/9", "p/10"]


def test_no_prompt_is_made_for_an_order_that_is_too_large(memory_store: ObjectStore) -> None:
    """A `run.json` may give any number of prompts and samples that a setting takes."""

    def make(index: int) -> Prompt:
        raise AssertionError("a prompt was made")

    stream = PromptStream(make, None, 0)
    writer = OrderWriter(memory_store, stream, (), prompts_per_order=2**13 + 1, seed=3)
    with pytest.raises(ConfigError, match="an order of 65544 episodes is too large"):
        writer.draft(samples_per_prompt=8, now_s=0.0)


def write(run: ObjectStore, writer: OrderWriter) -> Order:
    order = writer.draft(samples_per_prompt=4, now_s=12.5)
    orders.create(run, order)
    writer.advance(order)
    return order


def ids(order: Order) -> list[str]:
    return [prompt.id for prompt in order.prompts]


class Odd:
    """Accept odd prompts; after the first observed order, accept only those above ten times its
    number.
    """

    needs_shards = True

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []

    def observe(self, order: Order, shard: Shard) -> None:
        assert order.number == shard.order
        self.seen.append((shard.order, shard.worker))

    def accept(self, prompt: Prompt, draw: np.random.Generator) -> bool:
        number = int(prompt.id.removeprefix("p/"))
        return number % 2 == 1 and all(number > 10 * order for order, _ in self.seen)


def test_orders_follow_the_stream_and_carry_cursor_and_size(memory_store: ObjectStore) -> None:
    writer = ordering(memory_store)
    first, second = write(memory_store, writer), write(memory_store, writer)
    assert (first.number, ids(first), first.cursor) == (
        0,
        ["p/0", "p/1"],
        {"epoch": 0, "position": 2},
    )
    assert (second.number, ids(second), second.cursor) == (
        1,
        ["p/2", "p/3"],
        {"epoch": 0, "position": 4},
    )
    assert (first.samples_per_prompt, first.created_s) == (4, 12.5)
    assert first.seed != second.seed


def test_a_draft_changes_nothing_before_its_commit(memory_store: ObjectStore) -> None:
    writer = ordering(memory_store)
    writer.see(0, shard())
    assert writer.draft(4, 0.0) == writer.draft(4, 0.0)


def test_seen_orders_are_listed_once_in_the_next_order(memory_store: ObjectStore) -> None:
    writer = ordering(memory_store)
    write(memory_store, writer)
    write(memory_store, writer)
    writer.see(1, shard(order=1))
    writer.see(0, shard(order=0))
    writer.see(1, shard(order=1))
    assert write(memory_store, writer).seen == (1, 0)
    assert write(memory_store, writer).seen == ()


def test_an_order_has_the_sampled_tokens_of_all_seen_shards_also_after_a_restart(
    memory_store: ObjectStore,
) -> None:
    writer = ordering(memory_store)
    assert [write(memory_store, writer).tokens for _ in range(3)] == [0, 0, 0]
    writer.see(1, shard(order=1), 6)
    writer.see(0, None, 4)
    writer.see(1, shard(order=1), 6)
    assert write(memory_store, writer).tokens == 10
    assert write(memory_store, writer).tokens == 10
    writer.see(2, None, 5)  # in no order yet: a restarted dataflow ingests it again
    writer = ordering(memory_store)
    writer.see(0, None, 4)
    assert write(memory_store, writer).tokens == 10
    writer.see(2, None, 5)
    assert write(memory_store, writer).tokens == 15


def test_an_order_of_an_earlier_release_does_not_lower_the_sampled_tokens(
    memory_store: ObjectStore,
) -> None:
    writer = ordering(memory_store)
    write(memory_store, writer)
    writer.see(0, None, 4)
    write(memory_store, writer)
    earlier = replace(writer.draft(samples_per_prompt=4, now_s=1.0), tokens=0)
    orders.create(memory_store, earlier)
    assert write(memory_store, ordering(memory_store)).tokens == 4


def test_a_damaged_newest_order_does_not_lower_the_sampled_tokens(
    memory_store: ObjectStore,
) -> None:
    writer = ordering(memory_store)
    write(memory_store, writer)
    writer.see(0, None, 4)
    write(memory_store, writer)
    write(memory_store, writer)
    memory_store.put(layout.order(2), b"torn")
    assert write(memory_store, ordering(memory_store)).tokens == 4


@pytest.mark.parametrize(
    "cursor",
    [
        {"next": 1},
        {"epoch": "a"},
        {"position": -1},
        {"position": 2**128 - 1},
        {"epoch": 2**128 - 1, "position": 0},
    ],
)
def test_an_order_without_a_cursor_leaves_that_of_the_order_before(
    memory_store: ObjectStore, cursor: Json
) -> None:
    """The newest one, too: a run does not end by it."""
    writer = ordering(memory_store)
    write(memory_store, writer)
    orders.create(memory_store, replace(writer.draft(4, 0.0), cursor=cursor))
    writer = ordering(memory_store)
    order = write(memory_store, writer)
    assert (order.number, ids(order)) == (2, ["p/2", "p/3"])
    assert ids(write(memory_store, writer)) == ["p/4", "p/5"]


def test_orders_follow_one_with_as_many_sampled_tokens_as_can_be_read(
    memory_store: ObjectStore,
) -> None:
    writer = ordering(memory_store)
    orders.create(memory_store, replace(writer.draft(4, 0.0), tokens=2**63 - 1))
    writer = ordering(memory_store)
    writer.see(0, None, 4)
    assert write(memory_store, writer).tokens == 2**63 - 1
    assert write(memory_store, ordering(memory_store)).tokens == 2**63 - 1


def test_a_shard_seen_after_the_draft_is_listed_in_the_following_order(
    memory_store: ObjectStore,
) -> None:
    writer = ordering(memory_store)
    writer.see(0, shard())
    order = writer.draft(4, 0.0)
    writer.see(1, shard(order=1))
    orders.create(memory_store, order)
    writer.advance(order)
    assert write(memory_store, writer).seen == (1,)


def test_curators_select_prompts_and_the_cursor_is_after_the_refused_ones(
    memory_store: ObjectStore,
) -> None:
    order = write(memory_store, ordering(memory_store, Odd()))
    assert ids(order) == ["p/1", "p/3"]
    assert order.cursor == {"epoch": 0, "position": 4}


def test_all_curators_must_accept(memory_store: ObjectStore) -> None:
    class Third:
        needs_shards = False

        def observe(self, order: Order, shard: Shard) -> None:
            raise AssertionError("it needs no shards")

        def accept(self, prompt: Prompt, draw: np.random.Generator) -> bool:
            return int(prompt.id.removeprefix("p/")) % 3 == 0

    writer = ordering(memory_store, Odd(), Third())
    writer.see(0, None)
    assert ids(write(memory_store, writer)) == ["p/3", "p/9"]


class Faulty:
    needs_shards = True

    def observe(self, order: Order, shard: Shard) -> None:
        if shard.order:
            raise KeyError(shard.order)

    def accept(self, prompt: Prompt, draw: np.random.Generator) -> Any:
        if prompt.id == "p/1":
            raise KeyError("p/1")


def test_a_curator_that_returns_no_decision_is_named(memory_store: ObjectStore) -> None:
    writer = ordering(memory_store, Faulty())
    with pytest.raises(
        ConfigError, match=r"data\.curate: accept of Faulty failed: it returned a NoneType"
    ):
        write(memory_store, writer)


def test_a_curator_that_raises_is_named(memory_store: ObjectStore) -> None:
    with pytest.raises(
        ConfigError, match=r"^data\.curate: accept of Faulty failed: KeyError: 'p/1'"
    ):
        write(memory_store, ordering(memory_store, Odd(), Faulty()))
    write_orders(memory_store, 2)
    writer = ordering(memory_store, Faulty())
    with pytest.raises(ConfigError, match=r"^data\.curate: observe of Faulty failed: KeyError: 1"):
        writer.see(1, shard(order=1))


def test_a_curator_whose_needs_shards_raises_is_named(memory_store: ObjectStore) -> None:
    class Computed(Faulty):
        @property
        def needs_shards(self) -> bool:  # type: ignore[override]
            raise KeyError("x")

    with pytest.raises(
        ConfigError, match=r"^data\.curate: needs_shards of Computed failed: KeyError: 'x'$"
    ):
        ordering(memory_store, Computed())


def test_a_restart_folds_the_same_shards_in_the_same_order(memory_store: ObjectStore) -> None:
    odd = Odd()
    writer = ordering(memory_store, odd)
    for number in range(3):
        write(memory_store, writer)
        shards.create(memory_store, shard(order=number))
    for number in (2, 0):
        writer.see(number, shards.read(memory_store, number))
    newest = write(memory_store, writer)
    assert ids(newest) == ["p/21", "p/23"]
    writer.see(1, shards.read(memory_store, 1))

    again = Odd()
    restored = ordering(memory_store, again)
    assert again.seen == [(2, "rollout-us-east-0"), (0, "rollout-us-east-0")]
    assert [restored.is_seen(number) for number in range(4)] == [True, False, True, False]
    restored.see(1, shards.read(memory_store, 1))
    assert restored.draft(4, 0.0) == writer.draft(4, 0.0)
    assert again.seen == odd.seen


def test_unreadable_shards_are_seen_but_not_folded(memory_store: ObjectStore) -> None:
    odd = Odd()
    writer = ordering(memory_store, odd)
    write(memory_store, writer)
    memory_store.create(layout.shard(0), b"torn")
    writer.see(0, None)
    assert write(memory_store, writer).seen == (0,)
    assert odd.seen == []
    again = Odd()
    assert ordering(memory_store, again).is_seen(0)
    assert again.seen == []


def test_a_curator_draws_the_same_numbers_after_a_restart(memory_store: ObjectStore) -> None:
    class Coin:
        needs_shards = False

        def observe(self, order: Order, shard: Shard) -> None:
            raise AssertionError("it needs no shards")

        def accept(self, prompt: Prompt, draw: np.random.Generator) -> bool:
            return bool(draw.random() < 0.2)

    writer = ordering(memory_store, Coin())
    write(memory_store, writer)
    assert ids(ordering(memory_store, Coin()).draft(4, 0.0)) == ids(writer.draft(4, 0.0))
    assert ids(writer.draft(4, 0.0)) != ["p/2", "p/3"]


class Drawn:
    """Accept every prompt, and record the random number drawn for each."""

    needs_shards = False

    def __init__(self) -> None:
        self.numbers: list[float] = []

    def observe(self, order: Order, shard: Shard) -> None:
        raise AssertionError("it needs no shards")

    def accept(self, prompt: Prompt, draw: np.random.Generator) -> bool:
        self.numbers.append(float(draw.random()))
        return True


def test_each_order_and_each_curator_has_its_own_random_numbers_from_the_run_seed(
    memory_store: ObjectStore,
) -> None:
    first, second = Drawn(), Drawn()
    writer = ordering(memory_store, first, second)
    for _ in range(2):
        write(memory_store, writer)
    for place, curator in enumerate((first, second)):
        expected = [
            np.random.default_rng([3, order, place]).random(2).tolist() for order in range(2)
        ]
        assert curator.numbers == [number for of_order in expected for number in of_order]
    assert len({*first.numbers, *second.numbers}) == 8


def test_only_the_next_order_can_be_committed(memory_store: ObjectStore) -> None:
    writer = ordering(memory_store)
    order = write(memory_store, writer)
    with pytest.raises(ValueError, match="order 0 is not the next one, 1"):
        writer.advance(order)


def test_curators_that_refuse_every_prompt_are_overruled_after_a_limit(
    memory_store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    class Never:
        needs_shards = False

        def observe(self, order: Order, shard: Shard) -> None:
            raise AssertionError("it needs no shards")

        def accept(self, prompt: Prompt, draw: np.random.Generator) -> bool:
            return False

    order = write(memory_store, ordering(memory_store, Never()))
    assert ids(order) == [f"p/{REFUSALS_MAX}", f"p/{2 * REFUSALS_MAX + 1}"]
    assert "refused 256 prompts in a row" in caplog.text


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_restart_continues_without_a_damaged_or_lost_order(
    memory_store: ObjectStore, is_lost: bool
) -> None:
    writer = ordering(memory_store)
    bodies: list[bytes] = []
    for number in range(3):
        if number:
            shards.create(memory_store, shard(order=number - 1))
            writer.see(number - 1, shards.read(memory_store, number - 1))
        write(memory_store, writer)
        bodies.append(memory_store.get(layout.order(number)))
    memory_store.delete(layout.order(1))
    if not is_lost:
        memory_store.create(layout.order(1), b"torn")

    if is_lost:
        with pytest.raises(NotFoundError):  # a folder that is not mounted has no run.json either
            ordering(memory_store)
    memory_store.put(layout.RUN, b"{}")
    odd = Odd()
    restored = ordering(memory_store, odd)
    assert restored.next_number == 3
    assert [restored.is_seen(number) for number in range(3)] == [False, True, False]
    assert odd.seen == []  # the damaged order was the one to observe with shard 1
    restored.see(0, shards.read(memory_store, 0))
    fourth = write(memory_store, restored)
    assert (fourth.number, fourth.seen, ids(fourth)) == (3, (0,), ["p/7", "p/9"])

    memory_store.put(layout.order(1), bodies[1])
    repaired = Odd()
    assert ordering(memory_store, repaired).is_seen(0)
    assert repaired.seen == [(0, "rollout-us-east-0"), (1, "rollout-us-east-0")]


def test_the_prompts_of_a_damaged_newest_order_are_drawn_again(memory_store: ObjectStore) -> None:
    writer = ordering(memory_store)
    write(memory_store, writer)
    newest = write(memory_store, writer)
    memory_store.put(layout.order(1), b"torn")
    again = ordering(memory_store).draft(4, 0.0)
    assert (again.number, ids(again)) == (2, ids(newest))


def test_a_lost_shard_is_seen_but_not_folded(memory_store: ObjectStore) -> None:
    writer = ordering(memory_store)
    write(memory_store, writer)
    writer.see(0, shard())
    write(memory_store, writer)
    odd = Odd()
    assert ordering(memory_store, odd).is_seen(0)
    assert odd.seen == []
