"""The leader's side of several ranks: their processes, and calls that all ranks make together.

    RankedEngine.step(batch)
        ├─ rank 0: this process     engine.step(batch)   ◀─┐ collectives of
        ├─ rank 1: child process    engine.step(batch)   ◀─┤ torch.distributed
        └─ …                        engine.step(batch)   ◀─┘

Each rank has an engine of the same class. A call on the leader's engine is made on all of them with
the same arguments; the result is that of rank 0. An error that all ranks raise is the leader's. A
rank that dies, or is the only one to fail, ends the call and all ranks: RankLostError.
"""

import atexit
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TypeVar

import psutil

from storage.errors import ConfigError, TransientError
from storage.machine import gpu_locks, gpus
from storage.machine.temporary_folders import temporary_folder
from storage.records.batches import Batch
from storage.records.types import Json
from storage.records.weights import HostTensor
from storage.run import batches
from trainer.config import TrainConfig
from trainer.engines.engine import ReferenceEngine, make_rank_engine
from trainer.engines.ranks import process_group
from trainer.engines.ranks.environment import rank_environment
from trainer.engines.ranks.messages import (
    Content,
    content_of,
    receive,
    send,
    tensors_content,
)
from trainer.placement import rank_gpus

T = TypeVar("T")

POLL_S = 1.0
PATIENCE_S = 30.0
"""After the first rank failed in a call, time in which the others must end it, too."""
STALLED_S = 120.0
"""After rank 0 has ended its part of a call, time in which another may use no CPU time."""
STANDARD_ERROR = 2


class RankLostError(TransientError):
    """A rank ended, or failed alone. A restarted trainer resumes from its checkpoint."""


@dataclass(eq=False)
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    channel: socket.socket
    reply: Json | None = None
    """Of the current call; None: it is not ended."""
    is_lost: bool = False


@dataclass(eq=False)
class _Call:
    """What the ranks have reached in one call."""

    name: str
    waiting: list[_Child]
    local_ended: threading.Event = field(default_factory=threading.Event)
    failed_at_s: float | None = None
    """When the first rank failed."""
    killed: bool = False
    """Whether the ranks were ended, so that errors of collectives followed."""

    def fail(self) -> None:
        if self.failed_at_s is None:
            self.failed_at_s = time.monotonic()


class Ranks:
    """The ranks of this process's training: itself as rank 0, and its child processes."""

    def __init__(self, config: TrainConfig) -> None:
        """Start the processes and join their group.

        Raises:
            ConfigError: a rank has no GPU.
            RankLostError: a rank ended at its start.
        """
        process_group.check_gpus(config)
        self.num_ranks = num_ranks = config.ranks
        self.place = _place(config)
        visible = gpus.names(rank_gpus(config), os.environ) or ("",) * num_ranks
        self.engines: weakref.WeakSet[RankedEngine] = weakref.WeakSet()
        self.dropped: list[int] = []
        """Numbers of engines that are no longer used; sent with the next call."""
        self.is_open = True
        self._temporary = ExitStack()
        folder = self._temporary.enter_context(temporary_folder("astraflow-ranks-"))
        self._children = [_start(rank, visible[rank]) for rank in range(1, num_ranks)]
        atexit.register(self.close)
        self._together("start", lambda: None)
        meeting = str(folder / "rendezvous")
        for child in self._children:
            device = process_group.rank_device(config, child.rank)
            arguments = [meeting, child.rank, num_ranks, device]
            self._send(child, {"call": "join", "arguments": arguments, "dropped": []}, None)
        own = process_group.rank_device(config, 0)
        self._together("join", lambda: process_group.join(meeting, 0, num_ranks, own))

    def call(self, header: Json, content: Content | None, local: Callable[[], T]) -> T:
        """Make one call on all ranks; `local` is that of rank 0, whose result is returned."""
        if not self.is_open:
            raise RankLostError(
                f"the ranks of this trainer have ended, and {header['call']} needs them; restart it"
            )
        header = {**header, "dropped": list(self.dropped)}
        self.dropped.clear()
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
            child.process.wait()
            child.channel.close()
            if child.process.stdin:
                child.process.stdin.close()
        process_group.leave()
        self._temporary.close()

    def _send(self, child: _Child, header: Json, content: Content | None) -> None:
        try:
            send(child.channel, header, content)
        except OSError:
            child.is_lost = True  # it ended since the last call; `_together` reports it

    def _together(self, name: str, local: Callable[[], T]) -> T:
        """Run rank 0's part while the others do theirs, and wait for all."""
        for child in self._children:
            child.reply = None
        call = _Call(name, list(self._children))
        watcher = threading.Thread(target=self._watch, args=[call], daemon=True)
        watcher.start()
        try:
            result = local()
        except Exception as error:
            is_first = call.failed_at_s is None
            call.fail()
            self._end(call, watcher)
            same = {"kind": type(error).__name__, "message": str(error)}
            if not call.killed and all(child.reply == same for child in self._children):
                raise  # the ranks are where they were before the call
            lost = self._fault(name)
            self.close()
            if lost is None or (is_first and not any(child.is_lost for child in self._children)):
                raise
            raise lost from error
        except BaseException:
            self.close()
            raise
        self._end(call, watcher)
        if (lost := self._fault(name)) is not None:
            self.close()
            raise lost
        return result

    def _end(self, call: _Call, watcher: threading.Thread) -> None:
        call.local_ended.set()
        watcher.join()

    def _fault(self, name: str) -> RankLostError | None:
        """Return the error for the first rank that ended or failed; None where all succeeded."""
        restart = "a restarted trainer resumes from its checkpoint"
        for child in sorted(self._children, key=lambda child: not child.is_lost):
            where = f"rank {child.rank} of {self.num_ranks}"
            if child.is_lost:
                return RankLostError(f"{where} {_ended(child)} during {name}; {restart}")
            if child.reply and "kind" in child.reply:
                what = f"{child.reply['kind']}: {child.reply['message']}"
                return RankLostError(f"{where} alone failed during {name} ({what}); {restart}")
            if child.reply is None:
                return RankLostError(
                    f"{where} did not end {name} within {PATIENCE_S:g} s after another rank had "
                    f"failed; {restart}"
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
                    child.process.wait()
                call.waiting.remove(child)
                if child.is_lost or "kind" in (child.reply or {}):
                    call.fail()
            if call.local_ended.is_set() and _stand_still(call.waiting, seen):
                call.fail()
            is_late = call.failed_at_s is not None and (
                time.monotonic() > call.failed_at_s + PATIENCE_S
            )
            if is_late or any(child.is_lost for child in self._children):
                break
        else:
            return
        call.killed = True
        self._kill()
        process_group.abort()

    def _kill(self) -> None:
        for child in self._children:
            child.process.kill()


class RankedEngine:
    """A train engine on several ranks (contract: `trainer/engines/engine.py`).

    The engines of one process share its ranks.
    """

    def __init__(self, config: TrainConfig, model_config: Json, seed: int) -> None:
        self._ranks = _ranks(config)
        self._number = next(_numbers)
        header: Json = {
            "config": config.model_dump(mode="json"),
            "model_config": model_config,
            "seed": seed,
        }
        self._engine = self._call(
            "new", lambda: make_rank_engine(config, model_config, seed), header
        )
        self._ranks.engines.add(self)
        weakref.finalize(self, self._ranks.dropped.append, self._number)

    def set_weights(self, tensors: Mapping[str, HostTensor]) -> None:
        entries, content = tensors_content(tensors)
        header: Json = {"tensors": entries, "arguments": []}
        with content:
            self._call("set_weights", lambda: self._engine.set_weights(tensors), header, content)

    def set_reference(self, tensors: Mapping[str, HostTensor]) -> None:
        engine = self._engine
        assert isinstance(engine, ReferenceEngine), "the built-in engines are"
        entries, content = tensors_content(tensors)
        header: Json = {"tensors": entries, "arguments": []}
        with content:
            self._call("set_reference", lambda: engine.set_reference(tensors), header, content)

    def step(self, batch: Batch) -> dict[str, float]:
        body = batches.encode(batch)
        batches.decode(body)  # what no rank can read is refused before a rank has it
        with content_of([body]) as content:
            return self._call("step", lambda: self._engine.step(batch), {}, content)

    def weights(self) -> dict[str, HostTensor]:
        return self._call("weights", self._engine.weights)

    def save(self) -> tuple[dict[str, HostTensor], Json]:
        return self._call("save", self._engine.save)

    def load(self, tensors: Mapping[str, HostTensor], state: Json) -> None:
        entries, content = tensors_content(tensors)
        header: Json = {"tensors": entries, "arguments": [state]}
        with content:
            self._call("load", lambda: self._engine.load(tensors, state), header, content)

    def _call(
        self,
        name: str,
        local: Callable[[], T],
        header: Json | None = None,
        content: Content | None = None,
    ) -> T:
        named = {**(header or {}), "call": name, "engine": self._number}
        return self._ranks.call(named, content, local)


_numbers = iter(range(sys.maxsize))
_current: Ranks | None = None


def _ranks(config: TrainConfig) -> Ranks:
    """Return the ranks of this process; start them if there are none.

    ConfigError while engines with another number of ranks or device are in use.
    """
    global _current
    if _current is not None and _current.is_open:
        if (_current.num_ranks, _current.place) == (config.ranks, _place(config)):
            return _current
        if _current.engines:
            raise ConfigError(
                f"train.ranks {config.ranks} on {_place(config)}: this process trains already with "
                f"{_current.num_ranks} ranks on {_current.place}; use another process"
            )
        _current.close()
    _current = Ranks(config)
    return _current


def _place(config: TrainConfig) -> str:
    """Return where the ranks compute: `cpu`, or `cuda 0, 1`."""
    return f"{config.device} {', '.join(map(str, rank_gpus(config)))}".rstrip()


def _start(rank: int, gpu: str) -> _Child:
    """Start the process of a rank, which sees one GPU; none is given to ranks on a CPU."""
    own, its = socket.socketpair()
    with its:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trainer.engines.ranks.rank", str(its.fileno())],
            stdin=subprocess.PIPE,
            stdout=STANDARD_ERROR,
            pass_fds=[its.fileno(), *gpu_locks.descriptors()],
            env=rank_environment(os.environ, gpu),
            start_new_session=True,
        )
    return _Child(rank, process, own)


def _stand_still(children: list[_Child], seen: dict[int, tuple[float, float]]) -> bool:
    """Return whether a child has used no CPU time for STALLED_S.

    `seen` has the CPU seconds of each process that were seen last, and when they were first seen.
    """
    now_s = time.monotonic()
    for pid in (child.process.pid for child in children):
        with suppress(psutil.Error):
            used_s = round(sum(psutil.Process(pid).cpu_times()[:2]), 1)
            if pid not in seen or seen[pid][0] != used_s:
                seen[pid] = used_s, now_s
            if now_s - seen[pid][1] > STALLED_S:
                return True
    return False


def _ended(child: _Child) -> str:
    status = child.process.wait()
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"
