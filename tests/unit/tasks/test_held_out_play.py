"""Which engines play versions: one server for several policies only where they have one base."""

from collections.abc import Mapping
from typing import Any

import pytest

from rollout.config import RolloutConfig, SamplingConfig
from storage.errors import ConfigError
from storage.records.weights import HostTensor
from storage.store.object_store import ObjectStore
from storage.weights import publisher
from tasks import held_out_play
from tasks.recipes.loader import load
from tests.support.runs.adapter_versions import LORA, drawn

ADAPTER = {"name": "lora", "rank": 2, "publish": "adapter"}
CONFIG = {
    "rollout.engine.name": "sglang",
    "rollout.engine.sglang.adapter_rank": 2,
    "rollout.engine.sglang.shared": True,
    "policies.*.train.adapter": ADAPTER,
}


def base_of(tensors: Mapping[str, HostTensor]) -> dict[str, HostTensor]:
    return {name: tensor for name, tensor in tensors.items() if ".lora_" not in name}


@pytest.mark.parametrize("others_base", [False, True])
async def test_versions_of_several_base_models_have_a_server_each(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, others_base: bool
) -> None:
    tensors = drawn()
    publisher.publish(memory_store, "solver", 1, tensors, adapter=LORA)
    base = base_of(tensors)
    if others_base:
        name = next(iter(base))
        base[name] = HostTensor(base[name].dtype, base[name].shape, base[name].bits ^ 1)
    publisher.publish(memory_store, "verifier", 0, base)
    made: list[RolloutConfig] = []

    def make(_: Any, rollout: RolloutConfig, sampling: Mapping[str, SamplingConfig]) -> Any:
        made.append(rollout)
        raise ConfigError("seen")

    monkeypatch.setattr(held_out_play, "make_agent_pool", make)
    config = load("multi_policy_tiny", CONFIG)
    assert config.evaluation
    versions = {"solver": (memory_store, 1), "verifier": (memory_store, 0)}
    with pytest.raises(ConfigError, match="seen"):
        async with held_out_play.pool_with(versions, config, config.evaluation):
            raise AssertionError
    assert [rollout.engine.sglang.shared for rollout in made] == [not others_base]
    assert made[0].engine.sglang.adapter_rank == 2
