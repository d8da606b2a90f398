"""The leader of a node's ranks: their processes, and calls that all ranks make together.

    node 0   rank 0: this process     engine.step(batch)   ◀─┐
             rank 1: child process    engine.step(batch)   ◀─┤ collectives of
             the other nodes ──▶ node 1   rank 2: its leader ◀─┤ torch.distributed
                                          rank 3: …          ◀─┘

Each rank has an engine of the same class. A call is made on all of them with the same arguments;
the result is that of rank 0. The leader of another node does with the calls of rank 0 what rank 0
does (`node.py`). An error that all ranks raise is the leader's. A rank that dies, or is the only
one to fail, ends the call and all ranks: RankLostError.
"""

import atexit
import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from storage.machine import gpus
from storage.machine.temporary_folders import temporary_folder
from storage.records.types import Json
from trainer.config import TrainConfig
from trainer.engines.ranks import process_group
from trainer.engines.ranks.children import Child, stand_still, start_rank
from trainer.engines.ranks.messages import Content, receive, send
from trainer.engines.ranks.node_link import NodeLink, call_node
from trainer.engines.ranks.rendezvous import RankLostError, Rendezvous
from trainer.engines.ranks.rendezvous_store import RendezvousStore
from trainer.placement import rank_gpus

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 1.0
PATIENCE_S = 30.0
"""After the first rank failed in a call, time in which the others must end it, too."""
CONNECT_S = 300.0
"""Time in which the nodes must connect after they know all addresses. Gloo sets no useful limit: a
connection that hangs would be waited for as long as a node may wait for a call.
"""


@dataclass(eq=False)
class _Call:
    """What the ranks have reached in one call."""

    name: str
    waiting: list[Child]
    local_ended: threading.Event = field(default_factory=threading.Event)
    failed_at_s: float | None = None
    """When the first rank failed."""
    killed: bool = False
    """Whether the ranks were ended, so that errors of collectives followed."""

    def fail(self) -> None:
        if self.failed_at_s is None:
            self.failed_at_s = time.monotonic()


class Ranks:
    """The ranks of a node: this process as the first, its child processes, and for rank 0 also the
    other nodes.
    """

    def __init__(
        self, config: TrainConfig, node: int = 0, rendezvous: Rendezvous | None = None
    ) -> None:
        """Start the processes and join the group of all nodes.

        Args:
            rendezvous: by which several nodes find each other.

        Raises:
            ConfigError: a rank has no GPU.
            RankLostError: a rank ended at its start.
        """
        process_group.check_gpus(config)
        self.place = place_of(config)
        self.engines: weakref.WeakSet[Any] = weakref.WeakSet()
        """Those that are in use."""
        self.dropped: list[int] = []
        """Numbers of engines that are no longer used; sent with the next call."""
        self.is_open = True
        self.over = ""
        """Why the round of several nodes is over; empty while it goes on."""
        self._node, self._rendezvous = node, rendezvous
        self._idle = threading.Event()
        self._connecting: RendezvousStore | None = None
        """By which the nodes find each other, until they are connected."""
        self._temporary = ExitStack()
        visible = gpus.names(rank_gpus(config), os.environ) or ("",) * config.ranks
        first = node * config.ranks
        self._children = [
            start_rank(first + local, config.num_ranks, visible[local], rendezvous)
            for local in range(1, config.ranks)
        ]
        atexit.register(self.close)
        if rendezvous is not None:
            threading.Thread(target=self._follow, args=[rendezvous], daemon=True).start()
        self._together("start", lambda: None)
        self.nodes = self._join(config, first)
        """The group of the first ranks of all nodes; None for one node."""
        if self.nodes is not None and node == 0:
            for other in range(1, config.nodes):
                channel, thread = call_node(NodeLink(self.nodes, other * config.ranks))
                name = f"node {other} of {config.nodes}"
                self._children.append(Child(name, channel, thread=thread))

    def _join(self, config: TrainConfig, first: int) -> dist.ProcessGroup | None:
        folder = self._temporary.enter_context(temporary_folder("astraflow-ranks-"))
        meeting = str(folder / "rendezvous")
        for rank, child in enumerate(self._children, first + 1):
            theirs = asdict(process_group.seat(config, rank, meeting))
            self._send(child, {"call": "join", "seat": theirs, "dropped": []}, None)
        own = process_group.seat(config, first, meeting)
        store = RendezvousStore(self._rendezvous) if self._rendezvous is not None else None

        def join() -> dist.ProcessGroup | None:
            self._connecting = store
            group = process_group.join(own, store)
            self._connecting = None
            return group

        return self._together("join", join)

    def call(self, header: Json, content: Content | None, local: Callable[[], T]) -> T:
        """Make one call on all ranks; `local` is that of this process, whose result is returned."""
        if not self.is_open:
            raise RankLostError(
                f"the ranks of this trainer have ended, and {header['call']} needs them; restart it"
            )
        if self.over:
            self._lose()
            raise RankLostError(self.over)
        for child in self._children:
            self._send(child, header, content)
        return self._together(header["call"], local)

    def close(self) -> None:
        """End all ranks but this one. Idempotent."""
        if not self.is_open:
            return
        self.is_open = False
        atexit.unregister(self.close)
        self._kill()
        for child in self._children:
            child.close()
        self.nodes = None
        process_group.leave()
        self._temporary.close()

    def _lose(self) -> None:
        """End all ranks, those of other nodes too."""
        if self._rendezvous is not None:
            self._rendezvous.end()
        self.close()

    def _send(self, child: Child, header: Json, content: Content | None) -> None:
        try:
            send(child.channel, header, content)
        except OSError:
            child.is_lost = True  # it ended since the last call; `_together` reports it

    def _together(self, name: str, local: Callable[[], T]) -> T:
        """Run rank 0's part while the others do theirs, and wait for all."""
        for child in self._children:
            child.reply = None
        call = _Call(name, list(self._children))
        self._idle.clear()
        watcher = threading.Thread(target=self._watch, args=[call], daemon=True)
        watcher.start()
        try:
            result = local()
        except Exception as error:  # of any engine; it is raised again, or is the cause
            is_first = call.failed_at_s is None
            call.fail()
            self._end(call, watcher)
            same = {"kind": type(error).__name__, "message": str(error)}
            if not call.killed and all(child.reply == same for child in self._children):
                raise  # the ranks are where they were before the call
            lost = self._fault(name)
            self._lose()
            if lost is None or (is_first and not any(child.is_lost for child in self._children)):
                raise
            raise lost from error
        except BaseException:  # such as Ctrl-C: the other ranks would wait for this one
            self._lose()
            raise
        self._end(call, watcher)
        if (lost := self._fault(name)) is not None:
            self._lose()
            raise lost
        return result

    def _end(self, call: _Call, watcher: threading.Thread) -> None:
        call.local_ended.set()
        watcher.join()
        self._idle.set()

    def _fault(self, name: str) -> RankLostError | None:
        """Return the error for the first rank that ended or failed; None where all succeeded."""
        restart = "a restarted trainer resumes from its checkpoint"
        if self.over:
            return RankLostError(f"{self.over}; {restart}")
        for child in sorted(self._children, key=lambda child: not child.is_lost):
            if child.is_lost:
                return RankLostError(f"{child.name} {child.ended()} during {name}; {restart}")
            if child.reply and "kind" in child.reply:
                what = f"{child.reply['kind']}: {child.reply['message']}"
                return RankLostError(f"{child.name} alone failed during {name} ({what}); {restart}")
            if child.reply is None:
                return RankLostError(
                    f"{child.name} did not end {name} within {PATIENCE_S:g} s after another rank "
                    f"had failed; {restart}"
                )
        return None

    def _watch(self, call: _Call) -> None:
        """Collect the replies. Kill all ranks when one is lost, so that no other waits for it."""
        seen: dict[int, tuple[float, float]] = {}
        while call.waiting or (call.failed_at_s is not None and not call.local_ended.is_set()):
            channels = {child.channel: child for child in call.waiting}
            for channel in select.select(list(channels), [], [], POLL_S)[0]:
                child = channels[channel]
                try:
                    child.reply = receive(channel)[0]
                except (EOFError, OSError):
                    child.is_lost = True
                    child.ended()
                call.waiting.remove(child)
                if child.is_lost or "kind" in (child.reply or {}):
                    call.fail()
            if call.local_ended.is_set() and stand_still(call.waiting, seen):
                call.fail()
            is_late = call.failed_at_s is not None and (
                time.monotonic() > call.failed_at_s + PATIENCE_S
            )
            if is_late or any(child.is_lost for child in self._children):
                break
        else:
            return
        call.killed = True
        if self._rendezvous is not None:
            self._rendezvous.end()
        self._kill()
        process_group.abort()

    def _kill(self) -> None:
        for child in self._children:
            child.kill()

    def _follow(self, rendezvous: Rendezvous) -> None:
        """End the ranks of this node when the round is over, also in the middle of a call."""
        while self.is_open and not self.over:
            self.over = rendezvous.why_over()
            if not self.over and self._connects_too_long():
                log.error("the nodes have not connected within %g s: the round ends", CONNECT_S)
                rendezvous.end()
            time.sleep(POLL_S)
        if not self.is_open:
            return
        log.warning("%s: the ranks of this node end", self.over)
        self._kill()
        process_group.abort()
        if not self._idle.wait(PATIENCE_S):
            # Nothing else interrupts a collective of Gloo with a machine that is gone.
            log.critical("a call does not end, %s: this process ends", self.over)
            os._exit(1)

    def _connects_too_long(self) -> bool:
        store = self._connecting
        return store is not None and time.monotonic() > store.unused_since_s + CONNECT_S


def place_of(config: TrainConfig) -> str:
    """Return what the ranks of a trainer are. Example: `1 × 2 ranks on cuda 0, 1`."""
    device = f"{config.device} {', '.join(map(str, rank_gpus(config)))}".rstrip()
    return f"{config.nodes} × {config.ranks} ranks on {device}"
