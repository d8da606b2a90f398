"""Calls of a leader with other ranks, which threads of the test play."""

import math
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from storage.records.types import Json
from tests.support.patience import until
from trainer.config import TrainConfig
from trainer.engines.ranks import leader
from trainer.engines.ranks.children import Child
from trainer.engines.ranks.leader import Ranks
from trainer.engines.ranks.messages import receive, send
from trainer.engines.ranks.rendezvous import RankLostError
from trainer.engines.ranks.rendezvous_store import RendezvousStore

FAULT: Json = {"kind": "ValueError", "message": "no"}
SILENT: Json = {"silent": True}
GONE: Json = {"gone": True}
STEP: Json = {"call": "step", "engine": 0, "dropped": []}


class OtherRank:
    """Answers each call with `{}`, and `step` with `reply`; SILENT: not at all; GONE: it ends."""

    def __init__(self, reply: Json) -> None:
        self.reply, self.got = reply, list[Json]()
        self.channel, self._own = socket.socketpair()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with self._own:
            send(self._own, {})
            while True:
                try:
                    header = receive(self._own)[0]
                    self.got.append(header)
                    reply = self.reply if header["call"] == "step" else {}
                    if reply is GONE:
                        return
                    if reply is not SILENT:
                        send(self._own, reply)
                except (EOFError, OSError):
                    return


class Round:
    """A rendezvous of which only the end matters."""

    over, ended, questions = "", False, 0

    def why_over(self) -> str:
        self.questions += 1
        return self.over

    def wait_for_questions(self) -> None:
        before = self.questions
        until(lambda: self.questions > before + 2)

    def end(self) -> None:
        self.ended = True


Start = Callable[..., tuple[Ranks, list[OtherRank]]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start ranks that compute nothing together: no process group, no processes."""
    monkeypatch.setattr(leader, "POLL_S", 0.01)
    monkeypatch.setattr(leader.process_group, "join", lambda own, store: None)
    monkeypatch.setattr(leader.process_group, "leave", lambda: None)
    started: list[Ranks] = []

    def start(*replies: Json, round_: Any = None) -> tuple[Ranks, list[OtherRank]]:
        others = [OtherRank(reply) for reply in replies]
        monkeypatch.setattr(
            leader,
            "start_rank",
            lambda rank, num_ranks, gpu, rendezvous: Child(
                f"rank {rank} of {num_ranks}", others[rank - 1].channel
            ),
        )
        ranks = Ranks(TrainConfig(ranks=1 + len(replies)), rendezvous=round_)
        started.append(ranks)
        return ranks, others

    yield start
    for ranks in started:
        ranks.close()


def test_each_rank_gets_its_seat_and_then_every_call(start: Start) -> None:
    ranks, others = start({}, {})
    assert ranks.call(STEP, None, lambda: "of rank 0") == "of rank 0"
    for rank, other in enumerate(others, 1):
        joined, step = other.got
        assert (joined["call"], joined["seat"]["rank"], joined["seat"]["num_ranks"]) == (
            "join", rank, 3,
        )  # fmt: skip
        assert step == STEP
    assert others[0].got[0]["seat"]["file"] == others[1].got[0]["seat"]["file"] != ""
    assert ranks.is_open


def test_a_rank_that_fails_alone_ends_all(start: Start) -> None:
    ranks, _ = start({}, FAULT)
    with pytest.raises(RankLostError) as lost:
        ranks.call(STEP, None, lambda: None)
    assert str(lost.value) == (
        "rank 2 of 3 alone failed during step (ValueError: no); a restarted trainer resumes from "
        "its checkpoint"
    )
    with pytest.raises(RankLostError, match="have ended, and weights needs them; restart it"):
        ranks.call({**STEP, "call": "weights"}, None, lambda: None)


def test_a_rank_that_is_gone_is_named_before_one_that_failed_for_its_sake(start: Start) -> None:
    ranks, _ = start(FAULT, GONE)
    with pytest.raises(RankLostError, match=r"^rank 2 of 3 is gone during step; "):
        ranks.call(STEP, None, lambda: None)
    assert not ranks.is_open


def test_a_rank_that_does_not_end_after_another_failed_is_not_waited_for(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "PATIENCE_S", 0.05)
    ranks, _ = start(SILENT, FAULT)
    with pytest.raises(
        RankLostError,
        match=r"rank 1 of 3 did not end step within 0.05 s after another rank had failed; ",
    ):
        ranks.call(STEP, None, lambda: None)


def failing(error: BaseException) -> Callable[[], None]:
    def local() -> None:
        raise error

    return local


def test_an_error_of_all_ranks_leaves_them_usable(start: Start) -> None:
    ranks, _ = start(FAULT, FAULT)
    with pytest.raises(ValueError, match="no"):
        ranks.call(STEP, None, failing(ValueError("no")))
    assert ranks.call({**STEP, "call": "weights"}, None, lambda: 7) == 7


@pytest.mark.parametrize("error", [ValueError("another"), KeyError("no")])
def test_another_error_of_rank_0_than_that_of_the_others_ends_all(
    start: Start, error: Exception
) -> None:
    ranks, _ = start(FAULT, FAULT)
    with pytest.raises((type(error), RankLostError)):
        ranks.call(STEP, None, failing(error))
    assert not ranks.is_open


def test_an_error_of_rank_0_alone_is_raised_and_ends_all(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "PATIENCE_S", 0.05)
    round_ = Round()
    ranks, _ = start(SILENT, SILENT, round_=round_)
    with pytest.raises(ValueError, match="of its own"):
        ranks.call(STEP, None, failing(ValueError("of its own")))
    assert not ranks.is_open
    assert round_.ended


def test_an_interrupted_call_ends_all(start: Start) -> None:
    round_ = Round()
    ranks, _ = start(round_=round_)
    with pytest.raises(KeyboardInterrupt):
        ranks.call(STEP, None, failing(KeyboardInterrupt()))
    assert not ranks.is_open
    assert round_.ended


def test_no_call_is_made_after_the_round_is_over(start: Start) -> None:
    round_ = Round()
    ranks, (other,) = start({}, round_=round_)
    round_.over = "node 1 has left"
    while not ranks.over:
        pass
    with pytest.raises(RankLostError, match=r"^node 1 has left$"):
        ranks.call(STEP, None, failing(AssertionError("called")))
    assert [header["call"] for header in other.got] == ["join"]
    assert not ranks.is_open
    assert round_.ended


def test_nodes_that_do_not_connect_end_their_round(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    round_ = Round()
    monkeypatch.setattr(leader, "CONNECT_S", 0.05)

    def join(own: object, store: object) -> None:
        until(lambda: round_.ended)

    monkeypatch.setattr(leader.process_group, "join", join)
    start({}, round_=round_)


def test_nodes_whose_store_is_in_use_or_that_are_connected_do_not_end_their_round(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    round_ = Round()
    monkeypatch.setattr(leader, "CONNECT_S", -1e9)

    def join(own: object, store: RendezvousStore) -> None:
        store.unused_since_s = math.inf
        round_.wait_for_questions()

    monkeypatch.setattr(leader.process_group, "join", join)
    start({}, round_=round_)
    round_.wait_for_questions()
    assert not round_.ended


def test_a_round_that_ends_during_a_call_is_the_reason_of_its_error(start: Start) -> None:
    round_ = Round()
    ranks, _ = start(FAULT, round_=round_)

    def local() -> None:
        round_.over = "node 1 has left"
        while not ranks.over:
            pass

    with pytest.raises(RankLostError, match=r"^node 1 has left; a restarted trainer resumes"):
        ranks.call(STEP, None, local)
