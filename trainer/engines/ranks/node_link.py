"""Calls of the leader to another node, and their replies, over the group of nodes.

    leader.py ═ socket ═ call_node ──Gloo──▶ calls_of_leader ═ socket ═ node.py
                             ◀──────reply──────

At both ends a message is one of `messages.py`. Between them it is three tensors or more: the sizes
of header and content, the header, and the content in pieces. Nothing is pickled, and sizes are
checked.
"""

import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from storage.records.types import Json
from trainer.engines.ranks.messages import Content, content_of, receive, send

log = logging.getLogger(__name__)

PIECE_BYTES = 2**26
HEADER_BYTES_MAX = 2**26
CONTENT_BYTES_MAX = 2**42


@dataclass(frozen=True)
class NodeLink:
    """One end of the connection between the first rank of this node and that of another."""

    group: dist.ProcessGroup
    peer: int
    """Rank at the other end."""

    def send(self, header: Json, content: memoryview) -> None:
        """Send a message; ValueError when it is larger than the other end accepts."""
        body = json.dumps(header).encode()
        _check_sizes(len(body), len(content))
        self._send(torch.tensor([len(body), len(content)]))
        for buffer in (memoryview(body), content):
            for start in range(0, len(buffer), PIECE_BYTES):
                # A copy: torch has no tensor of memory that cannot be written.
                piece = bytearray(buffer[start : start + PIECE_BYTES])
                self._send(torch.frombuffer(piece, dtype=torch.uint8))

    def receive(self, content_bytes_max: int = CONTENT_BYTES_MAX) -> tuple[Json, Content]:
        """Receive a message, whose content the caller closes.

        Raises:
            RuntimeError: the other end is gone.
            ValueError: the message is not one of `send`.
        """
        sizes = self._received(torch.empty(2, dtype=torch.int64))
        header_bytes, content_bytes = sizes.tolist()
        _check_sizes(header_bytes, content_bytes, content_bytes_max)
        header = json.loads(b"".join(self._pieces(header_bytes)))
        return header, content_of(self._pieces(content_bytes))

    def _pieces(self, num_bytes: int) -> Iterator[memoryview]:
        for start in range(0, num_bytes, PIECE_BYTES):
            size = min(PIECE_BYTES, num_bytes - start)
            yield self._received(torch.empty(size, dtype=torch.uint8)).numpy().data

    def _send(self, tensor: Tensor) -> None:
        dist.send(tensor, self.peer, group=self.group)

    def _received(self, tensor: Tensor) -> Tensor:
        dist.recv(tensor, self.peer, group=self.group)
        return tensor


def _check_sizes(
    header_bytes: int, content_bytes: int, content_bytes_max: int = CONTENT_BYTES_MAX
) -> None:
    if not 0 < header_bytes <= HEADER_BYTES_MAX or not 0 <= content_bytes <= content_bytes_max:
        raise ValueError(
            f"a message between nodes with a header of {header_bytes:,} bytes and a content of "
            f"{content_bytes:,}; they have at most {HEADER_BYTES_MAX:,} and {content_bytes_max:,}"
        )


Passage: TypeAlias = tuple[socket.socket, threading.Thread]
"""A channel, and the thread that passes its messages on, which ends after the channel is closed."""


def call_node(link: NodeLink) -> Passage:
    """Return a channel on which the node at the other end answers calls."""

    def pass_one(channel: socket.socket) -> None:
        link.send(*receive(channel))
        reply, content = link.receive(content_bytes_max=0)
        content.close()
        if not _is_reply(reply):
            raise ValueError("the other node sent something that is no reply")
        send(channel, reply)

    return _passed_on(pass_one)


def _is_reply(reply: object) -> bool:
    """Return whether it is a reply of `rank.py`: empty, or an error of two texts."""
    if not isinstance(reply, dict):
        return False
    return not reply or (
        reply.keys() == {"kind", "message"}
        and all(isinstance(text, str) for text in reply.values())
    )


def calls_of_leader(link: NodeLink) -> Passage:
    """Return a channel from which the calls of the leader at the other end are read."""

    def pass_one(channel: socket.socket) -> None:
        header, content = link.receive()
        with content:
            send(channel, header, content)
        link.send(receive(channel)[0], memoryview(b""))

    return _passed_on(pass_one)


def _passed_on(pass_one: Callable[[socket.socket], None]) -> Passage:
    own, its = socket.socketpair()

    def pass_on() -> None:
        with its:
            while True:
                try:
                    pass_one(its)
                except (EOFError, OSError):
                    return  # this process closed the channel
                except (RuntimeError, ValueError) as error:
                    log.warning("the connection to another node has ended: %s", error)
                    return

    thread = threading.Thread(target=pass_on, daemon=True)
    thread.start()
    return own, thread
