"""`usage.json`: what a run has used of its budget, overwritten by the supervisor at every poll.

It exists once a budget is set. A restarted supervisor continues from it.
"""

from storage import layout
from storage.errors import CorruptError, NotFoundError
from storage.formats.json_objects import decode, encode
from storage.records.control import Usage
from storage.store.object_store import ObjectStore, read_twice

BYTES_MAX = 20_000_000
"""Enough for 100,000 members."""


def write(run: ObjectStore, usage: Usage) -> None:
    """Overwrite the run's usage."""
    run.put(layout.USAGE, encode(usage))


def read(run: ObjectStore) -> Usage | None:
    """Read the run's usage; None before it exists.

    Raises CorruptError for a damaged one: it is then unknown what the run has cost, and a person
    must repair it.
    """
    try:
        return read_twice(lambda: _decode(run.get(layout.USAGE)))
    except NotFoundError:
        return None
    except CorruptError as error:
        raise CorruptError(
            f"what the run has used of its budget cannot be read: {error}; put "
            f"{run.url}/{layout.USAGE} back from a copy, or delete it: hours and tokens are then "
            "counted from the run's other objects, and the cost begins with the newest attempt of "
            "each member"
        ) from error


def _decode(body: bytes) -> Usage:
    if len(body) > BYTES_MAX:
        raise CorruptError(f"{layout.USAGE} has {len(body):,} bytes; it has at most {BYTES_MAX:,}")
    return decode(Usage, body, layout.USAGE)
