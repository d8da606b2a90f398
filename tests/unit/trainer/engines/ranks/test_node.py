"""Which calls of the leader a node passes on to its ranks."""

import os
from typing import Any

import pytest

from storage.records.types import Json
from tests.support.models.trainer_cases import MODEL_CONFIG
from trainer.config import TrainConfig
from trainer.engines.ranks import node
from trainer.engines.ranks.rank import Rank

OWN = TrainConfig(nodes=2)
OTHER = OWN.model_copy(update={"lr": 1.0})


class OtherRanks:
    """The child processes of a node, which make every call that they get."""

    def __init__(self) -> None:
        self.got: list[str] = []

    def call(self, header: Json, content: Any, local: Any) -> None:
        self.got.append(header["call"])
        local()


def reply(header: Json, config: TrainConfig | None = OWN) -> tuple[Json, list[str]]:
    """Return the reply of a node with these settings, and the calls that its ranks got."""
    ranks = OtherRanks()
    answer = node._reply(ranks, Rank(), config, {"dropped": [], **header}, memoryview(b""))  # type: ignore[arg-type]  # a stand-in
    return answer, ranks.got


def new(config: TrainConfig) -> Json:
    return {
        "call": "new",
        "engine": 0,
        "seed": 0,
        "config": config.model_dump(mode="json"),
        "model_config": MODEL_CONFIG,
    }


def test_ranks_of_a_node_build_engines_with_its_own_settings_only() -> None:
    refused, got = reply(new(OTHER))
    assert "other settings than this node" in refused["message"]
    assert (refused["kind"], got) == ("ConfigError", [])
    assert reply(new(OWN)) == ({}, ["new"])
    assert reply(new(OTHER), config=None) == ({}, ["new"])


@pytest.mark.parametrize("name", ["join", "__init_subclass__", "generate"])
def test_only_calls_of_a_train_engine_reach_the_ranks_of_a_node(name: str) -> None:
    before = dict(os.environ)
    seat = {"rank": 7, "num_ranks": 8, "num_nodes": 1, "device": "cpu", "file": "/tmp/x"}
    refused, got = reply({"call": name, "engine": 0, "seat": seat})
    assert refused == {
        "kind": "ValueError",
        "message": f"{name!r} is no call of a train engine",
    }
    assert got == []
    assert dict(os.environ) == before
