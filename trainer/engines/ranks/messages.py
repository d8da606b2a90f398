"""Messages between the leader and a rank, over a pair of connected sockets.

    u32 length | JSON header        large content: a file descriptor beside it

Tensors and batches are in a file that has no name and is in memory, of which only the descriptor is
sent: every rank maps the same pages, and nothing is left over when a process is killed. Nothing is
pickled.
"""

import json
import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Iterable, Mapping
from typing import IO, Any, TypeAlias

import numpy as np

from storage.formats.safetensors import BITS
from storage.records.types import Json
from storage.records.weights import HostTensor

_LENGTH = struct.Struct("<I")

Content: TypeAlias = IO[bytes]
"""A file without a name."""


def send(channel: socket.socket, header: Json, content: Content | None = None) -> None:
    """Send a header and the descriptor of its content; OSError when the other end is closed."""
    body = json.dumps(header).encode()
    descriptors = [] if content is None else [content.fileno()]
    socket.send_fds(channel, [_LENGTH.pack(len(body))], descriptors)
    channel.sendall(body)


def receive(channel: socket.socket) -> tuple[Json, memoryview]:
    """Receive a header and its content (empty without one); EOFError when the other end closed."""
    prefix, descriptors, _, _ = socket.recv_fds(channel, _LENGTH.size, 1)
    while 0 < len(prefix) < _LENGTH.size:
        prefix += channel.recv(_LENGTH.size - len(prefix)) or _raise_end()
    if not prefix:
        _raise_end()
    (length,) = _LENGTH.unpack(prefix)
    body = b""
    while len(body) < length:
        body += channel.recv(length - len(body)) or _raise_end()
    header: Json = json.loads(body)
    return header, _mapped(descriptors[0]) if descriptors else memoryview(b"")


def content_of(parts: Iterable[Any]) -> Content:
    """Write buffers one after another into a file without a name."""
    # Not in /dev/shm, of which a container has 64 MB.
    file: Content
    if hasattr(os, "memfd_create"):
        file = os.fdopen(os.memfd_create("astraflow"), "w+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115  # the caller closes it
    for part in parts:
        file.write(part)
    file.flush()
    return file


def tensors_content(tensors: Mapping[str, HostTensor]) -> tuple[list[Json], Content]:
    """Return the names, dtypes and shapes of tensors for a header, and their bits."""
    entries: list[Json] = [
        {"name": name, "dtype": tensor.dtype, "shape": list(tensor.shape)}
        for name, tensor in tensors.items()
    ]
    return entries, content_of(
        np.ascontiguousarray(tensor.bits).reshape(-1).view(np.uint8) for tensor in tensors.values()
    )


def read_tensors(entries: list[Json], content: memoryview) -> dict[str, HostTensor]:
    """Return the tensors of `tensors_content` as read-only views."""
    tensors: dict[str, HostTensor] = {}
    offset = 0
    for entry in entries:
        dtype = np.dtype(BITS[entry["dtype"]])
        count = int(np.prod(entry["shape"], dtype=np.int64))
        size = count * dtype.itemsize
        bits = np.frombuffer(content[offset : offset + size], dtype)
        tensors[entry["name"]] = HostTensor(
            entry["dtype"], tuple(entry["shape"]), bits.reshape(entry["shape"])
        )
        offset += size
    return tensors


def _mapped(descriptor: int) -> memoryview:
    try:
        if not os.fstat(descriptor).st_size:
            return memoryview(b"")  # an empty file cannot be mapped
        return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
    finally:
        os.close(descriptor)


def _raise_end() -> bytes:
    raise EOFError("the other end is closed")
