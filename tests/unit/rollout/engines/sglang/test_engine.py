import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from rollout.config import EngineConfig, SglangConfig
from rollout.engines.engine import EngineFailedError, RequestRefusedError, SamplingParams
from rollout.engines.sglang import server
from rollout.engines.sglang.engine import ABORTS_MAX, SglangRolloutEngine
from rollout.engines.sglang.server import CUTS_MAX
from rollout.service.episode_failures import broken_engine, failed_episode
from storage.errors import ConfigError
from storage.formats.safetensors import weights_digest
from storage.records.rollouts import FailureKind
from storage.records.types import Json
from storage.records.weights import HostTensor
from tests.support.models.chain_model import CONFIG, counting
from tests.support.sglang_peer import Peer, counted, sglang_peer

PROBES = 1
"""Requests of the engine's own, at the first load."""
THREE = SamplingParams(max_new_tokens=3)
MakeEngine = Callable[..., Awaitable[SglangRolloutEngine]]


@pytest.fixture
def peer() -> Iterator[Peer]:
    with sglang_peer() as running:
        yield running


@pytest.fixture
def second_peer() -> Iterator[Peer]:
    with sglang_peer() as running:
        yield running


@pytest.fixture
async def engine_at() -> AsyncIterator[MakeEngine]:
    """`await engine_at([peer], …)`: an engine with version 0 loaded."""
    made: list[SglangRolloutEngine] = []

    async def make(peers: list[Peer], **sglang: object) -> SglangRolloutEngine:
        sglang = {"check_every": 0} | sglang
        settings = SglangConfig(urls=tuple(peer.url for peer in peers), **sglang)
        config = EngineConfig(name="sglang", max_concurrent=4, max_tokens=64, sglang=settings)
        made.append(SglangRolloutEngine(config, CONFIG))
        await made[-1].load(0, counting(1))
        return made[-1]

    yield make
    for engine in made:
        await engine.close()


def started(peer: Peer, model: Json = CONFIG) -> SglangRolloutEngine:
    """Return an engine without weights."""
    config = EngineConfig(name="sglang", max_tokens=64, sglang=SglangConfig(urls=(peer.url,)))
    return SglangRolloutEngine(config, model)


def lose(peer: Peer) -> Callable[[Json], None]:
    """A reply of a server that is started again without weights: none."""

    def reply(_: Json) -> None:
        peer.label = "default"

    return reply


def changed(tensors: dict[str, HostTensor], *names: str) -> dict[str, HostTensor]:
    """The same tensors, but other objects for `names`."""
    return {**tensors, **{name: counting(2)[name] for name in names}}


async def test_an_answer_has_the_tokens_and_log_probabilities_of_the_server(
    peer: Peer, engine_at: MakeEngine
) -> None:
    engine = await engine_at([peer])
    answer = await engine.generate([4, 5], THREE)
    assert answer.tokens.tolist() == [6, 7, 8]
    assert answer.logprobs.tolist() == [-0.5] * 3
    assert [(span.version, span.start, span.end) for span in answer.spans] == [(0, 0, 3)]
    body = peer.calls[-1][1]
    assert body["input_ids"] == [4, 5]
    assert "text" not in body


async def test_only_changed_tensors_are_sent(peer: Peer, engine_at: MakeEngine) -> None:
    first = counting(1)
    engine = await engine_at([peer])
    await engine.load(1, first)
    await engine.load(2, changed(first, "lm_head.weight"))
    assert peer.tensors == [sorted(first), sorted(first), ["lm_head.weight"]]


@pytest.mark.parametrize(
    ("kv_cache", "expected"),
    [
        (
            "keep",
            [
                ("/pause_generation", "in_place"),
                ("/update_weights_from_disk", False),
                ("/continue_generation", None),
            ],
        ),
        (
            "recompute",
            [
                ("/pause_generation", "retract"),
                ("/update_weights_from_disk", True),
                ("/continue_generation", None),
            ],
        ),
        ("drain", [("/update_weights_from_disk", True)]),
    ],
)
async def test_an_update_treats_the_kv_cache_as_the_recipe_says(
    peer: Peer, engine_at: MakeEngine, kv_cache: str, expected: list[tuple[str, object]]
) -> None:
    engine = await engine_at([peer], kv_cache=kv_cache)
    peer.calls.clear()
    await engine.load(1, counting(2))
    assert [
        (path, body.get("mode", body.get("flush_cache"))) for path, body in peer.calls
    ] == expected


async def test_answers_of_a_server_without_spans_end_before_new_weights(
    peer: Peer, engine_at: MakeEngine
) -> None:
    peer.names_versions = False
    engine = await engine_at([peer])
    peer.calls.clear()
    await engine.load(1, counting(2))
    assert peer.paths() == ["/update_weights_from_disk"]
    answer = await engine.generate([1], THREE)
    assert [(span.version, span.start, span.end) for span in answer.spans] == [(1, 0, 3)]


async def test_a_refused_update_keeps_the_version_and_continues_generation(
    peer: Peer, engine_at: MakeEngine
) -> None:
    engine = await engine_at([peer])
    refusal = (400, {"success": False, "message": "shape mismatch"})
    peer.replies["/update_weights_from_disk"] = [lambda _: refusal]
    with pytest.raises(ConfigError, match="shape mismatch"):
        await engine.load(1, counting(2))
    assert peer.paths()[-1] == "/continue_generation"
    assert engine.version == 0
    with pytest.raises(KeyError):
        engine.digest(1)
    assert (await engine.generate([1], THREE)).spans[0].version == 0


async def test_a_request_to_a_lost_server_is_asked_again_after_all_weights_are_loaded(
    peer: Peer, engine_at: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await engine_at([peer])
    peer.replies["/generate"] = [lose(peer)]
    answer = await engine.generate([1], THREE)
    assert answer.tokens.tolist() == [2, 3, 4]
    assert peer.tensors == [sorted(counting(1))] * 2
    assert peer.paths()[-2:] == ["/continue_generation", "/generate"]
    assert f"was lost: the SGLang server at {peer.url} does not answer" in caplog.text


async def test_a_request_whose_connection_was_cut_is_asked_again_without_new_weights(
    peer: Peer, engine_at: MakeEngine
) -> None:
    engine = await engine_at([peer])
    peer.replies["/generate"] = [lambda _: None] * CUTS_MAX
    assert (await engine.generate([1], THREE)).tokens.tolist() == [2, 3, 4]
    assert peer.tensors == [sorted(counting(1))]


async def test_a_server_that_cuts_connection_after_connection_is_lost(
    peer: Peer, engine_at: MakeEngine
) -> None:
    engine = await engine_at([peer])
    peer.replies["/generate"] = [lambda _: None] * (CUTS_MAX + 1)
    assert (await engine.generate([1], THREE)).tokens.tolist() == [2, 3, 4]
    assert peer.tensors == [sorted(counting(1))] * 2
    peer.replies["/generate"] = [lambda _: None] * 99
    with pytest.raises(EngineFailedError, match="does not answer"):
        await engine.generate([1], THREE)


async def test_an_update_whose_connection_was_cut_is_repeated_with_all_tensors(
    peer: Peer, engine_at: MakeEngine
) -> None:
    first = counting(1)
    engine = await engine_at([peer])
    await engine.load(1, first)
    peer.tensors.clear()
    peer.replies["/update_weights_from_disk"] = [lambda _: None]
    await engine.load(2, changed(first, "lm_head.weight"))
    assert peer.tensors == [["lm_head.weight"], sorted(first)]
    assert peer.label.endswith("-2")


async def test_a_request_during_an_update_shares_its_prefix_with_no_other(
    peer: Peer, engine_at: MakeEngine
) -> None:
    engine = await engine_at([peer])
    loop, updating, asked = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def wait(_: Json) -> tuple[int, Json]:
        loop.call_soon_threadsafe(updating.set)
        asyncio.run_coroutine_threadsafe(asked.wait(), loop).result()
        return 200, {}

    peer.replies["/update_weights_from_disk"] = [wait]
    load = asyncio.ensure_future(engine.load(1, counting(2)))
    await updating.wait()
    peer.calls.clear()
    await asyncio.gather(*(engine.generate([1], THREE) for _ in range(2)))
    asked.set()
    await load
    during = [body["extra_key"] for path, body in peer.calls if path == "/generate"]
    assert during == [body["rid"] for path, body in peer.calls if path == "/generate"]
    assert len(set(during)) == 2
    peer.label = peer.label.replace("-0", "-1")
    peer.calls.clear()
    await asyncio.gather(*(engine.generate([1], THREE) for _ in range(2)))
    assert [body["extra_key"] for _, body in peer.calls] == [peer.label] * 2


async def test_programs_of_a_recipe_need_the_permission_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = [
        SglangConfig(python="/opt/python"),
        SglangConfig(server_args=("--attention-backend", "fa3")),
    ]
    monkeypatch.setenv("ASTRAFLOW_IMPORT_ALLOW", "my_package")
    for sglang in named:
        with pytest.raises(ConfigError, match="ASTRAFLOW_IMPORT_ALLOW does not allow that here"):
            SglangRolloutEngine(EngineConfig(name="sglang", sglang=sglang), CONFIG)
    monkeypatch.setenv("ASTRAFLOW_IMPORT_ALLOW", "my_package,sglang")
    for sglang in (*named, SglangConfig()):
        assert SglangRolloutEngine(EngineConfig(name="sglang", sglang=sglang), CONFIG).version == -1


async def test_requests_that_lose_one_server_together_restart_it_once(
    peer: Peer, engine_at: MakeEngine
) -> None:
    engine = await engine_at([peer])
    peer.replies["/generate"] = [lose(peer)] * 3
    answers = await asyncio.gather(*(engine.generate([token], THREE) for token in (1, 2, 3)))
    assert [answer.tokens.tolist() for answer in answers] == [[2, 3, 4], [3, 4, 5], [4, 5, 6]]
    assert len(peer.tensors) == 2


async def test_a_request_that_is_asked_while_a_lost_server_starts_waits_for_it(
    peer: Peer, engine_at: MakeEngine
) -> None:
    engine = await engine_at([peer])
    loop = asyncio.get_running_loop()
    loading, more_asked = asyncio.Event(), asyncio.Event()

    def last_is_lost(_: dict[str, object]) -> None:
        loop.call_soon_threadsafe(more_asked.set)

    def slow_update(_: dict[str, object]) -> None:
        loop.call_soon_threadsafe(loading.set)
        asyncio.run_coroutine_threadsafe(more_asked.wait(), loop).result()

    peer.replies["/generate"] = [*[lose(peer)] * 3, last_is_lost]
    peer.replies["/update_weights_from_disk"] = [slow_update]
    first = asyncio.ensure_future(engine.generate([1], THREE))
    await loading.wait()
    later = [asyncio.ensure_future(engine.generate([token], THREE)) for token in (2, 3, 4)]
    answers = await asyncio.gather(first, *later)
    assert [answer.tokens.tolist()[0] for answer in answers] == [2, 3, 4, 5]


async def test_a_server_that_a_load_replaced_is_not_replaced_again_for_its_lost_requests(
    peer: Peer, engine_at: MakeEngine
) -> None:
    first = counting(1)
    engine = await engine_at([peer])
    await engine.load(1, first)
    loop = asyncio.get_running_loop()
    updating, lost = asyncio.Event(), asyncio.Event()

    def lose_after_the_request(_: dict[str, object]) -> None:
        loop.call_soon_threadsafe(updating.set)
        asyncio.run_coroutine_threadsafe(lost.wait(), loop).result()

    def lose(_: dict[str, object]) -> None:
        loop.call_soon_threadsafe(lost.set)

    peer.tensors.clear()
    peer.replies["/update_weights_from_disk"] = [lose_after_the_request]
    peer.replies["/generate"] = [lose]
    load = asyncio.ensure_future(engine.load(2, changed(first, "lm_head.weight")))
    await updating.wait()
    answer = await engine.generate([1], THREE)
    await load
    assert answer.tokens.tolist() == [2, 3, 4]
    assert peer.tensors == [["lm_head.weight"], sorted(first)]


async def test_a_server_whose_replacement_was_not_awaited_gets_all_tensors(
    peer: Peer, engine_at: MakeEngine
) -> None:
    first = counting(1)
    engine = await engine_at([peer])
    await engine.load(1, first)
    loop, updating = asyncio.get_running_loop(), asyncio.Event()

    def fail(_: dict[str, object]) -> None:
        loop.call_soon_threadsafe(updating.set)

    peer.replies["/generate"], peer.replies["/update_weights_from_disk"] = [lose(peer)], [fail]
    request = asyncio.ensure_future(engine.generate([1], THREE))
    await updating.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    await engine.load(2, changed(first, "lm_head.weight"))
    assert peer.label.endswith("-2")
    assert sorted(first) in peer.tensors[2:]


async def test_a_server_that_restarted_without_a_lost_request_gets_all_tensors(
    peer: Peer, engine_at: MakeEngine
) -> None:
    first = counting(1)
    engine = await engine_at([peer])
    await engine.load(1, first)
    peer.label = "default"
    await engine.load(2, changed(first, "lm_head.weight"))
    assert peer.tensors[-1] == sorted(first)


async def test_weights_of_another_client_end_the_engine_at_the_next_load(
    peer: Peer, engine_at: MakeEngine
) -> None:
    engine = await engine_at([peer])
    peer.label = "0badcafe-7" + "x" * 10_000
    with pytest.raises(EngineFailedError, match="which another client loaded") as raised:
        await engine.load(1, counting(2))
    assert len(str(raised.value)) < 1_000


async def test_the_versions_of_servers_that_were_updated_before_a_failure_are_known(
    peer: Peer, second_peer: Peer, engine_at: MakeEngine
) -> None:
    engine = await engine_at([peer, second_peer])
    second_peer.replies["/update_weights_from_disk"] = [lambda _: (400, {"message": "no space"})]
    with pytest.raises(ConfigError, match="no space"):
        await engine.load(1, counting(2))
    assert (peer.label[-2:], second_peer.label[-2:], engine.version) == ("-1", "-0", 0)
    assert engine.digest(1) == weights_digest(counting(2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lm_head.weight": None}, "lack lm_head.weight, which the model has"),
        ({"extra": counting(1)["lm_head.weight"]}, "have extra, which the model lacks"),
        (
            {"lm_head.weight": counting(1)["model.norm.weight"]},
            r"lm_head.weight has shape \[16\], and the model's is \[16, 16\]",
        ),
    ],
)
async def test_the_first_weights_must_be_those_of_the_model(
    peer: Peer, change: dict[str, HostTensor | None], message: str
) -> None:
    engine = started(peer)
    given = {name: tensor for name, tensor in (counting(1) | change).items() if tensor}
    with pytest.raises(ConfigError, match=message):
        await engine.load(0, given)
    assert peer.tensors == []
    await engine.close()


@pytest.mark.parametrize(
    ("layers", "message"),
    [(10**9, "num_hidden_layers is 1000000000"), (1_024, "has more than")],
)
async def test_a_config_json_of_absurd_sizes_is_refused_before_a_server_loads_anything(
    peer: Peer, layers: int, message: str
) -> None:
    engine = started(peer, {**CONFIG, "num_hidden_layers": layers})
    with pytest.raises(ConfigError, match=message):
        await engine.load(0, counting(1))
    assert peer.calls == []
    assert engine.server_pids() == []
    await engine.close()


@pytest.mark.parametrize("key", ["attn_implementation", "experts_implementation"])
async def test_a_kernel_of_the_hub_in_a_config_json_is_not_loaded(peer: Peer, key: str) -> None:
    engine = started(peer, {**CONFIG, key: "kernels-community/evil"})
    await engine.load(0, counting(1))
    assert engine.version == 0
    await engine.close()


async def test_tensors_that_a_server_holds_are_loaded_again_at_the_start_and_then_in_turn(
    peer: Peer, engine_at: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = counting(1)
    names = list(tensors)
    monkeypatch.setattr(server, "COMPARED_BYTES", 1)
    engine = await engine_at([peer], check_every=2)
    assert peer.tensors == [sorted(tensors)] * 2
    assert [body["weight_version"] for path, body in peer.calls if "update" in path] == [
        peer.label
    ] * 2
    peer.tensors.clear()
    for version in range(1, 2 * len(names) + 3):
        await engine.load(version, tensors := changed(tensors, names[-1]))
    compared = [sent[0] for sent in peer.tensors[2::3]]
    assert compared == [*names, names[0]]
    assert peer.tensors[:2] == [sorted(tensors), [names[-1]]]


async def test_a_server_that_holds_other_weights_than_it_was_given_ends_the_engine(
    peer: Peer, engine_at: MakeEngine
) -> None:
    engine = await engine_at([peer], check_every=1)
    tensors = counting(2)
    await engine.load(1, tensors)
    peer.held["lm_head.weight"] = "other"
    with pytest.raises(EngineFailedError, match=r"'lm_head\.weight on device 0' among"):
        await engine.load(2, changed(tensors, "model.norm.weight"))
    with pytest.raises(EngineFailedError, match="did not hold the weights"):
        await engine.generate([1], THREE)


@pytest.mark.parametrize(
    "reply",
    [
        (404, {"detail": "Not Found"}),
        (200, {"ranks": []}),
        (200, {"ranks": [{"checksums": {"a": "0f"}}, {"checksums": {}}]}),
        (200, {"ranks": [{"checksums": {"a": None}}]}),
        (200, {"ranks": [{"checksums": ["a"]}]}),
    ],
)
async def test_a_server_that_cannot_give_digests_is_not_compared(
    peer: Peer, engine_at: MakeEngine, caplog: pytest.LogCaptureFixture, reply: tuple[int, Json]
) -> None:
    peer.replies["/weights_checker"] = [lambda _: reply]
    engine = await engine_at([peer], check_every=1)
    await engine.load(1, counting(2))
    assert "are not compared" in caplog.text
    assert peer.paths().count("/weights_checker") == 1
    assert len(peer.tensors) == 2


async def test_a_server_that_another_client_left_paused_is_continued(
    peer: Peer, engine_at: MakeEngine
) -> None:
    await engine_at([peer], kv_cache="drain")
    assert peer.paths()[0] == "/continue_generation"


async def test_closing_during_a_load_continues_the_server(
    peer: Peer, engine_at: MakeEngine
) -> None:
    engine = await engine_at([peer])
    loop, updating, released = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def wait(_: dict[str, object]) -> tuple[int, dict[str, object]]:
        loop.call_soon_threadsafe(updating.set)
        asyncio.run_coroutine_threadsafe(released.wait(), loop).result()
        return 200, {}

    peer.replies["/update_weights_from_disk"] = [wait]
    load = asyncio.ensure_future(engine.load(1, counting(2)))
    await updating.wait()
    closing = asyncio.ensure_future(engine.close())
    released.set()
    await closing
    await load
    assert peer.paths()[-1] == "/continue_generation"


async def test_a_server_that_is_lost_again_and_again_ends_the_engine(
    peer: Peer, engine_at: MakeEngine
) -> None:
    engine = await engine_at([peer])
    peer.replies["/generate"] = [lambda _: (500, {"error": "out of memory"})] * 99
    with pytest.raises(EngineFailedError, match="out of memory"):
        await engine.generate([1], THREE)
    with pytest.raises(EngineFailedError, match="out of memory"):
        await engine.generate([1], THREE)


async def test_tokens_of_weights_that_another_client_loaded_are_refused(
    peer: Peer, engine_at: MakeEngine
) -> None:
    engine = await engine_at([peer])
    peer.label = "0badcafe-0"
    with pytest.raises(EngineFailedError, match="does another worker use the same server"):
        await engine.generate([1], THREE)


async def test_a_request_that_the_server_aborted_is_asked_again(
    peer: Peer, engine_at: MakeEngine
) -> None:
    engine = await engine_at([peer])

    def abort(body: dict[str, object]) -> tuple[int, dict[str, object]]:
        return 200, counted(body, peer.label, "abort")

    peer.replies["/generate"] = [abort] * ABORTS_MAX
    assert (await engine.generate([1], THREE)).finish_reason == "length"
    peer.replies["/generate"] = [abort] * (ABORTS_MAX + 1)
    with pytest.raises(EngineFailedError, match=f"aborted a request of 1 tokens {ABORTS_MAX + 1}"):
        await engine.generate([1], THREE)


async def test_cancelling_a_request_aborts_it_in_the_server(
    peer: Peer, engine_at: MakeEngine
) -> None:
    engine = await engine_at([peer])
    asked, aborted, released = asyncio.Event(), asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait(body: dict[str, object]) -> tuple[int, dict[str, object]]:
        loop.call_soon_threadsafe(asked.set)
        asyncio.run_coroutine_threadsafe(released.wait(), loop).result()
        return 200, counted(body, peer.label, "abort")

    def end(_: dict[str, object]) -> tuple[int, dict[str, object]]:
        loop.call_soon_threadsafe(aborted.set)
        return 200, {}

    peer.replies["/generate"], peer.replies["/abort_request"] = [wait], [end]
    request = asyncio.ensure_future(engine.generate([1], THREE))
    await asked.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    await aborted.wait()
    released.set()
    sent = dict(peer.calls)
    assert sent["/abort_request"] == {"rid": sent["/generate"]["rid"]}


async def test_equal_prompts_go_to_one_server_and_others_are_spread(
    peer: Peer, second_peer: Peer, engine_at: MakeEngine
) -> None:
    engine = await engine_at([peer, second_peer])
    for _ in range(6):
        await engine.generate([7, 7, 7], THREE)
    counts = [one.paths().count("/generate") - PROBES for one in (peer, second_peer)]
    assert sorted(counts) == [0, 6]
    for token in range(12):
        await engine.generate([token], THREE)
    assert all(one.paths().count("/generate") > PROBES for one in (peer, second_peer))


async def test_every_server_gets_new_weights(
    peer: Peer, second_peer: Peer, engine_at: MakeEngine
) -> None:
    engine = await engine_at([peer, second_peer])
    await engine.load(1, counting(2))
    assert (peer.label, second_peer.label) == (peer.label, peer.label)
    assert peer.label.endswith("-1")
    assert engine.capacity() == 8


async def test_the_api_key_of_the_environment_is_sent(
    peer: Peer, engine_at: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRAFLOW_SGLANG_API_KEY", "s3cret")
    await engine_at([peer])
    assert set(peer.keys) == {"Bearer s3cret"}


async def test_prompts_share_cached_prefixes_within_one_version_only(
    peer: Peer, engine_at: MakeEngine
) -> None:
    engine = await engine_at([peer])
    await engine.generate([1], THREE)
    await engine.load(1, counting(2))
    await engine.generate([1], THREE)
    keys = [body["extra_key"] for path, body in peer.calls if path == "/generate"]
    assert [key.rpartition("-")[2] for key in keys[PROBES:]] == ["0", "1"]


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_refused_request_fails_alone(
    peer: Peer, engine_at: MakeEngine, status: int
) -> None:
    engine = await engine_at([peer])
    peer.replies["/generate"] = [lambda _: (status, {"error": "the prompt is too long"})]
    words = rf"a request of 2 tokens for 3 more was refused: .*{status} .*the prompt is too long"
    with pytest.raises(RequestRefusedError, match=words) as refused:
        await engine.generate([1, 2], THREE)
    assert failed_episode(refused.value).failure_kind == FailureKind.INFRASTRUCTURE
    assert broken_engine(refused.value) is None
    assert (await engine.generate([1], THREE)).tokens.tolist() == [2, 3, 4]


@pytest.mark.parametrize("status", [401, 403, 404, 405])
async def test_a_server_that_refuses_every_request_ends_the_engine(
    peer: Peer, engine_at: MakeEngine, status: int
) -> None:
    engine = await engine_at([peer])
    peer.replies["/generate"] = [lambda _: (status, {"error": "no"})]
    for _ in range(2):
        with pytest.raises(EngineFailedError, match=f"refused /generate: {status} "):
            await engine.generate([1], THREE)


async def test_refused_requests_show_that_a_server_works(peer: Peer, engine_at: MakeEngine) -> None:
    engine = await engine_at([peer])
    refusal = (400, {"error": "no"})
    for _ in range(CUTS_MAX + 1):
        peer.replies["/generate"] = [lambda _: None, lambda _: refusal]
        with pytest.raises(RequestRefusedError):
            await engine.generate([1], THREE)
    assert peer.tensors == [sorted(counting(1))]
