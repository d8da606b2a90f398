import json
from dataclasses import dataclass, replace
from typing import Any

import pytest

from storage import layout
from storage.errors import ConfigError, ConflictError, CorruptError, NotFoundError
from storage.formats import json_objects
from storage.records.rollouts import Order, Prompt
from storage.run import orders
from storage.run.quarantine import quarantine_object
from storage.store.object_store import ObjectStore
from tests.support.stores.damaging_store import damages_first_reads


def order(number: int) -> Order:
    return Order(
        number=number,
        prompts=(Prompt("p", {"question": "1+1=?"}),),
        samples_per_prompt=8,
        seed=7,
        seen=(),
        cursor={"next": 1},
    )


def test_an_order_is_read_back(memory_store: ObjectStore) -> None:
    orders.create(memory_store, order(0))
    assert orders.read(memory_store, 0) == order(0)


@pytest.mark.parametrize("fields", [{"question": "x" * 200_000}, {"x": [0] * 5_000}])
def test_an_order_of_very_many_samples_of_large_prompts_is_neither_stored_nor_read(
    memory_store: ObjectStore, fields: dict[str, Any]
) -> None:
    few = replace(order(0), prompts=(Prompt("p", fields),), samples_per_prompt=20_000)
    many = replace(few, number=1, samples_per_prompt=65_536)
    orders.create(memory_store, few)
    assert orders.read(memory_store, 0) == few
    with pytest.raises(ConfigError, match=r"65,536 samples of .* or data.samples_per_prompt smal"):
        orders.create(memory_store, many)
    memory_store.put(layout.order(1), json_objects.seal(many))
    with pytest.raises(CorruptError, match=r"1.json has 65,536 samples of prompts of \d+,\d+ byte"):
        orders.read(memory_store, 1)


@pytest.mark.parametrize(
    ("depth", "why"), [(31, ""), (32, "is nested deeper than 32 levels"), (150, "is nested deeper")]
)
def test_an_order_whose_prompts_are_nested_deeply_is_damaged(
    depth: int, why: str, memory_store: ObjectStore
) -> None:
    """A shard has its prompts deeper: workers could not store it."""
    nested: Any = 0
    for _ in range(depth):
        nested = [nested]
    prompts = (Prompt("p/0", {"question": nested}),)
    order = Order(number=7, prompts=prompts, samples_per_prompt=1, seed=0, seen=(), cursor={})
    memory_store.put(layout.order(7), json_objects.seal(order))
    if not why:
        assert orders.read(memory_store, 7).prompts == prompts
    else:
        with pytest.raises(CorruptError, match=rf"^orders/.*7\.json: .* of prompt 'p/0' {why}"):
            orders.read(memory_store, 7)


def test_an_order_of_more_episodes_than_those_of_the_run_is_damaged(
    memory_store: ObjectStore,
) -> None:
    orders.create(memory_store, order(0))
    assert orders.read(memory_store, 0, 8) == order(0)
    with pytest.raises(CorruptError, match=r"00000000\.json has 8 episodes; at most 7 are allowed"):
        orders.read(memory_store, 0, 7)


def test_the_second_writer_of_an_order_loses(memory_store: ObjectStore) -> None:
    orders.create(memory_store, order(0))
    with pytest.raises(ConflictError):
        orders.create(memory_store, order(0))


def test_the_next_number_follows_the_last_order(memory_store: ObjectStore) -> None:
    assert orders.next_number(memory_store) == 0
    for number in range(5):
        orders.create(memory_store, order(number))
    assert orders.next_number(memory_store) == 5
    assert orders.next_number(memory_store, start=3) == 5


def test_an_order_that_does_not_exist_is_not_found(memory_store: ObjectStore) -> None:
    with pytest.raises(NotFoundError):
        orders.read(memory_store, 0)


def test_an_order_under_another_number_is_corrupt(memory_store: ObjectStore) -> None:
    orders.create(memory_store, order(0))
    memory_store.put("orders/00000001.json", memory_store.get("orders/00000000.json"))
    with pytest.raises(CorruptError, match=r"orders/00000001\.json holds order 0"):
        orders.read(memory_store, 1)


def test_a_changed_order_is_corrupt(memory_store: ObjectStore) -> None:
    orders.create(memory_store, order(0))
    body = memory_store.get("orders/00000000.json")
    memory_store.put(
        "orders/00000000.json", body.replace(b'"samples_per_prompt":8', b'"samples_per_prompt":4')
    )
    with pytest.raises(
        CorruptError, match=r"orders/00000000\.json does not have the checksum it carries"
    ):
        orders.read(memory_store, 0)


def test_an_order_that_arrives_damaged_once_is_read_again(memory_store: ObjectStore) -> None:
    orders.create(memory_store, order(0))
    assert orders.read(damages_first_reads(memory_store), 0) == order(0)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (
            Prompt("p", {"question": "\ud800"}),
            r"the prompt 'p' cannot be stored in order 0: its 'question' has the lone surrogate",
        ),
        (Prompt("\ud800", {"question": "1"}), r"its id has the lone surrogate"),
        (Prompt("\ud800", {"id": "1", "question": "1"}), r"its id has the lone surrogate"),
        (
            Prompt("p", {"question": "1", "at": {"w": [0] * 500_000}}),
            r"its 'at.w' exceeds the limit of 500,000 values",
        ),
        (
            Prompt("p", {"question": "1", "at": object()}),
            r"its 'at' is a object, for which JSON has no type",
        ),
    ],
)
def test_a_prompt_that_cannot_be_stored_is_named_and_nothing_is_written(
    memory_store: ObjectStore, prompt: Prompt, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        orders.create(memory_store, replace(order(0), prompts=(prompt,)))
    assert memory_store.list() == []


def test_an_order_with_more_values_than_are_read_is_refused_and_not_written(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_objects, "VALUES_MAX", 2000)
    prompts = tuple(Prompt(f"p/{number}", {"x": [0] * 450}) for number in range(5))
    with pytest.raises(
        ConfigError,
        match=r"order 0 cannot be stored: the value to store has 22\d\d JSON values in \d+ bytes; at "
        r"most 2000 are read; .*: make data\.prompts_per_order smaller",
    ):
        orders.create(memory_store, replace(order(0), prompts=prompts))
    assert memory_store.list() == []
    orders.create(memory_store, replace(order(0), prompts=prompts[:4]))
    assert orders.read(memory_store, 0).prompts == prompts[:4]


def test_an_order_whose_prompt_has_a_number_as_id_is_refused_and_not_written(
    memory_store: ObjectStore,
) -> None:
    numbered: Any = 7
    prompt = Prompt(numbered, {"question": "1+1=?"})
    with pytest.raises(
        ConfigError,
        match=r"order 0 could not be read back: orders/00000000\.json is not a Order: prompts\.0\.id: "
        r"Input should be a valid string; correct the source of data\.prompts",
    ):
        orders.create(memory_store, replace(order(0), prompts=(prompt,)))
    assert memory_store.list() == []


def test_the_end_of_the_orders_is_written_once(memory_store: ObjectStore) -> None:
    assert not orders.has_ended(memory_store)
    orders.create_end(memory_store, 5)
    orders.create_end(memory_store, 7)
    assert orders.has_ended(memory_store)
    assert json.loads(memory_store.get("orders/end.json"))["orders"] == 5


@pytest.mark.parametrize("lost", range(5))
def test_the_next_number_passes_over_one_lost_order(memory_store: ObjectStore, lost: int) -> None:
    for number in range(6):
        if number != lost:
            orders.create(memory_store, order(number))
    assert orders.next_number(memory_store) == 6
    assert [orders.is_lost(memory_store, number) for number in (lost, 6)] == [True, False]


def test_a_lost_newest_order_with_a_lease_or_a_shard_or_in_quarantine_keeps_its_number(
    memory_store: ObjectStore,
) -> None:
    orders.create(memory_store, order(0))
    memory_store.create(layout.shard(1), b"a shard")
    quarantine_object(memory_store, layout.order(2), "there is no object")
    memory_store.create(layout.lease(3, 0), b"a lease")
    lost = [orders.is_lost(memory_store, number) for number in (1, 2, 3, 4)]
    assert lost == [True, True, True, False]
    assert orders.next_number(memory_store) == 4


def test_an_order_that_is_written_during_the_check_is_not_lost(memory_store: ObjectStore) -> None:
    @dataclass
    class WritesDuringTheCheck:
        """Creates orders 0 and 1 when the existence of order 1 is asked for."""

        backend: Any

        def __getattr__(self, verb: str) -> Any:
            return getattr(self.backend, verb)

        def exists(self, path: str) -> bool:
            if path.endswith(layout.order(1)):
                for number in (0, 1):
                    orders.create(memory_store, order(number))
            return bool(self.backend.exists(path))

    run = replace(memory_store, backend=WritesDuringTheCheck(memory_store.backend))
    assert not orders.is_lost(run, 0)
