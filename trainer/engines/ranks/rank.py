"""The main program of ranks 1, 2, …: it makes the calls of the leader's engine on its own engine.

    python -m trainer.engines.ranks.rank CALLS [RENDEZVOUS]      descriptors of connected sockets

Calls are messages (`messages.py`); by the other socket the parent answers for the rendezvous of
several nodes.

The leader holds the standard input open. When it ends, however it ends, so does this process.
"""

import os
import select
import signal
import socket
import sys
import threading
from typing import Any

from torch._C._distributed_c10d import Store  # torch.distributed has it without a type

from storage.records.types import Json
from storage.run import batches
from trainer.config import TrainConfig
from trainer.engines.engine import TrainEngine, make_rank_engine
from trainer.engines.ranks import process_group
from trainer.engines.ranks.messages import read_tensors, receive, send
from trainer.engines.ranks.process_group import Seat
from trainer.engines.ranks.rendezvous import ParentRendezvous
from trainer.engines.ranks.rendezvous_store import RendezvousStore

PARENT_CHECK_S = 1.0
WITH_TENSORS = ("set_weights", "set_reference", "load")
CALLS = ("step", "weights", "save", *WITH_TENSORS)


class Rank:
    """The engines of this process, by the leader's numbers."""

    def __init__(self, store: Store | None = None) -> None:
        self._store = store
        self._engines: dict[int, TrainEngine] = {}

    def call(self, header: Json, content: memoryview) -> None:
        """Make one call; its result is the leader's alone."""
        for number in header["dropped"]:
            self._engines.pop(number, None)
        name = header["call"]
        if name == "join":
            process_group.join(Seat(**header["seat"]), self._store)
            return
        if name == "new":
            config = TrainConfig.model_validate(header["config"])
            engine = make_rank_engine(config, header["model_config"], header["seed"])
            self._engines[header["engine"]] = engine
            return
        if name not in CALLS:
            raise ValueError(f"{name!r} is no call of a train engine")
        engine = self._engines[header["engine"]]
        arguments: list[Any] = []
        if name == "step":
            arguments = [batches.decode(bytes(content))]
        elif name in WITH_TENSORS:
            arguments = [read_tensors(header["tensors"], content), *header["arguments"]]
        getattr(engine, name)(*arguments)


def error_reply(error: Exception) -> Json:
    """Return the reply to a call that failed."""
    return {"kind": type(error).__name__, "message": str(error)}


def main(descriptor: int, rendezvous: int | None = None) -> None:
    """Make the leader's calls until it ends."""
    for number in (signal.SIGTERM, signal.SIGINT):  # the leader decides when its ranks end
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_leader, args=[os.getppid()], daemon=True).start()
    channel = socket.socket(fileno=descriptor)
    store = None
    if rendezvous is not None:
        store = RendezvousStore(ParentRendezvous(socket.socket(fileno=rendezvous)))
    rank = Rank(store)
    send(channel, {})
    while True:
        try:
            header, content = receive(channel)
        except (EOFError, OSError):
            os._exit(0)
        try:
            rank.call(header, content)
            reply: Json = {}
        except Exception as error:  # the leader decides what becomes of it
            reply = error_reply(error)
        del content
        send(channel, reply)


def _end_with_the_leader(leader: int) -> None:
    """Wait for the end of the standard input, or for another parent, then end this process."""
    while os.getppid() == leader:
        if select.select([0], [], [], PARENT_CHECK_S)[0] and not os.read(0, 4096):
            break
    os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
