import socket
import threading

import numpy as np
import pytest

from storage.records.weights import HostTensor
from trainer.engines.ranks.messages import (
    content_of,
    read_tensors,
    receive,
    send,
    tensors_content,
)


def test_a_header_and_its_content_arrive_unchanged() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, content_of([b"ab", memoryview(b"cde")]) as content:
        send(ours, {"call": "step", "numbers": [1, 2]}, content)
        send(ours, {"call": "weights"})
        header, received = receive(theirs)
        assert (header, bytes(received)) == ({"call": "step", "numbers": [1, 2]}, b"abcde")
        assert receive(theirs) == ({"call": "weights"}, memoryview(b""))


def test_a_content_has_no_name_and_outlives_its_sender() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with content_of([b"still here"]) as content:
            send(ours, {}, content)
        assert bytes(receive(theirs)[1]) == b"still here"


def test_a_header_larger_than_the_socket_s_buffer_arrives() -> None:
    ours, theirs = socket.socketpair()
    large = {"text": "x" * 5_000_000}
    with ours, theirs:
        sender = threading.Thread(target=send, args=(ours, large))
        sender.start()
        assert receive(theirs)[0] == large
        sender.join()


def test_a_closed_channel_is_an_end_and_not_a_header() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.send(b"\x05")  # a part of the length
        with pytest.raises(EOFError):
            receive(theirs)
        with pytest.raises(EOFError):
            receive(theirs)


def test_tensors_of_any_dtype_and_shape_arrive_bit_for_bit() -> None:
    given = {
        "matrix": HostTensor("BF16", (2, 3), np.arange(6, dtype=np.uint16).reshape(2, 3)),
        "empty": HostTensor("F32", (0, 4), np.zeros((0, 4), np.uint32)),
        "number": HostTensor("I64", (), np.array(-7)),
        "transposed": HostTensor("F32", (3, 2), np.arange(6, dtype=np.uint32).reshape(2, 3).T),
    }
    entries, content = tensors_content(given)
    with content:
        content.seek(0)
        body = memoryview(content.read())
    read = read_tensors(entries, body)
    assert list(read) == list(given)
    for name, tensor in given.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert read[name].bits.tolist() == tensor.bits.tolist()
