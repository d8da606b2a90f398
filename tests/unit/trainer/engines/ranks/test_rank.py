"""Which calls a rank makes on its engine."""

import pytest

from storage.records.types import Json
from tests.support.models.trainer_cases import MODEL_CONFIG
from trainer.config import TrainConfig
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
