"""Orders as objects: created once, contiguous from 0. Knows nothing of who makes or plays them."""

from storage import layout
from storage.errors import CorruptError
from storage.json_objects import decode, encode
from storage.objects import ObjectStore
from storage.probing import first_absent
from storage.records import Order


def commit(run: ObjectStore, order: Order) -> None:
    """Create the order; ConflictError when its number is taken."""
    run.create(layout.order(order.number), encode(order))


def read(run: ObjectStore, number: int) -> Order:
    """NotFoundError when it does not exist yet, CorruptError when its bytes are not this order."""
    key = layout.order(number)
    order = decode(Order, run.get(key), key)
    if order.number != number:
        raise CorruptError(f"{key} holds order {order.number}")
    return order


def next_number(run: ObjectStore, start: int = 0) -> int:
    """The first number from `start` on that no order has."""
    return first_absent(lambda number: run.exists(layout.order(number)), start)
