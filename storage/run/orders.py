"""Orders as objects: created once, contiguous from 0, and the object that ends them. Knows nothing
of who makes or plays them.
"""

from storage import layout
from storage.errors import ConfigError, ConflictError, CorruptError
from storage.formats import json_values
from storage.formats.json_objects import seal, unseal
from storage.records.control import OrdersEnd
from storage.records.rollouts import Order
from storage.store.galloping_search import first_absent
from storage.store.object_store import ObjectStore, read_twice

EPISODES_MAX = 2**16
"""Episodes of one order. Workers make a task of each at once."""


def commit(run: ObjectStore, order: Order) -> None:
    """Create the order.

    ConflictError when its number is taken, ConfigError when it has more than EPISODES_MAX episodes,
    or a prompt that JSON cannot hold.
    """
    if _episodes(order) > EPISODES_MAX:
        raise ConfigError(
            f"an order of {_episodes(order)} episodes is too large, at most {EPISODES_MAX} are "
            "played: "
            "make data.prompts_per_order or data.samples_per_prompt smaller"
        )
    for prompt in order.prompts:
        if wrong := json_values.fault({"id": prompt.id, **prompt.fields}):
            raise ConfigError(
                f"the prompt {prompt.id!r} cannot be stored in order {order.number}: its "
                f"{wrong[0]!r} {wrong[1]}; "
                "correct or remove it in data.prompts, and start the run under another id"
            )
    run.create(layout.order(order.number), seal(order))


def read(run: ObjectStore, number: int) -> Order:
    """NotFoundError when it does not exist yet, CorruptError when its bytes are not this order."""
    key = layout.order(number)
    order = read_twice(lambda: unseal(Order, run.get(key), key))
    if order.number != number:
        raise CorruptError(f"{key} holds order {order.number}")
    if _episodes(order) > EPISODES_MAX:
        raise CorruptError(
            f"{key} asks for {_episodes(order)} episodes; at most {EPISODES_MAX} are played"
        )
    return order


def _episodes(order: Order) -> int:
    return max(1, len(order.prompts)) * order.samples_per_prompt


def next_number(run: ObjectStore, start: int = 0) -> int:
    """The first number from `start` on that no order has."""
    return first_absent(lambda number: run.exists(layout.order(number)), start)


def end(run: ObjectStore, number: int) -> None:
    """Say that no further shard is needed, after `number` orders; the first to say so stands."""
    try:
        run.create(layout.orders_end(), seal(OrdersEnd(number)))
    except ConflictError:
        return


def ended(run: ObjectStore) -> bool:
    """Whether no further shard is needed, whatever orders are unanswered: that the object stands
    says so.
    """
    return run.exists(layout.orders_end())
