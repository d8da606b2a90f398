"""Behaviour of the torch engine beyond the contract: its thread, its failures, its shared prefixes,
and the reuse of slots.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from rollout.config import EngineConfig
from rollout.engines.engine import (
    EngineFailedError,
    Generation,
    RequestRefusedError,
    SamplingParams,
)
from rollout.engines.torch import engine as engine_module
from rollout.engines.torch.architecture import read_architecture
from rollout.engines.torch.batch import ContinuousBatch, Request
from rollout.engines.torch.decoder import Decoder
from rollout.engines.torch.decoder_weights import DecoderWeights, fuse
from rollout.engines.torch.engine import TorchRolloutEngine
from rollout.engines.torch.kv_cache import KVCache
from rollout.engines.torch.prefixes import Prefix, PrefixCache
from rollout.engines.torch.slots import Slots
from storage.errors import ConfigError
from storage.records.types import Json
from storage.records.weights import HostTensor
from tests.support.models.chain_model import CONFIG, VOCAB, counting

CPU = torch.device("cpu")


class RecordingDecoder(Decoder):
    """A decoder that records which texts it computed."""

    def __init__(self) -> None:
        super().__init__(read_architecture(CONFIG), 32, CPU, torch.float32)
        self.passes: list[list[list[int]]] = []

    def prefill(
        self, weights: DecoderWeights, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.passes.append(tokens.tolist())
        return super().prefill(weights, tokens)


def batch_of(decoder: Decoder, slots: int) -> ContinuousBatch:
    cache = KVCache(decoder.architecture, slots, 32, CPU, torch.float32)
    batch = ContinuousBatch(decoder, cache, Slots(slots, CPU), slots, CPU)
    batch.swap(0, weights(1))
    return batch


def weights(stride: int) -> DecoderWeights:
    return fuse(read_architecture(CONFIG), counting(stride), CPU, torch.float32)


def run(batch: ContinuousBatch) -> list[Request]:
    finished = []
    while batch.busy:
        finished += batch.step()
    return finished


def ask(batch: ContinuousBatch, prompts: Sequence[tuple[int, ...]], limit: int = 3) -> None:
    for prompt in prompts:
        batch.add(Request(prompt=prompt, sampling=SamplingParams(), limit=limit))


def test_a_group_computes_its_prompt_once_until_the_weights_change() -> None:
    decoder = RecordingDecoder()
    batch = batch_of(decoder, slots=4)

    ask(batch, [(1, 2, 3)] * 8 + [(4, 5)])
    assert len(run(batch)) == 9
    # One pass for the group together with the waiting prompt; the last token of each is left to
    # the decode step.
    assert decoder.passes == [[[1, 2], [4, 0]]]

    batch.swap(1, weights(2))
    ask(batch, [(1, 2, 3)])
    (request,) = run(batch)
    assert decoder.passes[1:] == [[[1, 2]]]
    assert request.tokens == [5, 7, 9]


def test_long_prompts_are_computed_in_limited_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.engines.torch.batch.PREFILL_TOKENS_MAX", 8)
    decoder = RecordingDecoder()
    batch = batch_of(decoder, slots=4)
    ask(batch, [(1, 2, 3, 4), (5, 6, 7), (8,) * 12, (9,)])
    assert sorted(request.tokens[0] for request in run(batch)) == [5, 8, 9, 10]
    assert decoder.passes == [[[1, 2, 3, 4][:3], [5, 6, 0]], [[8] * 11]]


def test_the_prefix_cache_evicts_the_least_recently_used_entry() -> None:
    cache, nothing = PrefixCache(tokens_max=6), Prefix(torch.zeros(0), torch.zeros(0))
    cache.put((1, 1), nothing)
    cache.put((2, 2), nothing)
    cache.get((1, 1))
    cache.put((3, 3, 3), nothing)
    assert [text in cache for text in ((1, 1), (2, 2), (3, 3, 3))] == [True, False, True]
    cache.put((4,) * 7, nothing)
    assert [text in cache for text in ((1, 1), (3, 3, 3), (4,) * 7)] == [True, True, False]


def test_a_freed_slot_is_filled_by_the_last_sequence_which_continues_unchanged() -> None:
    batch = batch_of(RecordingDecoder(), slots=3)
    requests = [
        Request(prompt=(start,), sampling=SamplingParams(), limit=limit)
        for start, limit in ((0, 2), (4, 9), (8, 6))
    ]
    for request in requests:
        batch.add(request)
    run(batch)
    assert [request.tokens for request in requests] == [
        [1, 2],
        list(range(5, 14)),
        list(range(9, 15)),
    ]


def without_3() -> dict[str, HostTensor]:
    """Weights that count, and whose embedding of token 3 is not a number."""
    name = "model.embed_tokens.weight"
    bits = counting(1)[name].bits.copy()
    bits[3] = 0x7FC00000
    return counting(1) | {name: replace(counting(1)[name], bits=bits)}


def test_a_request_fails_with_the_first_token_that_is_not_sampled() -> None:
    batch = batch_of(RecordingDecoder(), 1)
    batch.swap(1, fuse(read_architecture(CONFIG), without_3(), CPU, torch.float32))
    request = Request(prompt=(1,), sampling=SamplingParams(), limit=20)
    batch.add(request)
    assert run(batch) == [request]
    assert request.tokens[:2] == [2, 3]
    assert len(request.tokens) == 3
    assert request.failure == "weights version 1 gives logits that are not numbers"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_requests_whose_logits_are_not_numbers_fail_alone(temperature: float) -> None:
    """Finite weights may give them, too, where they are huge."""
    sampling = SamplingParams(temperature=temperature, max_new_tokens=4)
    engine = TorchRolloutEngine(EngineConfig(max_concurrent=2, max_tokens=32), CONFIG)
    await engine.load(0, without_3())
    # As an answer, in a prompt, and where the next answer in this slot does not reach.
    for prompt, other in (([1, 2], [5, 6]), ([3, 1], [5, 6]), ([8] * 8 + [3, 1], [6] * 9)):
        answered, failed = await asyncio.gather(
            engine.generate(other, sampling), engine.generate(prompt, sampling),
            return_exceptions=True,
        )  # fmt: skip
        assert isinstance(failed, RequestRefusedError)
        assert str(failed) == "weights version 0 gives logits that are not numbers"
        assert isinstance(answered, Generation)
        assert answered.tokens.tolist() == [7, 8, 9, 10]
        answers = await asyncio.gather(
            *(engine.generate(each, sampling) for each in ([9] * 9, [6]))
        )
        assert [answer.tokens.tolist() for answer in answers] == [[10, 11, 12, 13], [7, 8, 9, 10]]
    await engine.load(1, counting(1))
    for prompt in ([1, 2], [3, 1, 2]):
        assert (await engine.generate(prompt, sampling)).tokens.tolist() == [3, 4, 5, 6]
    await engine.close()


class BrokenDecoder(Decoder):
    """A decoder that a machine without memory ends."""

    def decode(self, *_: object) -> torch.Tensor:
        raise MemoryError("no memory")


async def test_an_error_of_the_loop_fails_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "Decoder", BrokenDecoder)
    engine = TorchRolloutEngine(EngineConfig(max_concurrent=2, max_tokens=32), CONFIG)
    await engine.load(0, counting(1))
    pending = [asyncio.ensure_future(engine.generate([1], SamplingParams())) for _ in range(3)]
    for request in pending:
        with pytest.raises(EngineFailedError, match="MemoryError: no memory") as raised:
            await request
        assert isinstance(raised.value.__cause__, MemoryError)
    with pytest.raises(EngineFailedError, match="MemoryError: no memory"):
        await engine.generate([1], SamplingParams())
    await engine.close()


def test_a_result_for_a_closed_event_loop_is_dropped() -> None:
    engine = TorchRolloutEngine(EngineConfig(max_concurrent=1, max_tokens=1024), CONFIG)
    first = asyncio.new_event_loop()
    first.run_until_complete(engine.load(0, counting(1)))
    lost = first.create_task(engine.generate([0], SamplingParams(max_new_tokens=500)))
    first.run_until_complete(asyncio.sleep(0))
    lost._log_destroy_pending = False  # type: ignore[attr-defined]  # its loop ends before it, which is the point
    first.run_until_complete(first.shutdown_default_executor())
    first.close()

    async def second() -> list[int]:
        answer = await engine.generate([5], SamplingParams(max_new_tokens=2))
        await engine.close()
        return list(answer.tokens)

    assert asyncio.run(second()) == [6, 7]


async def test_requests_above_the_limit_are_refused_until_others_finish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollout.engines.torch.engine.WAITING_MAX", 2)
    engine = TorchRolloutEngine(EngineConfig(max_concurrent=1, max_tokens=8192), CONFIG)
    await engine.load(0, counting(1))
    outstanding = [
        asyncio.ensure_future(engine.generate([1], SamplingParams(max_new_tokens=8000)))
        for _ in range(2)
    ]
    await asyncio.sleep(0)
    with pytest.raises(
        ConfigError, match="2 requests wait for the engine; have fewer outstanding, or more workers"
    ):
        await engine.generate([1], SamplingParams(max_new_tokens=1))
    outstanding[1].cancel()
    await asyncio.wait([outstanding[1]])
    third = asyncio.ensure_future(engine.generate([1], SamplingParams(max_new_tokens=1)))
    outstanding[0].cancel()
    assert (await third).tokens.tolist() == [2]
    await engine.close()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(dtype="float8"), "rollout.engine.dtype is 'float8'"),
        (EngineConfig(device="cuda:77"), "rollout.engine.device 'cuda:77'"),
        (EngineConfig(device="meta"), "rollout.engine.device 'meta'"),
        (EngineConfig(device="privateuseone:1"), "rollout.engine.device 'privateuseone:1'"),
        (EngineConfig(device=f"cuda:{5000 * '1'}"), "rollout.engine.device 'cuda:1111"),
        (EngineConfig(max_tokens=9000), "max_position_embeddings is 8192"),
    ],
)
def test_an_impossible_engine_setting_is_named(config: EngineConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TorchRolloutEngine(config, CONFIG)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "no memory for the key-value cache .* lower rollout.engine.max_concurrent"),
        ({"num_hidden_layers": 6_000}, "requires 6,000 layers; the weights have"),
        ({"num_key_value_heads": 2**16, "num_attention_heads": 2**16}, "weights: .* has shape"),
    ],
)
async def test_memory_for_a_cache_is_allocated_after_the_weights_fit_the_model(
    change: Json, message: str
) -> None:
    engine = TorchRolloutEngine(
        EngineConfig(max_tokens=8192, max_concurrent=1_000_000), CONFIG | change
    )
    with pytest.raises(ConfigError, match=message):
        await engine.load(0, counting(1))
    await engine.close()


async def test_soak_with_swaps_and_cancellations_loses_no_token_and_no_slot() -> None:
    """300 requests of random lengths in 24 slots, weights swapped every 20 ms, a fifth of the
    requests cancelled.
    """
    engine = TorchRolloutEngine(EngineConfig(max_concurrent=24, max_tokens=256), CONFIG)
    await engine.load(0, counting(1))
    rng = random.Random(0)
    done = asyncio.Event()

    async def swap() -> None:
        version = 0
        while not done.is_set():
            version += 1
            await engine.load(version, counting(1 + version % 2))
            await asyncio.sleep(0.02)

    async def play(number: int) -> None:
        await asyncio.sleep(rng.random() * 0.5)
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
        length = rng.randint(1, 200)
        asked = asyncio.ensure_future(
            engine.generate(prompt, SamplingParams(max_new_tokens=length, seed=number))
        )
        if number % 5 == 0:
            await asyncio.sleep(rng.random() * 0.2)
            asked.cancel()
            await asyncio.wait([asked])
            return
        answer = await asked
        assert len(answer.tokens) == length
        versions = np.concatenate(
            [np.full(span.end - span.start, span.version) for span in answer.spans]
        )
        assert [span.start for span in answer.spans] == [
            0,
            *(span.end for span in answer.spans[:-1]),
        ]
        steps = np.diff(answer.tokens, prepend=prompt[-1]) % VOCAB
        assert steps.tolist() == (1 + versions % 2).tolist()

    swapping = asyncio.ensure_future(swap())
    await asyncio.gather(*map(play, range(300)))
    done.set()
    await swapping
    await engine.generate(
        [0], SamplingParams(max_new_tokens=1)
    )  # after it, every cancellation has been processed
    assert engine.version > 1
    assert not engine._answers
    assert engine._batch is not None
    assert not engine._batch.busy
    await engine.close()
