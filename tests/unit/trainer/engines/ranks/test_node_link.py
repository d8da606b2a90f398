"""Messages between nodes, over a group of two threads' queues in place of Gloo."""

import json
import queue
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from trainer.engines.ranks import node_link
from trainer.engines.ranks.messages import content_of, receive, send
from trainer.engines.ranks.node_link import NodeLink, call_node, calls_of_leader


@dataclass
class Wires:
    """Two directions: rank → tensors on their way to it. `None`: the sender is gone."""

    to: dict[int, "queue.Queue[Tensor | None]"] = field(
        default_factory=lambda: {0: queue.Queue(), 1: queue.Queue()}
    )

    def send(self, tensor: Tensor, peer: int, group: int) -> None:
        self.to[peer].put(tensor.clone())

    def recv(self, tensor: Tensor, peer: int, group: int) -> None:
        sent = self.to[1 - peer].get()
        if sent is None:
            raise RuntimeError("Connection closed by peer")
        assert sent.dtype == tensor.dtype
        tensor.copy_(sent)


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch) -> Wires:
    wires = Wires()
    monkeypatch.setattr(torch.distributed, "send", wires.send)
    monkeypatch.setattr(torch.distributed, "recv", wires.recv)
    return wires


def link(peer: int) -> NodeLink:
    return NodeLink(None, peer)  # type: ignore[arg-type]  # the wires need no group


@pytest.mark.parametrize("content", [b"", b"x", b"0123456789" * 3])
def test_a_call_and_its_reply_arrive(
    wires: Wires, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(node_link, "PIECE_BYTES", 10)
    (leader, leads), (node, makes) = call_node(link(1)), calls_of_leader(link(0))
    with content_of([content]) as file:
        send(leader, {"call": "step", "engine": 3}, file)
    header, received = receive(node)
    assert (header, bytes(received)) == ({"call": "step", "engine": 3}, content)
    del received
    send(node, {"kind": "ValueError", "message": "é"})
    assert receive(leader)[0] == {"kind": "ValueError", "message": "é"}
    leader.close()
    leads.join()
    wires.to[1].put(None)
    makes.join()
    with pytest.raises(EOFError):
        receive(node)
    node.close()


def test_a_node_that_is_gone_closes_the_leaders_channel(wires: Wires) -> None:
    leader, thread = call_node(link(1))
    send(leader, {"call": "weights"})
    wires.to[0].put(None)
    thread.join()
    with pytest.raises(EOFError):
        receive(leader)
    leader.close()


@pytest.mark.parametrize("sizes", [(0, 0), (-1, 0), (5, -1), (2**26 + 1, 0), (5, 2**42 + 1)])
def test_sizes_that_no_leader_sends_end_the_connection(
    wires: Wires, sizes: tuple[int, int]
) -> None:
    with pytest.raises(ValueError, match="a message between nodes with a header of"):
        node_link._check_sizes(*sizes)
    wires.to[1].put(torch.tensor(sizes))
    node, thread = calls_of_leader(link(0))
    thread.join()
    with pytest.raises(EOFError):
        receive(node)
    node.close()


def test_the_largest_sizes_are_accepted() -> None:
    node_link._check_sizes(2**26, 2**42)
    node_link._check_sizes(1, 0)


def test_a_header_that_is_no_json_ends_the_connection(wires: Wires) -> None:
    wires.to[1].put(torch.tensor([3, 0]))
    wires.to[1].put(torch.tensor(list(b"{{{"), dtype=torch.uint8))
    node, thread = calls_of_leader(link(0))
    thread.join()
    with pytest.raises(EOFError):
        receive(node)
    node.close()


@pytest.mark.parametrize(
    ("reply", "content_bytes"),
    [
        ([], 0),
        (5, 0),
        ("kind", 0),
        ({"kind": "ValueError"}, 0),
        ({"kind": 1, "message": "x"}, 0),
        ({"other": 1}, 0),
        ({}, 1),
    ],
)
def test_what_is_no_reply_closes_the_leaders_channel(
    wires: Wires, reply: object, content_bytes: int
) -> None:
    leader, thread = call_node(link(1))
    send(leader, {"call": "weights"})
    body = json.dumps(reply).encode()
    wires.to[0].put(torch.tensor([len(body), content_bytes]))
    wires.to[0].put(torch.tensor(list(body), dtype=torch.uint8))
    wires.to[0].put(torch.zeros(content_bytes, dtype=torch.uint8))
    with pytest.raises(EOFError):
        receive(leader)
    leader.close()
    thread.join()


def test_a_header_larger_than_the_limit_is_not_sent(
    wires: Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_link, "HEADER_BYTES_MAX", 20)
    with pytest.raises(ValueError, match="a header of 22 bytes"):
        link(1).send({"a": "b" * (22 - len(json.dumps({"a": ""})))}, memoryview(b""))
    assert wires.to[1].empty()
