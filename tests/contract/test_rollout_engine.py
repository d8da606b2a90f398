"""The contract of all rollout engines (`docs/extending/rollout_engine.md`). To test a new engine,
add a line to `ENGINES_UNDER_TEST`. `make test-engines` includes real SGLang servers.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from itertools import pairwise
from math import log
from typing import Any

import numpy as np
import pytest

from rollout.config import EngineConfig, SglangConfig
from rollout.engines.engine import (
    NO_VERSION,
    ContextFullError,
    Engine,
    EngineFailedError,
    Generation,
    SamplingParams,
    make_engine,
)
from rollout.service.weight_loader import WeightLoader
from storage.errors import ConfigError
from storage.formats.safetensors import weights_digest
from storage.records.types import Json
from storage.records.weights import HostTensor
from storage.store.object_store import ObjectStore
from storage.weights import publisher, reader
from storage.weights.manifests import LoadedWeights
from tests.support.models.chain_model import CONFIG, VOCAB, counting, host_tensor, iid_weights
from tests.support.models.trainer_cases import (
    MODEL_CONFIG,
    base_weights,
    reference_logprobs,
    reference_model,
    sampled_batch,
)
from tests.support.runs.builders import row
from tests.support.sglang_servers import SGLANG_PYTHON, Servers
from trainer.adapters import Lora
from trainer.config import TrainConfig
from trainer.engines.torch.engine import TorchTrainEngine

ENGINES_UNDER_TEST = ["torch", *(["sglang"] if SGLANG_PYTHON else [])]
SEEDED = {"torch"}
"""Engines of which a seed determines the tokens; SGLang does so on a GPU only."""
ENDLESS = 8000
"""Tokens that no engine generates within the test that asks for them and takes them back."""

MakeEngine = Callable[..., Awaitable[Engine]]


@pytest.fixture(params=ENGINES_UNDER_TEST)
def engine_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def sglang_servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.stop()


@pytest.fixture
async def engine_of(
    engine_name: str, sglang_servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[MakeEngine]:
    """`await engine_of(tensors, …)`: an engine with `tensors` loaded as version 0, closed at the
    end of the test.
    """
    created: list[Engine] = []

    async def make(
        tensors: dict[str, HostTensor] | None,
        model: Json = CONFIG,
        max_concurrent: int = 8,
        max_tokens: int = 64,
    ) -> Engine:
        sglang = SglangConfig()
        if engine_name == "sglang":
            server = sglang_servers.serving(model)
            monkeypatch.setenv("ASTRAFLOW_SGLANG_API_KEY", server.api_key)
            sglang = SglangConfig(urls=(server.url,))
        config = EngineConfig(
            name=engine_name, max_concurrent=max_concurrent, max_tokens=max_tokens, sglang=sglang
        )
        created.append(make_engine(config, model))
        if tensors is not None:
            await created[-1].load(0, tensors)
        return created[-1]

    yield make
    for engine in created:
        await engine.close()


def spans_of(generation: Generation) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in generation.spans]


async def test_greedy_follows_the_likeliest_token_with_log_probability_zero(
    engine_of: MakeEngine,
) -> None:
    engine = await engine_of(counting(1))
    answer = await engine.generate([9, 3], SamplingParams(temperature=0, max_new_tokens=5))
    assert answer.tokens.tolist() == [4, 5, 6, 7, 8]
    assert answer.logprobs.tolist() == [0.0] * 5
    assert [array.dtype.name for array in (answer.tokens, answer.logprobs)] == ["int32", "float32"]
    assert spans_of(answer) == [(0, 0, 5)]
    assert answer.finish_reason == "length"


async def test_a_stop_token_ends_the_answer_and_belongs_to_it(engine_of: MakeEngine) -> None:
    engine = await engine_of(counting(2))
    answer = await engine.generate([1], SamplingParams(stop_ids=(8, 7), max_new_tokens=50))
    assert answer.tokens.tolist() == [3, 5, 7]
    assert answer.finish_reason == "stop"


async def test_a_stop_token_in_the_prompt_has_no_effect(engine_of: MakeEngine) -> None:
    engine = await engine_of(counting(1))
    answer = await engine.generate([4], SamplingParams(stop_ids=(4,), max_new_tokens=2))
    assert answer.tokens.tolist() == [5, 6]


async def test_an_answer_ends_at_the_maximum_context_length(engine_of: MakeEngine) -> None:
    engine = await engine_of(counting(1), max_tokens=16)
    answer = await engine.generate([0] * 10, SamplingParams(max_new_tokens=100))
    assert answer.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert answer.finish_reason == "length"


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(), {0: 0.5, 1: 0.3, 2: 0.2}),
        (SamplingParams(temperature=0.5), {0: 25 / 38, 1: 9 / 38, 2: 4 / 38}),
        (SamplingParams(top_k=2), {0: 5 / 8, 1: 3 / 8}),
        (SamplingParams(top_p=0.75), {0: 5 / 8, 1: 3 / 8}),
        (SamplingParams(top_p=0.45), {0: 1.0}),
        (SamplingParams(temperature=0.5, top_k=2), {0: 25 / 34, 1: 9 / 34}),
        (SamplingParams(top_k=2, top_p=0.6), {0: 1.0}),
    ],
)
async def test_log_probabilities_are_those_of_the_sampling_distribution(
    engine_of: MakeEngine,
    engine_name: str,
    sampling: SamplingParams,
    expected: dict[int, float],
) -> None:
    """Worked out from .5 .3 .2: temperature ½ squares and renormalises (.25 + .09 + .04 = .38); .5
    is ⅝ of .5 + .3.
    """
    engine = await engine_of(iid_weights([0.5, 0.3, 0.2]), max_tokens=512)
    sampling = SamplingParams(**{**vars(sampling), "max_new_tokens": 500})
    if engine_name == "sglang" and sampling.top_k and sampling.top_p < 1:
        with pytest.raises(ConfigError, match="top_p and top_k together"):
            await engine.generate([5], sampling)
        return
    answer = await engine.generate([5], sampling)
    assert set(answer.tokens.tolist()) == set(expected)
    assert answer.logprobs.tolist() == pytest.approx(
        [log(expected[token]) for token in answer.tokens.tolist()], abs=1e-5
    )


async def test_requests_with_different_sampling_share_a_batch(engine_of: MakeEngine) -> None:
    engine = await engine_of(iid_weights([0.5, 0.3, 0.2]))
    requested = [
        (SamplingParams(temperature=0), {0: 1.0}),
        (SamplingParams(top_k=2), {0: 5 / 8, 1: 3 / 8}),
        (SamplingParams(), {0: 0.5, 1: 0.3, 2: 0.2}),
        (SamplingParams(temperature=0.5, top_p=0.89), {0: 25 / 34, 1: 9 / 34}),
    ] * 2
    answers = await asyncio.gather(*(engine.generate([5], sampling) for sampling, _ in requested))
    for answer, (_, expected) in zip(answers, requested, strict=True):
        logprobs = [log(expected[token]) for token in answer.tokens.tolist()]
        assert answer.logprobs.tolist() == pytest.approx(logprobs, abs=1e-5)


async def test_tokens_follow_their_probabilities_over_seeds_and_within_an_answer(
    engine_of: MakeEngine,
) -> None:
    """Chi-square over 3,200 draws with 3 degrees of freedom: above 16.3 once in a thousand
    times.
    """
    probabilities = np.array([0.1, 0.2, 0.3, 0.4])
    engine = await engine_of(iid_weights(probabilities.tolist()), max_concurrent=64)
    answers = await asyncio.gather(
        *(engine.generate([5], SamplingParams(seed=seed, max_new_tokens=16)) for seed in range(200))
    )
    counts = np.bincount(np.concatenate([answer.tokens for answer in answers]), minlength=4)
    expected = 3200 * probabilities
    assert float(((counts - expected) ** 2 / expected).sum()) < 16.3
    assert len({tuple(answer.tokens.tolist()) for answer in answers}) == 200


@pytest.fixture(scope="module")
def random_model() -> Any:
    """A model of transformers with random weights, whose answers depend on the whole context."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        tie_word_embeddings=True,
    )
    model: Any = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]  # transformers is not typed
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model


def tensors_of(model: Any) -> dict[str, HostTensor]:
    return {
        name: host_tensor(parameter.detach().numpy())
        for name, parameter in model.named_parameters()
    }


async def test_log_probabilities_equal_those_of_transformers(
    engine_of: MakeEngine, random_model: Any
) -> None:
    """Many concurrent requests of different lengths, more than the engine's slots, with groups of
    equal prompts.
    """
    import torch

    engine = await engine_of(
        tensors_of(random_model), random_model.config.to_dict(), max_concurrent=7
    )
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 40, 1 + 3 * (i % 5)).tolist() for i in range(10)] * 3
    sampling = [SamplingParams(temperature=0.7, seed=i, max_new_tokens=3 + i) for i in range(30)]
    answers = await asyncio.gather(*map(engine.generate, prompts, sampling))

    for prompt, answer, asked in zip(prompts, answers, sampling, strict=True):
        assert len(answer.tokens) == asked.max_new_tokens
        text = torch.tensor([prompt + answer.tokens.tolist()])
        with torch.inference_mode():
            predicted = torch.log_softmax(
                random_model(text).logits[0, len(prompt) - 1 : -1] / 0.7, dim=-1
            )
        expected = predicted.gather(1, text[0, len(prompt) :, None])[:, 0]
        np.testing.assert_allclose(answer.logprobs, expected.numpy(), atol=1e-4)


async def test_a_request_gives_the_same_tokens_alone_and_among_forty_others(
    engine_of: MakeEngine, engine_name: str, random_model: Any
) -> None:
    if engine_name not in SEEDED:
        pytest.skip(f"{engine_name} does not promise it on a CPU")
    engine = await engine_of(
        tensors_of(random_model), random_model.config.to_dict(), max_concurrent=64
    )
    asked = SamplingParams(temperature=0.9, top_p=0.95, seed=1234, max_new_tokens=30)
    alone = await engine.generate([3, 1, 4, 1, 5], asked)

    others = [SamplingParams(seed=i, max_new_tokens=5 + i, top_k=i % 3) for i in range(40)]
    before = [engine.generate([i % 40, 7], sampling) for i, sampling in enumerate(others[:20])]
    after = [engine.generate([3, 1, 4, 1, 5], sampling) for sampling in others[20:]]
    answers = await asyncio.gather(*before, engine.generate([3, 1, 4, 1, 5], asked), *after)

    assert answers[20].tokens.tolist() == alone.tokens.tolist()
    np.testing.assert_allclose(answers[20].logprobs, alone.logprobs, atol=1e-5)


async def test_weights_are_swapped_between_tokens_and_each_token_has_its_version(
    engine_of: MakeEngine,
) -> None:
    """Version v counts in steps of 1 + v % 2, so that the tokens show which weights sampled them."""
    engine = await engine_of(counting(1), max_tokens=4096)
    running = [
        asyncio.ensure_future(
            engine.generate([start], SamplingParams(max_new_tokens=300 + 20 * start))
        )
        for start in range(12)  # four of them wait for a slot
    ]
    version = 0
    while not all(request.done() for request in running):
        version += 1
        await engine.load(version, counting(1 + version % 2))
        assert engine.version == version
    answers = await asyncio.gather(*running)

    for start, answer in enumerate(answers):
        assert len(answer.tokens) == 300 + 20 * start
        bounds = [0, *(end for _, _, end in spans_of(answer))]
        assert [(begin, end) for _, begin, end in spans_of(answer)] == list(pairwise(bounds))
        assert bounds[-1] == len(answer.tokens)
        versions = np.concatenate([np.full(end - begin, v) for v, begin, end in spans_of(answer)])
        assert np.all(np.diff(versions) >= 0)
        steps = np.diff(answer.tokens, prepend=start) % VOCAB
        assert steps.tolist() == (1 + versions % 2).tolist()
    assert any(len(answer.spans) > 1 for answer in answers)


async def test_a_version_with_an_adapter_is_served_as_the_trainer_computes_it(
    engine_of: MakeEngine, memory_store: ObjectStore
) -> None:
    """The reference is the same training, published as merged weights, in plain transformers."""
    base = {
        name: HostTensor("F32", each.shape, each.bits.astype(np.uint32) << 16)
        for name, each in base_weights().items()
    }
    versions = {}
    for publish in ("merged", "adapter"):
        adapter = Lora.model_validate({"rank": 4, "publish": publish})
        settings = TrainConfig(lr=1e-2, publish_dtype="F32", adapter=adapter)
        trained = TorchTrainEngine(settings, MODEL_CONFIG, seed=3)
        trained.set_weights(base)
        trained.step(sampled_batch(reference_model(base), noise=0.1))
        versions[publish] = trained.weights()
    first = LoadedWeights(publisher.publish(memory_store, "solver", 0, base), base)
    publisher.publish(
        memory_store, "solver", 1, versions["adapter"], base=first, adapter=adapter.stored()
    )
    engine = await engine_of(base, model=MODEL_CONFIG)
    loader = WeightLoader(engine)
    await loader.load(reader.read(memory_store, "solver", 1, first))
    answer = await engine.generate([1, 2, 3], SamplingParams(max_new_tokens=20, seed=5))
    assert spans_of(answer) == [(1, 0, 20)]
    told = row(prompt=(1, 2, 3), answer=answer.tokens.tolist())
    expected, unmerged = (
        reference_logprobs(reference_model(weights), told).detach().numpy()[2:]
        for weights in (versions["merged"], base)
    )
    np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
    assert np.abs(answer.logprobs - unmerged).max() > 0.01


async def test_an_engine_reports_its_version_and_the_digest_of_each_loaded_version(
    engine_of: MakeEngine,
) -> None:
    engine = await engine_of(None, max_concurrent=5)
    assert (engine.version, engine.capacity()) == (NO_VERSION, 5)
    await engine.load(3, counting(1))
    await engine.load(7, counting(2))
    assert engine.version == 7
    assert engine.digest(3) == weights_digest(counting(1))
    assert engine.digest(7) == weights_digest(counting(2))
    with pytest.raises(KeyError):
        engine.digest(4)


async def test_only_newer_or_identical_weights_are_accepted(engine_of: MakeEngine) -> None:
    engine = await engine_of(counting(1))
    await engine.load(2, counting(2))
    await engine.load(2, counting(2))
    with pytest.raises(ValueError, match=r"holds version 2 .* as version 1"):
        await engine.load(1, counting(1))
    with pytest.raises(ValueError, match="other weights as version 2"):
        await engine.load(2, counting(3))
    answer = await engine.generate([0], SamplingParams(max_new_tokens=2))
    assert answer.tokens.tolist() == [2, 4]
    assert spans_of(answer) == [(2, 0, 2)]


async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay_loaded(
    engine_of: MakeEngine,
) -> None:
    engine = await engine_of(counting(1))
    with pytest.raises(ConfigError, match=r"lack lm_head\.weight"):
        await engine.load(
            1, {name: tensor for name, tensor in counting(2).items() if name != "lm_head.weight"}
        )
    answer = await engine.generate([0], SamplingParams(max_new_tokens=2))
    assert answer.tokens.tolist() == [1, 2]
    assert engine.version == 0


async def test_generating_without_weights_is_refused(engine_of: MakeEngine) -> None:
    engine = await engine_of(None)
    with pytest.raises(ConfigError, match="no weights yet"):
        await engine.generate([1], SamplingParams())


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "message"),
    [
        ([], SamplingParams(), ConfigError, "the prompt is empty"),
        ([1, VOCAB], SamplingParams(), ConfigError, "outside the vocabulary of 16"),
        ([-1], SamplingParams(), ConfigError, "outside the vocabulary of 16"),
        ([1], SamplingParams(stop_ids=(99,)), ConfigError, "stop_ids"),
        (
            [1] * 64,
            SamplingParams(),
            ContextFullError,
            r"prompt of 64 tokens .*max_tokens \(now 64\)",
        ),
        (range(2**40), SamplingParams(), ContextFullError, "prompt of 1099511627776 tokens"),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused(
    engine_of: MakeEngine,
    prompt: Sequence[int],
    sampling: SamplingParams,
    error: type[Exception],
    message: str,
) -> None:
    engine = await engine_of(counting(1))
    with pytest.raises(error, match=message):
        await engine.generate(prompt, sampling)


async def test_a_cancelled_request_frees_its_place(engine_of: MakeEngine) -> None:
    engine = await engine_of(counting(1), max_concurrent=2, max_tokens=8192)
    endless = [
        asyncio.ensure_future(engine.generate([0], SamplingParams(max_new_tokens=ENDLESS)))
        for _ in range(4)
    ]  # two run, two wait
    await asyncio.sleep(0.05)
    for request in endless:
        request.cancel()
    answer = await engine.generate([7], SamplingParams(max_new_tokens=3))
    assert answer.tokens.tolist() == [8, 9, 10]
    await asyncio.wait(endless)
    assert all(request.cancelled() for request in endless)


async def test_closing_aborts_running_and_waiting_requests(engine_of: MakeEngine) -> None:
    engine = await engine_of(counting(1), max_concurrent=2, max_tokens=8192)
    endless = [
        asyncio.ensure_future(engine.generate([0], SamplingParams(max_new_tokens=ENDLESS)))
        for _ in range(3)
    ]  # two run, one waits
    await asyncio.sleep(0.05)
    await engine.close()
    await engine.close()

    for answer in await asyncio.gather(*endless):
        assert answer.finish_reason == "abort"
        length = len(answer.tokens)
        assert answer.tokens.tolist() == [(1 + i) % VOCAB for i in range(length)]
        assert spans_of(answer) == ([(0, 0, length)] if length else [])
    with pytest.raises(EngineFailedError, match="closed"):
        await engine.generate([1], SamplingParams())
    with pytest.raises(EngineFailedError, match="closed"):
        await engine.load(1, counting(2))


@pytest.mark.parametrize(
    "change",
    [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}, {"max_new_tokens": 0}],
)
def test_invalid_sampling_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        SamplingParams(**change)


def test_an_unknown_engine_is_refused_with_a_list_of_engines() -> None:
    with pytest.raises(ConfigError, match="torch"):
        make_engine(EngineConfig(name="warp"), CONFIG)
