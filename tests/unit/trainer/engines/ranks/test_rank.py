"""Which calls a rank makes on its engine."""

import os
from collections.abc import Iterator

import pytest

from storage.records.types import Json
from tests.support.models.trainer_cases import MODEL_CONFIG
from trainer.config import TrainConfig
from trainer.engines.ranks import rank as module
from trainer.engines.ranks.rank import Rank, error_reply

NOTHING = memoryview(b"")
OWN = TrainConfig(nodes=2)


def new(config: TrainConfig) -> Json:
    header: Json = {"call": "new", "engine": 0, "dropped": [], "seed": 0}
    return header | {"config": config.model_dump(mode="json"), "model_config": MODEL_CONFIG}


def test_only_the_calls_of_a_train_engine_are_made() -> None:
    rank = Rank()
    rank.call(new(OWN), NOTHING)
    with pytest.raises(ValueError, match="'__init_subclass__' is no call of a train engine"):
        rank.call({"call": "__init_subclass__", "engine": 0, "dropped": []}, NOTHING)


def test_an_engine_that_the_leader_dropped_is_gone() -> None:
    rank = Rank()
    rank.call(new(OWN), NOTHING)
    with pytest.raises(KeyError):
        rank.call({"call": "save", "engine": 0, "dropped": [0]}, NOTHING)


def test_an_error_is_told_by_its_kind_and_message() -> None:
    assert error_reply(ValueError("no")) == {"kind": "ValueError", "message": "no"}


@pytest.fixture
def standard_input() -> Iterator[int]:
    """Replace the standard input by a pipe, of which the leader's end is returned."""
    ours, leaders = os.pipe()
    before = os.dup(0)
    os.dup2(ours, 0)
    os.close(ours)
    yield leaders
    os.dup2(before, 0)
    os.close(before)


class EndedError(Exception):
    """In the place of the end of this process."""


def _ended(status: int) -> None:
    raise EndedError(status)


def test_a_rank_ends_with_the_standard_input_or_another_parent(
    standard_input: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "_exit", _ended)
    monkeypatch.setattr(module, "PARENT_CHECK_S", 0.0)
    parents = iter([7, 7, 7, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    os.write(standard_input, b"no end")
    with pytest.raises(EndedError, match="0"):
        module._end_with_the_leader(7)
    assert list(parents) == []
    os.close(standard_input)
    monkeypatch.setattr(os, "getppid", lambda: 7)
    with pytest.raises(EndedError, match="0"):
        module._end_with_the_leader(7)
