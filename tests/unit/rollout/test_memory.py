from dataclasses import replace

import pytest

from rollout.config import EngineConfig, RolloutConfig, SglangConfig
from rollout.memory import (
    adapter_bytes,
    cache_token_bytes,
    rollout_bytes,
    rollout_host_bytes,
    shared_server_bytes,
)
from storage.formats.model_sizes import ModelSizes

MODEL = ModelSizes(parameters=1000, embeddings=400, vocab=50, hidden=8, layers=3, kv_elements=4)
SGLANG = EngineConfig(
    name="sglang", dtype="bfloat16", max_tokens=20, sglang=SglangConfig(tensor_parallel=2)
)


def test_the_embedded_engine_holds_the_cache_of_all_sequences_and_two_copies_of_new_weights() -> (
    None
):
    config = EngineConfig(max_concurrent=5, max_tokens=20)
    assert rollout_bytes(config, MODEL) == {
        "weights": 4 * (600 + 2 * 400),  # the head is a transposed copy of the embedding
        "next weights": 4 * (1000 + 600 + 400),
        "KV cache": 4 * 3 * 4 * 5 * 20,
    }


def test_sglang_needs_the_cache_of_one_sequence_on_all_its_devices() -> None:
    assert rollout_bytes(SGLANG, MODEL) == {"weights": 1000, "KV cache": 2 * 3 * 4 * 20 // 2}
    assert cache_token_bytes(SGLANG, MODEL) == 2 * 3 * 4 // 2


def test_the_host_has_two_versions_and_one_for_a_server() -> None:
    assert rollout_host_bytes(RolloutConfig(), 2000) == {"two versions": 4000, "reading": 2000}
    served = RolloutConfig(engine=SGLANG, refresh_memory_mb=64)
    assert rollout_host_bytes(served, 10**9) == {
        "two versions": 2 * 10**9,
        "reading": 64 * 2**20,
        "version for the server": 10**9,
    }


LAYERS = replace(MODEL, intermediate=24, query_elements=16)
SERVING = SGLANG.model_copy(update={"sglang": SglangConfig(adapter_rank=5, tensor_parallel=2)})


def test_a_server_has_slots_of_the_largest_rank_for_the_adapters_of_each_policy() -> None:
    # Outputs are divided by 2, and of o_proj and down_proj the inputs: q 8 + 8, k and v 8 + 1,
    # o 8 + 8, gate and up 8 + 12, down 12 + 8.
    slot = 2 * 5 * 3 * (16 + 2 * 9 + 16 + 2 * 20 + 20)
    assert adapter_bytes(SERVING, LAYERS) == 8 * slot
    assert rollout_bytes(SERVING, LAYERS) == {
        "weights": 1000,
        "adapters": 8 * slot,
        "KV cache": 240,
    }
    assert shared_server_bytes(SERVING, LAYERS, ("solver", "verifier")) == {
        "weights": 1000,
        "adapters of solver": 8 * slot,
        "adapters of verifier": 8 * slot,
        "KV cache": 240,
    }


@pytest.mark.parametrize(
    "args",
    [("--max-loras-per-batch", "4"), ("--max_loras_per_batch=4",), ("--max-loras-per-batch 4",)],
)
def test_the_slots_for_adapters_may_be_given_to_the_server(args: tuple[str, ...]) -> None:
    own = SERVING.sglang.model_copy(update={"server_args": args})
    config = SERVING.model_copy(update={"sglang": own})
    assert adapter_bytes(config, LAYERS, 2) == adapter_bytes(SERVING, LAYERS) // 2
