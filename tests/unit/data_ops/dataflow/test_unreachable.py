from dataclasses import replace

from data_ops.dataflow.unreachable import REPLACED_MAX, UnreachableOrders
from storage.store.object_store import ObjectStore


def test_a_limited_number_of_unreachable_orders_is_replaced(memory_store: ObjectStore) -> None:
    orders = UnreachableOrders(memory_store)
    for number in reversed(range(REPLACED_MAX + 3)):
        orders.add(number, "a bad sector")
    assert orders.replaced == set(range(REPLACED_MAX))
    orders.discard(0)
    assert orders.replaced == set(range(1, REPLACED_MAX + 1))


def test_the_note_names_the_lowest_order_and_counts_the_others(memory_store: ObjectStore) -> None:
    orders = UnreachableOrders(memory_store)
    assert orders.note == ""
    orders.add(7, "a bad sector")
    orders.add(3, "the file system failed at /s/shards/00000003.arrow")
    assert orders.note.startswith(
        "the run goes on without order 3 and 1 more, since this fails while other objects can be "
        "read: the file system failed at /s/shards/00000003.arrow; put a good copy"
    )


def test_an_unreachable_order_is_tried_again_with_little_patience(
    memory_store: ObjectStore,
) -> None:
    patient = UnreachableOrders(replace(memory_store, patience_s=45.0))
    assert patient._impatient_run.patience_s == 1.0
    assert UnreachableOrders(replace(memory_store, patience_s=0.5))._impatient_run.patience_s == 0.5
