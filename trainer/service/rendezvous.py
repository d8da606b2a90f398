"""The rendezvous of a trainer's nodes, over the entries of a round in the run's store."""

import logging
import threading
import time
from dataclasses import replace

from storage.coordination import rounds
from storage.coordination.lifetime import Lifetime
from storage.errors import AstraFlowError, ConflictError
from storage.records.control import Round, WaitReason
from trainer.engines.ranks.rendezvous import RankLostError

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 2.0
"""Least pause between two reads of whether the round is over."""
CHECK_PATIENCE_S = 5.0
JOIN_INTERVAL_S = 0.2
"""Pause between two polls for an open round, or for nodes that join."""


class StoreRendezvous:
    """A round, as one process of it sees it (protocol `Rendezvous`). For any thread."""

    def __init__(self, lifetime: Lifetime, of: Round) -> None:
        self.round = of
        self._lifetime = lifetime
        self._lock = threading.Lock()
        self._check_at_s = 0.0
        self._is_over = False

    def create(self, name: str, value: bytes) -> None:
        self._lifetime.retry(
            "publishing an address to the other nodes",
            lambda: rounds.write_entry(self._lifetime.run, self.round, name, value),
        )

    def read(self, name: str) -> bytes | None:
        return self._lifetime.retry(
            "reading the addresses of the other nodes",
            lambda: rounds.read_entry(self._lifetime.run, self.round, name),
        )

    def pause(self, seconds: float) -> None:
        """As in the protocol; StoppedError when the service must stop."""
        self._lifetime.wait(seconds)
        self._lifetime.check()
        if why := self.why_over():
            raise RankLostError(why)

    def why_over(self) -> str:
        with self._lock:
            if not self._is_over and time.monotonic() >= self._check_at_s:
                run = replace(self._lifetime.run, patience_s=CHECK_PATIENCE_S)
                try:
                    self._is_over = rounds.is_over(run, self.round)
                except AstraFlowError as error:
                    log.warning("cannot read whether the round is over: %s", error)
                self._check_at_s = time.monotonic() + CHECK_INTERVAL_S
        if not self._is_over:
            return ""
        return (
            f"round {self.round.number} of the nodes of {self.round.policy} is over: one of them, "
            "or the trainer itself, was started again"
        )

    def end(self) -> None:
        run = replace(self._lifetime.run, patience_s=CHECK_PATIENCE_S)
        try:
            rounds.end(run, self.round)
        except AstraFlowError as error:
            log.warning("cannot end round %d: %s", self.round.number, error)


def lead(lifetime: Lifetime, policy: str, num_nodes: int) -> StoreRendezvous:
    """Open a round and wait until all other nodes have joined it.

    StoppedError when the service must stop.
    """
    while True:
        opened = lifetime.retry("opening a round", lambda: rounds.open_next(lifetime.run, policy))
        rendezvous = StoreRendezvous(lifetime, opened)
        missing = list(range(1, num_nodes))
        try:
            while missing := [node for node in missing if rendezvous.read(_joined(node)) is None]:
                lifetime.heartbeat.update(
                    wait_reason=WaitReason.NODES,
                    note=f"waits for node {', '.join(map(str, missing))} of {num_nodes}",
                )
                rendezvous.pause(JOIN_INTERVAL_S)
        except RankLostError as error:
            log.info("opening another round: %s", error)
            continue
        lifetime.heartbeat.update(wait_reason=WaitReason.NONE, note="")
        return rendezvous


def join(lifetime: Lifetime, policy: str, node: int) -> StoreRendezvous:
    """Wait for an open round that this node has not joined, and join it.

    A round that it has joined already was joined by a process that is gone: it is ended, so that
    the others do not wait for that process.

    StoppedError when the service must stop.
    """
    while True:
        opened = lifetime.retry("reading rounds", lambda: rounds.read_open(lifetime.run, policy))
        if opened is not None:
            rendezvous = StoreRendezvous(lifetime, opened)
            try:
                rendezvous.create(_joined(node), b"")
            except ConflictError:
                log.warning("node %d was in round %d before: it ends", node, opened.number)
                rendezvous.end()
            else:
                lifetime.heartbeat.update(wait_reason=WaitReason.NONE, note="")
                return rendezvous
        lifetime.heartbeat.update(
            wait_reason=WaitReason.NODES, note=f"waits for the trainer of {policy} to start a round"
        )
        lifetime.wait(JOIN_INTERVAL_S)
        lifetime.check()


def _joined(node: int) -> str:
    return f"node/{node}"
