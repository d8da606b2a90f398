"""Promotion logs: decisions as JSON objects of the store, numbered from 1 without gaps.

    promotions/{name}/00000001.json  00000002.json  …      each created once, shared by all runs

The log is the only record of which versions are in use. Its objects are never deleted.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from storage import layout
from storage.errors import UNREADABLE, ConfigError, CorruptError, NotFoundError
from storage.formats.json_objects import seal, unseal
from storage.plain_names import RUN_ID
from storage.records.promotions import PromotionDecision
from storage.store.object_store import ObjectStore, read_twice

READ_THREADS = 16
NUMBER_MAX = 2**63 - 1
DECISION_BYTES_MAX = 1_000_000
"""Limit for one decision: a table of a hundred data sets has 50 kB."""


def create(store: ObjectStore, decision: PromotionDecision) -> None:
    """Create the decision.

    Raises:
        ConflictError: a decision of this number exists.
        ConfigError: it could not be read back, such as one with more than 100 policies.
    """
    key = layout.promotion(decision.name, decision.number)
    if decision.number > NUMBER_MAX:
        raise ConfigError(
            f"no decision can follow number {decision.number - 1:,}; if nobody has made so many, "
            f"delete {store.url}/{layout.promotion(decision.name, decision.number - 1)}"
        )
    body = seal(decision)
    try:
        _decoded(body, key)
    except CorruptError as error:
        raise ConfigError(f"the decision cannot be stored: {error}") from error
    store.create(key, body)


def read(store: ObjectStore, name: str, number: int) -> PromotionDecision:
    """Read a decision; NotFoundError when there is none, CorruptError for an invalid one."""
    key = layout.promotion(name, number)
    decision = read_twice(lambda: _decoded(store.get(key), key))
    if (decision.name, decision.number) != (name, number):
        raise CorruptError(f"{key} holds decision {decision.number} of {decision.name}")
    return decision


@dataclass(frozen=True)
class PromotionLog:
    """All decisions of one name, in the order of their numbers."""

    name: str
    readable: tuple[PromotionDecision, ...]
    unreadable: Mapping[int, str]
    """Number → why the decision cannot be read. Several missing ones in a row are one entry, with
    the number of the last: a single object may have any number.
    """

    @property
    def next_number(self) -> int:
        """The lowest number that no decision has or had."""
        numbers = [*(decision.number for decision in self.readable), *self.unreadable]
        return max(numbers, default=0) + 1


def read_log(store: ObjectStore, name: str) -> PromotionLog:
    """Read every decision of a name; one that cannot be read is listed with the reason.

    Raises ConfigError for an invalid name, and for a folder that cannot be listed.
    """
    keys = store.list(layout.promotions(name))
    numbers = [number for number in layout.numbers(keys, partial(layout.promotion, name)) if number]
    unreadable = _missing(name, numbers)

    def read_one(number: int) -> PromotionDecision | str:
        try:
            return read(store, name, number)
        except (*UNREADABLE, NotFoundError) as error:
            return str(error)

    readable: list[PromotionDecision] = []
    with ThreadPoolExecutor(READ_THREADS) as pool:
        results = list(pool.map(read_one, numbers))
    for number, result in zip(numbers, results, strict=True):
        if isinstance(result, PromotionDecision):
            readable.append(result)
        else:
            unreadable[number] = result
    return PromotionLog(name, tuple(readable), dict(sorted(unreadable.items())))


def _missing(name: str, numbers: Sequence[int]) -> dict[int, str]:
    """Return last number → fault of each gap in the ascending numbers of the decisions."""
    missing: dict[int, str] = {}
    for before, number in pairwise([0, *numbers]):
        first, last = before + 1, number - 1
        if first == last:
            fault = "is missing, and a later decision exists"
        else:
            fault = f"to {last:08d}.json are missing, and a later decision exists"
        if first <= last:
            missing[last] = f"{layout.promotion(name, first)} {fault}"
    return missing


def names(store: ObjectStore) -> list[str]:
    """List the names that have a promotion log."""
    return [name for name in store.folders(layout.PROMOTIONS) if RUN_ID.fullmatch(name)]


def _decoded(body: bytes, key: str) -> PromotionDecision:
    if len(body) > DECISION_BYTES_MAX:
        raise CorruptError(
            f"{key} has {len(body):,} bytes; a decision has at most {DECISION_BYTES_MAX:,}"
        )
    return unseal(PromotionDecision, body, key)
