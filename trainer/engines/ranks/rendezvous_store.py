"""The store of torch.distributed over a rendezvous: how groups of processes are formed."""

import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from torch._C._distributed_c10d import Store  # torch.distributed has it without a type

from storage.errors import ConflictError, CorruptError
from trainer.engines.ranks.rendezvous import RankLostError, Rendezvous

POLL_S, POLL_MAX_S = 0.02, 0.5
"""First and longest pause between two polls for an entry; it doubles with each poll."""
WAIT_MAX = timedelta(minutes=30)
"""How long an entry is waited for where torch sets no limit."""
COUNTER_MAX = 2**63 - 1
"""Counters of torch.distributed have 64 bits."""
_AMOUNT = re.compile(rb"-?[0-9]{1,19}")


class RendezvousStore(Store):
    """The store by which torch.distributed forms groups, over the entries of a round.

    A name is either set to one value, by any number of ranks, or a counter.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        super().__init__()
        self._rendezvous = rendezvous
        self.unused_since_s = time.monotonic()
        """When the last call ended, by the monotonic clock; infinite during a call."""

    def set(self, key: str, value: bytes | str) -> None:
        """Set a value; ConflictError when the name has another one."""
        body = value.encode() if isinstance(value, str) else bytes(value)
        with self._used():
            try:
                self._rendezvous.create(key, body)
            except ConflictError:
                if self._rendezvous.read(key) != body:
                    raise

    def get(self, key: str) -> bytes:
        self.wait([key])
        with self._used():
            value = self._value(key)
        assert value is not None, "values are never deleted while the round goes on"
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which is the sum of entries that are numbered without gaps."""
        with self._used():
            total, number = self._count(key)
            while amount:
                try:
                    self._rendezvous.create(_slot(key, number), b"%d" % amount)
                except ConflictError:
                    total, number = self._count(key, number, total)
                    continue
                return total + amount
            return total

    def check(self, keys: Sequence[str]) -> bool:
        with self._used():
            return all(self._value(key) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta = WAIT_MAX) -> None:
        end_s = time.monotonic() + timeout.total_seconds()
        with self._used():
            for key in keys:
                pause_s = POLL_S
                while self._value(key) is None:
                    if time.monotonic() > end_s:
                        raise RankLostError(
                            f"no other rank set {key!r} within {timeout}; a restarted trainer "
                            "resumes from its checkpoint"
                        )
                    self._rendezvous.pause(pause_s)
                    pause_s = min(2 * pause_s, POLL_MAX_S)

    @contextmanager
    def _used(self) -> Iterator[None]:
        self.unused_since_s = math.inf
        try:
            yield
        finally:
            self.unused_since_s = time.monotonic()

    def _value(self, key: str) -> bytes | None:
        value = self._rendezvous.read(key)
        if value is not None:
            return value
        total, number = self._count(key)
        return b"%d" % total if number else None

    def _count(self, key: str, number: int = 0, total: int = 0) -> tuple[int, int]:
        """Return the sum of the counter's entries and the number of the first absent one."""
        while (value := self._rendezvous.read(_slot(key, number))) is not None:
            total, number = total + _amount(key, value), number + 1
            if abs(total) > COUNTER_MAX:
                raise CorruptError(f"the counter {key[:100]!r} of the ranks exceeds 64 bits")
        return total, number


def _amount(key: str, value: bytes) -> int:
    """Return what an entry adds to its counter; CorruptError for one that no rank wrote."""
    if _AMOUNT.fullmatch(value) is None:
        raise CorruptError(
            f"the counter {key[:100]!r} of the ranks has an entry {value[:40]!r}, which is no "
            "whole number"
        )
    return int(value)


def _slot(key: str, number: int) -> str:
    return f"{key}#{number}"
