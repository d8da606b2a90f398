"""Several policies of one server, against the stand-in for a server."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from rollout.config import EngineConfig, SglangConfig
from rollout.engines.engine import EngineFailedError, Generation, SamplingParams, make_engine
from rollout.engines.sglang import engine as engine_module
from rollout.engines.sglang import server_group
from rollout.engines.sglang.engine import SglangRolloutEngine
from rollout.engines.sglang.server_arguments import server_args
from storage.errors import ConfigError
from storage.formats.safetensors import weights_digest
from storage.records.types import Json
from storage.records.weights import HostTensor, StoredAdapter
from tests.support.models.chain_model import CONFIG, VOCAB, counting
from tests.support.patience import PATIENCE_S
from tests.support.sglang_peer import Peer, Reply, counted, sglang_peer

FORM = StoredAdapter(kind="lora", rank=4, alpha=6.0, rslora=True)
THREE = SamplingParams(max_new_tokens=3)
LAYER = "model.layers.0.self_attn.q_proj"
SGLANG = SglangConfig(check_every=0, adapter_rank=8, shared=True)
Pair = tuple[SglangRolloutEngine, SglangRolloutEngine]


class FakeProcess:
    """A server of the worker's own: a stand-in, which is started again at the same address."""

    started: list["FakeProcess"]
    peer: Peer

    def __init__(self, config: EngineConfig, model_config: Json, num_policies: int) -> None:
        self.peer.label = "default"
        self.peer.adapters.clear()
        self.num_policies = num_policies
        self.url, self.api_key, self.pid = self.peer.url, "key", 4711
        self.stopped = False
        self.started.append(self)

    def ended(self) -> str:
        return ""

    def refused(self) -> bool:
        return False

    def listens(self) -> bool:
        return True

    def progress(self) -> tuple[int, float]:
        return 0, 0.0

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def peer() -> Iterator[Peer]:
    with sglang_peer() as running:
        yield running


@pytest.fixture
def processes(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> list[FakeProcess]:
    """The servers that were started."""
    monkeypatch.setattr(FakeProcess, "started", [], raising=False)
    monkeypatch.setattr(FakeProcess, "peer", peer, raising=False)
    monkeypatch.setattr(server_group, "ServerProcess", FakeProcess)
    return FakeProcess.started


@pytest.fixture
async def pair(processes: list[FakeProcess]) -> AsyncIterator[Pair]:
    """The engines of two policies, whose server is started at the first load."""
    first = SglangRolloutEngine(EngineConfig(name="sglang", max_tokens=64, sglang=SGLANG), CONFIG)
    second = first.another(dict(CONFIG))
    yield first, second
    await first.close()
    await second.close()


def base() -> dict[str, HostTensor]:
    """The tensors of the base model, other objects each time, as each policy reads its own."""
    return counting(1)


def adapted(own: dict[str, HostTensor], seed: int) -> dict[str, HostTensor]:
    """A base and a random adapter of one layer."""

    def drawn(*shape: int) -> HostTensor:
        bits = np.random.default_rng(seed).normal(size=shape).astype(np.float32).view(np.uint32)
        return HostTensor("F32", shape, bits)

    matrices = {"lora_A.weight": drawn(FORM.rank, VOCAB), "lora_B.weight": drawn(8, FORM.rank)}
    return own | {f"{LAYER}.{name}": tensor for name, tensor in matrices.items()}


def spans(answer: Generation) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in answer.spans]


async def asked(peer: Peer, engine: SglangRolloutEngine) -> Json:
    """Return the body of a request, whose tokens have the engine's version."""
    answer = await engine.generate([1, 2], THREE)
    assert spans(answer) == [(engine.version, 0, 3)]
    return [body for path, body in peer.calls if path == "/generate"][-1]


def numbers(peer: Peer) -> list[str]:
    """Numbers of the versions whose adapters the server has, in the order of their loads."""
    return [name.partition("-")[2].partition(".")[0] for name in peer.adapters]


class Slow:
    """An answer that waits until it is released; without `finish`, the connection ends then."""

    def __init__(self, peer: Peer, finish: str | None = "length") -> None:
        self._peer, self._finish = peer, finish
        self.asked, self.go_on = threading.Event(), threading.Event()
        self.waited = threading.Event()

    def __call__(self, body: Json) -> Reply | None:
        self.asked.set()
        released = self.go_on.wait(PATIENCE_S)
        self.waited.set()
        assert released
        return (200, counted(body, self._peer.label, self._finish)) if self._finish else None

    async def until_asked(self) -> None:
        assert await asyncio.to_thread(self.asked.wait, PATIENCE_S)


async def test_policies_share_one_base_and_name_their_own_adapters(
    peer: Peer, processes: list[FakeProcess], pair: Pair
) -> None:
    solver, verifier = pair
    first, second = base(), base()
    await solver.load(0, first)
    await verifier.load(0, second)
    for engine in pair:
        assert "lora_path" not in await asked(peer, engine)
    await solver.load_adapter(1, FORM, adapted(first, 1))
    assert "lora_path" not in await asked(peer, verifier)
    await verifier.load_adapter(1, FORM, adapted(second, 2))
    await verifier.load_adapter(2, FORM, adapted(second, 3))
    bodies = [await asked(peer, engine) for engine in pair]
    assert [body["lora_path"] for body in bodies] == list(peer.adapters)
    assert [body["extra_key"] for body in bodies] == list(peer.adapters)
    assert numbers(peer) == ["1", "2"]
    assert (solver.digest(1), verifier.digest(1), verifier.digest(2)) == tuple(
        weights_digest(adapted(base(), seed)) for seed in (1, 2, 3)
    )
    assert peer.tensors == [sorted(first)]
    assert [(process.num_policies, process.stopped) for process in processes] == [(2, False)]
    assert solver.server_pids() == verifier.server_pids() == [4711]


async def test_policies_of_different_versions_start_in_any_order(peer: Peer, pair: Pair) -> None:
    solver, verifier = pair
    await solver.load_adapter(5, FORM, adapted(base(), 1))
    await verifier.load(0, base())
    assert "lora_path" not in await asked(peer, verifier)
    assert (await asked(peer, solver))["lora_path"] in peer.adapters
    assert len(peer.tensors) == 1


async def test_an_update_of_one_policy_does_not_stop_the_requests_of_another(
    peer: Peer, pair: Pair
) -> None:
    solver, verifier = pair
    first, second = base(), base()
    await solver.load_adapter(1, FORM, adapted(first, 1))
    await verifier.load_adapter(1, FORM, adapted(second, 2))
    slow, calls = Slow(peer), len(peer.calls)
    peer.replies["/generate"] = [slow]
    running = asyncio.ensure_future(verifier.generate([1, 2], THREE))
    await slow.until_asked()
    for version in (2, 3):
        await solver.load_adapter(version, FORM, adapted(first, version))
    assert not running.done()
    assert numbers(peer) == ["1", "3"]
    assert set(peer.paths()[calls:]) == {
        "/generate",
        "/load_lora_adapter",
        "/unload_lora_adapter",
    }
    await verifier.load_adapter(2, FORM, adapted(second, 4))
    assert numbers(peer) == ["1", "3", "2"]
    slow.go_on.set()
    assert spans(await running) == [(1, 0, 3)]


async def test_a_request_begun_without_an_adapter_keeps_the_version_of_the_base(
    peer: Peer, pair: Pair
) -> None:
    solver, verifier = pair
    first = base()
    await solver.load(0, first)
    await verifier.load(0, base())
    slow = Slow(peer)
    peer.replies["/generate"] = [slow]
    running = asyncio.ensure_future(solver.generate([1, 2], THREE))
    await slow.until_asked()
    await solver.load_adapter(1, FORM, adapted(first, 1))
    slow.go_on.set()
    assert spans(await running) == [(0, 0, 3)]


async def test_a_lost_server_is_started_once_with_the_base_and_all_newest_adapters(
    peer: Peer, processes: list[FakeProcess], pair: Pair
) -> None:
    solver, verifier = pair
    first, second = base(), base()
    for version in (1, 2):
        await solver.load_adapter(version, FORM, adapted(first, version))
    await verifier.load_adapter(1, FORM, adapted(second, 3))
    newest = dict(peer.adapters)

    def lost(_: Json) -> Reply:
        peer.label = "default"
        return 500, {"error": "out of memory"}

    peer.calls.clear()
    peer.replies["/generate"] = [lost] * 4
    answers = await asyncio.gather(
        *(engine.generate([token], THREE) for engine in pair for token in (1, 2))
    )
    assert [spans(answer) for answer in answers] == [[(2, 0, 3)]] * 2 + [[(1, 0, 3)]] * 2
    assert [process.stopped for process in processes] == [True, False]
    assert peer.tensors == [sorted(first)] * 2
    assert numbers(peer) == ["2", "1"]
    assert not newest.keys() & peer.adapters.keys()
    assert peer.paths().count("/load_lora_adapter") == 2
    again = [body["lora_path"] for path, body in peer.calls if path == "/generate"][4:]
    assert sorted(again) == sorted([*peer.adapters] * 2)


async def test_a_lost_server_gets_the_base_of_the_newest_version(
    peer: Peer, processes: list[FakeProcess], pair: Pair
) -> None:
    """The memory of older versions is written to when later ones are read."""
    solver = pair[0]
    older = [base(), base()]
    for engine, tensors in zip(pair, older, strict=True):
        await engine.load(0, tensors)
    for version in (1, 2):
        for engine in pair:
            await engine.load_adapter(version, FORM, adapted(base(), version))
    assert len(peer.tensors) == 1
    for tensor in (tensor for tensors in older for tensor in tensors.values()):
        tensor.bits[...] = 0

    def lost(_: Json) -> Reply:
        peer.label = "default"
        return 500, {"error": "out of memory"}

    peer.held.clear()
    peer.replies["/generate"] = [lost]
    assert spans(await solver.generate([1], THREE)) == [(2, 0, 3)]
    assert peer.held == {name: weights_digest({name: each}) for name, each in base().items()}
    assert len(processes) == 2


async def test_a_request_of_one_policy_waits_while_the_server_is_started_for_another(
    peer: Peer, pair: Pair
) -> None:
    solver, verifier = pair
    await solver.load_adapter(1, FORM, adapted(base(), 1))
    await verifier.load(0, base())
    loading, go_on = threading.Event(), threading.Event()

    def lost(_: Json) -> Reply:
        peer.label = "default"
        return 500, {"error": "out of memory"}

    def slow(_: Json) -> Reply:
        loading.set()
        assert go_on.wait(PATIENCE_S)
        return 500, {"error": "once more"}

    peer.replies = {"/generate": [lost], "/update_weights_from_disk": [slow]}
    first = asyncio.ensure_future(solver.generate([1, 2], THREE))
    assert await asyncio.to_thread(loading.wait, PATIENCE_S)
    asked_before = peer.paths().count("/generate")
    second = asyncio.ensure_future(verifier.generate([3, 4], THREE))
    await asyncio.sleep(0)
    go_on.set()
    assert spans(await first) == [(1, 0, 3)]
    assert spans(await second) == [(0, 0, 3)]
    assert peer.paths().count("/generate") == asked_before + 2


async def test_closing_one_policy_leaves_the_server_to_the_other(
    peer: Peer, processes: list[FakeProcess], pair: Pair
) -> None:
    solver, verifier = pair
    await solver.load_adapter(1, FORM, adapted(base(), 1))
    await verifier.load_adapter(1, FORM, adapted(base(), 2))
    kept, aborted = Slow(peer), Slow(peer, "abort")
    peer.replies["/generate"] = [kept]
    of_verifier = asyncio.ensure_future(verifier.generate([1, 2], THREE))
    await kept.until_asked()
    peer.replies["/generate"] = [aborted]
    of_solver = asyncio.ensure_future(solver.generate([1, 2], THREE))
    await aborted.until_asked()

    def end(body: Json) -> Reply:
        sent = [each for path, each in peer.calls if path == "/generate"]
        assert body == {"rid": sent[-1]["rid"]}
        aborted.go_on.set()
        return 200, {}

    peer.replies["/abort_request"] = [end]
    await solver.close()
    assert (await of_solver).finish_reason == "abort"
    assert not of_verifier.done()
    assert peer.paths().count("/unload_lora_adapter") == 1
    assert numbers(peer) == ["1"]
    kept.go_on.set()
    assert spans(await of_verifier) == [(1, 0, 3)]
    assert (await asked(peer, verifier))["lora_path"] in peer.adapters
    await verifier.load_adapter(2, FORM, adapted(base(), 3))
    with pytest.raises(EngineFailedError, match="the engine was closed"):
        await solver.generate([1], THREE)
    assert [process.stopped for process in processes] == [False]
    await verifier.close()
    assert [process.stopped for process in processes] == [True]


async def test_a_policy_that_leaves_during_an_update_of_another_is_served_no_more(
    peer: Peer, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "ABORT_S", 0.05)  # there is nothing to abort
    solver, verifier = pair
    await solver.load_adapter(1, FORM, adapted(base(), 1))
    await verifier.load_adapter(1, FORM, adapted(base(), 2))
    asked, left = threading.Event(), threading.Event()

    def slowly(body: Json) -> Reply:
        asked.set()
        assert left.wait(PATIENCE_S)
        peer.adapters[body["lora_name"]] = {}
        return 200, {"success": True}

    peer.replies["/load_lora_adapter"] = [slowly]
    updating = asyncio.ensure_future(verifier.load_adapter(2, FORM, adapted(base(), 3)))
    assert await asyncio.to_thread(asked.wait, PATIENCE_S)
    leaving = asyncio.ensure_future(solver.close())
    while len(solver._servers._engines) > 1:  # noqa: ASYNC110 -- it has no event for it
        await asyncio.sleep(0.01)
    left.set()
    await asyncio.gather(updating, leaving)
    assert numbers(peer) == ["2"]
    await verifier.load_adapter(3, FORM, adapted(base(), 4))
    assert numbers(peer) == ["3"]


async def test_a_request_that_a_server_does_not_abort_ends_with_its_engine(
    peer: Peer, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "ABORT_S", 0.05)
    solver, verifier = pair
    await solver.load(0, base())
    await verifier.load(0, base())
    slow = Slow(peer, finish=None)
    peer.replies["/generate"] = [slow]
    running = asyncio.ensure_future(solver.generate([1, 2], THREE))
    await slow.until_asked()
    await solver.close()
    assert (await running).finish_reason == "abort"
    assert not slow.waited.is_set()
    assert spans(await verifier.generate([1, 2], THREE)) == [(0, 0, 3)]
    slow.go_on.set()


async def test_another_base_model_is_refused_and_the_first_policy_goes_on(
    peer: Peer, pair: Pair
) -> None:
    solver, verifier = pair
    own = base()
    await solver.load(0, own)
    other = base() | {"lm_head.weight": counting(2)["lm_head.weight"]}
    for loading in (verifier.load(0, other), verifier.load_adapter(1, FORM, adapted(other, 1))):
        with pytest.raises(ConfigError, match=r"1 tensors differ, lm_head\.weight among them"):
            await loading
    assert verifier.version == -1
    with pytest.raises(KeyError):
        verifier.digest(0)
    assert (len(peer.tensors), peer.adapters) == (1, {})
    await verifier.load(0, base())
    await solver.load_adapter(1, FORM, adapted(own, 1))
    with pytest.raises(ConfigError, match="do not have one base model"):
        await solver.load(2, other)
    assert (await asked(peer, solver))["lora_path"] in peer.adapters


async def test_an_adapter_that_is_refused_leaves_the_other_policy_its_own(
    peer: Peer, pair: Pair
) -> None:
    solver, verifier = pair
    await solver.load_adapter(1, FORM, adapted(base(), 1))
    peer.replies["/load_lora_adapter"] = [lambda _: (400, {"error_message": "no room"})]
    with pytest.raises(ConfigError, match="no room"):
        await verifier.load_adapter(1, FORM, adapted(base(), 2))
    assert (solver.version, verifier.version) == (1, -1)
    assert (await asked(peer, solver))["lora_path"] in peer.adapters


async def test_a_server_that_broke_fails_the_engines_of_all_policies(
    peer: Peer, pair: Pair
) -> None:
    for engine in pair:
        await engine.load(0, base())
    peer.replies["/generate"] = [lambda _: (401, {"error": "no"})]
    for engine in pair:
        with pytest.raises(EngineFailedError, match="refused /generate: 401"):
            await engine.generate([1], THREE)


def test_a_policy_of_another_model_cannot_share_the_server() -> None:
    config = EngineConfig(name="sglang", sglang=SGLANG)
    first = make_engine(config, CONFIG)
    with pytest.raises(ConfigError, match=r"shared: the base models .* different config\.json"):
        make_engine(config, {**CONFIG, "rope_theta": 5.0}, beside=first)
    assert make_engine(config, CONFIG, beside=first) is not first


async def test_engines_share_a_server_only_where_the_recipe_says_so(
    processes: list[FakeProcess],
) -> None:
    for shared, expected in ((True, [2]), (False, [1, 1])):
        processes.clear()
        sglang = SGLANG.model_copy(update={"shared": shared})
        config = EngineConfig(name="sglang", max_tokens=64, sglang=sglang)
        first = make_engine(config, CONFIG)
        second = make_engine(config, CONFIG, beside=first)
        for engine in (first, second):
            await engine.load(0, base())
        assert [process.num_policies for process in processes] == expected
        await first.close()
        await second.close()
        assert all(process.stopped for process in processes)


def test_a_shared_server_has_room_for_the_requests_and_adapters_of_all_policies() -> None:
    config = EngineConfig(name="sglang", max_concurrent=3, max_tokens=92, sglang=SGLANG)
    for num_policies, expected in ((1, ("3", "300", "8")), (2, ("6", "600", "16"))):
        args = server_args(config, Path("/model"), 1, num_policies=num_policies)
        flags = ("--max-running-requests", "--max-total-tokens", "--max-loras-per-batch")
        assert tuple(args[args.index(flag) + 1] for flag in flags) == expected
