"""Orders as JSON objects, numbered from 0 without gaps, and `end.json`, which ends them."""

from functools import partial

from storage import layout
from storage.errors import ConfigError, ConflictError, CorruptError, NotFoundError
from storage.formats import json_values
from storage.formats.json_objects import num_values, seal, unseal
from storage.records.control import OrdersEnd
from storage.records.rollouts import Order, Prompt
from storage.run.quarantine import is_quarantined
from storage.store.galloping_search import first_absent
from storage.store.object_store import ObjectStore, read_twice

SHOWN_MAX = 200
"""Characters of a name in an error."""
EPISODES_MAX = 2**16
"""Episodes of one order: a worker starts a task for each of them at once."""
COPIED_VALUES_MAX, COPIED_BYTES_MAX = 2**27, 2**33
"""JSON values and bytes of an order, times `samples_per_prompt`: each episode copies the fields of
its prompt and the tokens of its question. No order of up to 64 samples has more.
"""


def create(run: ObjectStore, order: Order) -> None:
    """Create the order.

    Raises:
        ConflictError: an order of this number exists.
        ConfigError: it has more than EPISODES_MAX episodes, a prompt that JSON cannot represent,
            or more values than `read` accepts.
    """
    check_size(len(order.prompts), order.samples_per_prompt)
    for prompt in order.prompts:
        if fault := fault_of(prompt):
            raise ConfigError(
                f"the prompt {prompt.id[:SHOWN_MAX]!r} cannot be stored in order {order.number}: "
                f"{fault}; correct or remove it in data.prompts, and start the run under another id"
            )
    key = layout.order(order.number)
    run.create(key, _readable_body(order, key))


def fault_of(prompt: Prompt) -> str:
    """Return why the prompt cannot be stored, such as `its 'question' has …`; empty if it can."""
    if found := json_values.fault(prompt.id):
        return f"its id {found[1]}"
    if found := json_values.fault(prompt.fields):
        path, reason = (text[:SHOWN_MAX] for text in found)
        return f"its {path!r} {reason}" if path else f"it {reason}"
    return ""


def check_size(num_prompts: int, samples_per_prompt: int) -> None:
    """Raise ConfigError for an order with more than EPISODES_MAX episodes."""
    if (episodes := max(1, num_prompts) * samples_per_prompt) > EPISODES_MAX:
        raise ConfigError(
            f"an order of {episodes} episodes is too large, at most {EPISODES_MAX} are "
            "allowed: make data.prompts_per_order or data.samples_per_prompt smaller"
        )


def _readable_body(order: Order, key: str) -> bytes:
    """Return the bytes of the order; ConfigError for an order that `read` would reject.

    Nothing replaces a created order, so workers would skip an unreadable one for ever.
    """
    try:
        body = seal(order)
    except ConfigError as error:
        raise ConfigError(
            f"order {order.number} cannot be stored: {error}: make data.prompts_per_order smaller, "
            "or remove large columns from data.prompts, and start the run under another id"
        ) from error
    try:
        _decoded(body, key)
    except CorruptError as error:
        raise ConfigError(
            f"order {order.number} could not be read back: {error}; correct the source of "
            "data.prompts, or make data.prompts_per_order or data.samples_per_prompt smaller, and "
            "start the run under another id"
        ) from error
    return body


def read(run: ObjectStore, number: int, episodes_max: int = EPISODES_MAX) -> Order:
    """Read an order.

    Args:
        episodes_max: episodes of an order of this run, by its recipe.

    Raises:
        NotFoundError: it does not exist.
        CorruptError: it is invalid, or has more episodes.
    """
    key = layout.order(number)
    order = read_twice(lambda: _decoded(run.get(key), key, episodes_max))
    if order.number != number:
        raise CorruptError(f"{key} holds order {order.number}")
    return order


def _decoded(body: bytes, key: str, episodes_max: int = EPISODES_MAX) -> Order:
    order = unseal(Order, body, key)
    if _num_episodes(order) > episodes_max:
        raise CorruptError(
            f"{key} has {_num_episodes(order)} episodes; at most {episodes_max} are allowed"
        )
    for prompt in order.prompts:
        if found := json_values.fault(prompt.fields):
            path, reason = (text[:SHOWN_MAX] for text in found)
            raise CorruptError(f"{key}: {path!r} of prompt {prompt.id[:SHOWN_MAX]!r} {reason}")
    samples = order.samples_per_prompt
    values_max = COPIED_VALUES_MAX // max(1, samples)
    if len(body) * samples > COPIED_BYTES_MAX or num_values(body, values_max) > values_max:
        raise CorruptError(
            f"{key} has {samples:,} samples of prompts of {len(body):,} bytes, which is too much "
            "to copy for each of them"
        )
    return order


def _num_episodes(order: Order) -> int:
    return max(1, len(order.prompts)) * order.samples_per_prompt


def exists(run: ObjectStore, number: int) -> bool:
    """Return whether the order exists."""
    return run.exists(layout.order(number))


def is_lost(run: ObjectStore, number: int) -> bool:
    """Return whether an order does not exist, and was written: the next one, a lease on it, its
    shard, or its place in the quarantine exists. An order that is written meanwhile is not lost.
    """
    was_written = (
        exists(run, number + 1)
        or run.exists(layout.lease(number, 0))
        or run.exists(layout.shard(number))
        or is_quarantined(run, layout.order(number))
    )
    return was_written and not exists(run, number)


def next_number(run: ObjectStore, start: int = 0) -> int:
    """Return the lowest number, not below `start`, that no order has or had."""
    absent = first_absent(partial(exists, run), start)
    while is_lost(run, absent):
        absent = first_absent(partial(exists, run), absent + 1)
    return absent


def create_end(run: ObjectStore, number: int) -> None:
    """Create `end.json`, unless it exists: no further shard is needed, after `number` orders."""
    try:
        run.create(layout.orders_end(), seal(OrdersEnd(number)))
    except ConflictError:
        return


def read_end(run: ObjectStore) -> OrdersEnd | None:
    """Read `end.json`; None where it does not exist, CorruptError for an invalid one."""
    key = layout.orders_end()
    try:
        return read_twice(lambda: unseal(OrdersEnd, run.get(key), key))
    except NotFoundError:
        return None


def has_ended(run: ObjectStore) -> bool:
    """Return whether no further shard is needed, not even for orders that have none yet."""
    return run.exists(layout.orders_end())
