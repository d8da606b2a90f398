"""Rounds: the tries of a trainer's nodes to train together. Only the newest one counts.

    rounds/solver/00000001.json   opened by the leader; the nodes join it: 00000001/…
    rounds/solver/00000002.json   closed, by a node that was started again: round 1 is over
    rounds/solver/00000003.json   opened by the next leader

Rounds are created once and numbered without gaps, so a process of an older round finds out with one
request that it is over. In a round, processes exchange a few small values, each as an entry that is
created once.
"""

import hashlib
import logging

from storage import layout
from storage.errors import ConflictError, CorruptError, NotFoundError
from storage.formats.json_objects import seal, unseal
from storage.records.control import Round, RoundEntry
from storage.store.galloping_search import first_absent
from storage.store.object_store import ObjectStore, read_twice

log = logging.getLogger(__name__)

ROUNDS_MAX = 1_000_000
"""Rounds of one policy. More are no work of trainers."""
VALUE_BYTES_MAX = 2**16


def open_next(run: ObjectStore, policy: str) -> Round:
    """Open the round after the newest one, which is then over, and delete the entries of all
    older ones.

    CorruptError where the policy has more than ROUNDS_MAX rounds.
    """
    while True:
        number = newest_number(run, policy) + 1
        if number > ROUNDS_MAX:
            raise CorruptError(
                f"{policy} has more than {ROUNDS_MAX:,} rounds, which no trainers made: delete "
                f"{run.url}/{layout.rounds(policy)}/"
            )
        opened = Round(policy=policy, number=number, is_open=True)
        try:
            run.create(layout.round_start(policy, number), seal(opened))
        except ConflictError:
            continue
        _delete_older_entries(run, opened)
        return opened


def read_open(run: ObjectStore, policy: str) -> Round | None:
    """Return the newest round; None where nodes cannot join it, or cannot read it."""
    number = newest_number(run, policy)
    if not number:
        return None
    try:
        newest = read(run, policy, number)
    except (NotFoundError, CorruptError) as error:
        log.warning("an unreadable round counts as over: %s", error)
        return None
    return newest if newest.is_open else None


def read(run: ObjectStore, policy: str, number: int) -> Round:
    """Read a round, over or not; NotFoundError for none, CorruptError for an invalid one."""
    key = layout.round_start(policy, number)
    found = read_twice(lambda: unseal(Round, run.get(key), key))
    if (found.policy, found.number) != (policy, number):
        raise CorruptError(f"{key} holds round {found.number} of {found.policy}")
    return found


def newest_number(run: ObjectStore, policy: str) -> int:
    """Return the number of the newest round; 0 without one."""

    def exists(number: int) -> bool:
        return number <= ROUNDS_MAX and run.exists(layout.round_start(policy, number))

    return first_absent(exists, 1) - 1


def is_over(run: ObjectStore, of: Round) -> bool:
    """Return whether a newer round exists."""
    return run.exists(layout.round_start(of.policy, of.number + 1))


def end(run: ObjectStore, of: Round) -> None:
    """End the round by a closed one after it; nothing happens where it is over."""
    closed = Round(policy=of.policy, number=of.number + 1, is_open=False)
    try:
        run.create(layout.round_start(of.policy, closed.number), seal(closed))
    except ConflictError:
        return


def write_entry(run: ObjectStore, of: Round, name: str, value: bytes) -> None:
    """Create an entry of the round.

    Raises:
        ConflictError: it exists.
        ValueError: the value is larger than VALUE_BYTES_MAX.
    """
    if len(value) > VALUE_BYTES_MAX:
        raise ValueError(
            f"{name!r} has {len(value):,} bytes; at most {VALUE_BYTES_MAX:,} are stored"
        )
    entry = RoundEntry(name=name, value=value.hex())
    run.create(entry_key(of, name), seal(entry))


def read_entry(run: ObjectStore, of: Round, name: str) -> bytes | None:
    """Return the value of an entry; None where it does not exist.

    CorruptError when it is damaged, the copy of another, or too large.
    """
    try:
        return read_entry_key(run, entry_key(of, name))
    except NotFoundError:
        return None


def read_entry_key(run: ObjectStore, key: str) -> bytes:
    """Return the value of the entry in the object `key`; NotFoundError for none, CorruptError as
    `read_entry`.
    """
    entry = read_twice(lambda: unseal(RoundEntry, run.get(key), key))
    if key.rpartition("/")[2] != f"{_digest(entry.name)}.json":
        raise CorruptError(f"{key} holds the entry {entry.name[:100]!r}, whose key is another")
    try:
        value = bytes.fromhex(entry.value)
    except ValueError:
        raise CorruptError(f"{key} has a value that is not hexadecimal") from None
    if len(value) > VALUE_BYTES_MAX:
        raise CorruptError(f"{key} has {len(value):,} bytes; at most {VALUE_BYTES_MAX:,} are read")
    return value


def entry_key(of: Round, name: str) -> str:
    """Return the key of an entry; its name is any text."""
    return layout.round_entry(of.policy, of.number, _digest(name))


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _delete_older_entries(run: ObjectStore, newest: Round) -> None:
    """Delete the entries of older rounds; the rounds themselves are kept, as their numbers are."""
    folder = layout.rounds(newest.policy)
    for name in run.folders(folder):
        if name.isdecimal() and int(name) < newest.number:
            for key in run.list(f"{folder}/{name}"):
                run.delete(key)
