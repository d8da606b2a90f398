"""How the processes of one training on several nodes find each other.

    torch.distributed ─▶ RendezvousStore ─▶ Rendezvous ─▶ the object store of the run
       of rank 0 of a node                               (`trainer/service/rendezvous.py`)

    torch.distributed ─▶ RendezvousStore ─▶ ParentRendezvous ═ socket ═▶ answer_child ─▶ Rendezvous
       of the node's other ranks, which have no credentials

Nothing listens for it: a process writes the address at which it waits for the others as an entry
that is created once, and polls for those of the others. This module does not import torch.
"""

import socket
import threading
import time
from typing import Any, Protocol

from storage.errors import ConflictError, TransientError
from trainer.engines.ranks.messages import receive, send


class RankLostError(TransientError):
    """A rank ended, or failed alone. A restarted trainer resumes from its checkpoint."""


class Rendezvous(Protocol):
    """One round of the nodes of a trainer (`storage/coordination/rounds.py`)."""

    def create(self, name: str, value: bytes) -> None:
        """Publish a value to the others, once; ConflictError when the name has one."""

    def read(self, name: str) -> bytes | None:
        """Return the value of a name; None while it has none."""

    def pause(self, seconds: float) -> None:
        """Wait for other processes of the round.

        Raises RankLostError when the round is over, and another error when this process must stop.
        """

    def why_over(self) -> str:
        """Return why the round is over; empty while it goes on, as far as is known."""

    def end(self) -> None:
        """End the round for all, if that is possible now."""


class ParentRendezvous:
    """The rendezvous of a rank that has no store: its parent process reads and writes for it."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._lock = threading.Lock()

    def create(self, name: str, value: bytes) -> None:
        if not self._asked(create=name, value=value.hex()):
            raise ConflictError(f"{name!r} is set already")

    def read(self, name: str) -> bytes | None:
        value = self._asked(read=name)
        return None if value is None else bytes.fromhex(value)

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)
        self._asked(pause=0.0)

    def why_over(self) -> str:
        return ""  # the parent ends this process when the round is over

    def end(self) -> None:
        raise NotImplementedError("the parent decides when a round ends")

    def _asked(self, **question: Any) -> Any:
        with self._lock:
            send(self._channel, question)
            answer = receive(self._channel)[0]
        if "error" in answer:
            raise RankLostError(answer["error"])
        return answer["value"]


def answer_child(channel: socket.socket, rendezvous: Rendezvous) -> None:
    """Read and write for a `ParentRendezvous` at the other end, until it ends."""
    with channel:
        while True:
            try:
                question = receive(channel)[0]
                try:
                    answer = {"value": _answer(question, rendezvous)}
                except Exception as error:  # the rank fails with it
                    answer = {"error": str(error)}
                send(channel, answer)
            except (EOFError, OSError):
                return


def _answer(question: dict[str, Any], rendezvous: Rendezvous) -> str | bool | None:
    if "create" in question:
        try:
            rendezvous.create(question["create"], bytes.fromhex(question["value"]))
        except ConflictError:
            return False
        return True
    if "read" in question:
        value = rendezvous.read(question["read"])
        return None if value is None else value.hex()
    rendezvous.pause(0.0)
    return None
