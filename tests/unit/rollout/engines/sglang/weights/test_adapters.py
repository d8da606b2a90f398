"""Adapters that servers apply themselves, against the stand-in for a server."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollout.config import EngineConfig, SglangConfig
from rollout.engines.engine import SamplingParams
from rollout.engines.sglang.engine import SglangRolloutEngine
from rollout.engines.sglang.server_arguments import server_args
from rollout.service.weight_loader import WeightLoader
from storage.errors import ConfigError
from storage.formats.safetensors import weights_digest
from storage.records.types import Json
from storage.records.weights import HostTensor, Manifest, StoredAdapter
from storage.weights.manifests import LoadedWeights
from tests.support.models.chain_model import CONFIG, VOCAB, counting
from tests.support.patience import PATIENCE_S
from tests.support.sglang_peer import Peer, Reply, counted, sglang_peer

FORM = StoredAdapter(kind="lora", rank=4, alpha=6.0, rslora=True)
THREE = SamplingParams(max_new_tokens=3)
LAYER = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def peer() -> Iterator[Peer]:
    with sglang_peer() as running:
        yield running


@pytest.fixture
async def engine(peer: Peer) -> AsyncIterator[SglangRolloutEngine]:
    sglang = SglangConfig(urls=(peer.url,), check_every=0, adapter_rank=8)
    made = SglangRolloutEngine(EngineConfig(name="sglang", max_tokens=64, sglang=sglang), CONFIG)
    yield made
    await made.close()


BASE = counting(1)


def adapted(seed: int, layer: str = LAYER, rank: int = 4) -> dict[str, HostTensor]:
    """The base's tensors, the same objects each time, and a random adapter of one layer."""

    def drawn(*shape: int) -> HostTensor:
        bits = np.random.default_rng(seed).normal(size=shape).astype(np.float32).view(np.uint32)
        return HostTensor("F32", shape, bits)

    own = {"lora_A.weight": drawn(rank, VOCAB), "lora_B.weight": drawn(8, rank)}
    return BASE | {f"{layer}.{name}": tensor for name, tensor in own.items()}


def names(peer: Peer) -> list[str]:
    """Numbers of the versions whose adapters the server has."""
    return [name.partition("-")[2] for name in peer.adapters]


async def test_the_base_is_loaded_once_and_each_version_is_an_adapter(
    peer: Peer, engine: SglangRolloutEngine
) -> None:
    await engine.load(0, BASE)
    assert "lora_path" not in await asked(peer, engine)
    for version in (1, 2):
        await engine.load_adapter(version, FORM, adapted(version))
        assert (await asked(peer, engine))["lora_path"] == next(iter(peer.adapters))
        assert engine.version == version
        assert engine.digest(version) == weights_digest(adapted(version))
    assert peer.paths().count("/update_weights_from_disk") == 1
    assert names(peer) == ["2.2"]
    (config,) = peer.adapters.values()
    assert config["lora_alpha"] / config["r"] == FORM.scale == 3.0
    assert config["target_modules"] == ["q_proj"]
    assert config["tensors"] == [
        f"base_model.model.{LAYER}.{name}.weight" for name in ("lora_A", "lora_B")
    ]


async def asked(peer: Peer, engine: SglangRolloutEngine) -> Json:
    """Return the body of a request, whose tokens have the engine's version."""
    answer = await engine.generate([1, 2], THREE)
    assert [(span.version, span.start, span.end) for span in answer.spans] == [
        (engine.version, 0, 3)
    ]
    return [body for path, body in peer.calls if path == "/generate"][-1]


async def test_a_running_request_keeps_its_adapter_which_is_unloaded_after_it(
    peer: Peer, engine: SglangRolloutEngine
) -> None:
    asking, go_on = threading.Event(), threading.Event()

    def slow(body: Json) -> Reply:
        asking.set()
        assert go_on.wait(PATIENCE_S)
        return 200, counted(body, peer.label)

    await engine.load_adapter(1, FORM, adapted(1))
    peer.replies["/generate"] = [slow]
    running = asyncio.ensure_future(engine.generate([1, 2], THREE))
    assert await asyncio.to_thread(asking.wait, PATIENCE_S)
    await engine.load_adapter(2, FORM, adapted(2))
    assert names(peer) == ["1.1", "2.2"]
    go_on.set()
    assert [span.version for span in (await running).spans] == [1]
    await engine.load_adapter(3, FORM, adapted(3))
    assert names(peer) == ["3.3"]


async def test_prompts_share_cached_prefixes_of_one_adapter_only(
    peer: Peer, engine: SglangRolloutEngine
) -> None:
    keys = []
    for version in (1, 2):
        await engine.load_adapter(version, FORM, adapted(version))
        keys.append((await asked(peer, engine))["extra_key"])
    assert len(set(keys)) == 2


async def test_a_server_that_was_started_again_gets_the_base_and_the_adapter(
    peer: Peer, engine: SglangRolloutEngine
) -> None:
    await engine.load(0, BASE)
    await engine.load_adapter(1, FORM, adapted(1))

    def lost(_: Json) -> None:
        peer.label = "default"
        peer.adapters.clear()

    peer.replies["/generate"] = [lost]
    body = await asked(peer, engine)
    assert body["lora_path"] in peer.adapters
    assert names(peer) == ["1.2"]
    assert peer.tensors == [sorted(BASE)] * 2


async def test_a_server_that_restarted_between_two_versions_has_no_older_adapter(
    peer: Peer, engine: SglangRolloutEngine
) -> None:
    await engine.load_adapter(1, FORM, adapted(1))
    peer.label = "default"
    peer.adapters.clear()
    await engine.load_adapter(2, FORM, adapted(2))
    assert names(peer) == ["2.2"]
    assert peer.tensors == [sorted(BASE)] * 2


async def test_a_request_during_the_restart_of_a_server_waits_for_its_adapter(
    peer: Peer, engine: SglangRolloutEngine
) -> None:
    await engine.load_adapter(1, FORM, adapted(1))
    loading, go_on = threading.Event(), threading.Event()

    def lost(_: Json) -> None:
        peer.label = "default"
        peer.adapters.clear()

    def slow(_: Json) -> Reply | None:
        loading.set()
        assert go_on.wait(PATIENCE_S)
        return None  # the adapter is loaded again, with the base

    peer.replies = {"/generate": [lost], "/load_lora_adapter": [slow]}
    first = asyncio.ensure_future(engine.generate([1, 2], THREE))
    assert await asyncio.to_thread(loading.wait, PATIENCE_S)
    second = asyncio.ensure_future(engine.generate([3, 4], THREE))
    await asyncio.sleep(0)
    go_on.set()
    for answer in (await first, await second):
        assert [span.version for span in answer.spans] == [1]
    bodies = [body for path, body in peer.calls if path == "/generate"][-2:]
    assert all(body["lora_path"] in peer.adapters for body in bodies)


@pytest.mark.parametrize(
    ("form", "tensors", "message"),
    [
        (replace(FORM, rank=9), adapted(1, rank=9), "rank 9, and .*adapter_rank is 8"),
        (FORM, adapted(1, rank=3), "do not fit"),
        (
            FORM,
            adapted(1, layer="model.layers.0.self_attn.qkv") | {"model.layers.0.self_attn.qkv.weight": BASE[f"{LAYER}.weight"]},
            "changes qkv, and SGLang serves adapters of q_proj",
        ),
    ],
    ids=["rank", "shapes", "layers"],
)  # fmt: skip
async def test_an_adapter_without_room_in_the_servers_is_refused(
    engine: SglangRolloutEngine,
    form: StoredAdapter,
    tensors: dict[str, HostTensor],
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        await engine.load_adapter(1, form, tensors)


async def test_an_adapter_that_a_server_refuses_keeps_the_version(
    peer: Peer, engine: SglangRolloutEngine
) -> None:
    await engine.load_adapter(1, FORM, adapted(1))
    peer.replies["/load_lora_adapter"] = [lambda _: (400, {"error_message": "no room"})]
    with pytest.raises(ConfigError, match="no room"):
        await engine.load_adapter(2, FORM, adapted(2))
    assert engine.version == 1
    with pytest.raises(KeyError):
        engine.digest(2)
    assert (await asked(peer, engine))["lora_path"] in peer.adapters


@pytest.mark.parametrize("rank", [0, 8])
async def test_a_worker_gives_merged_weights_unless_its_servers_apply_adapters(
    peer: Peer, rank: int
) -> None:
    sglang = SglangConfig(urls=(peer.url,), check_every=0, adapter_rank=rank)
    engine = SglangRolloutEngine(EngineConfig(name="sglang", max_tokens=64, sglang=sglang), CONFIG)
    tensors = adapted(1)
    manifest = Manifest(
        policy="solver", version=1, digest=weights_digest(tensors), adapter=FORM,
        parent=0, batch=1, kind="anchor", base=None, tensors={}, files=(),
    )  # fmt: skip
    try:
        await WeightLoader(engine).load(LoadedWeights(manifest, tensors))
        assert bool(peer.adapters) == (rank > 0)
        assert peer.tensors == [sorted(BASE)]
    finally:
        await engine.close()


def test_a_server_is_started_with_room_for_the_adapters() -> None:
    def args(rank: int) -> list[str]:
        config = EngineConfig(name="sglang", sglang=SglangConfig(adapter_rank=rank))
        return server_args(config, Path("/model"), 1)

    plain, serving = args(0), args(8)
    assert "--enable-lora" not in plain
    assert plain[plain.index("--load-format") + 1] == "dummy"
    assert serving[serving.index("--load-format") + 1] == "safetensors"
    assert serving[serving.index("--max-lora-rank") + 1] == "8"
    assert serving[serving.index("--lora-backend") + 1] == "torch_native"
    assert "down_proj" in serving
