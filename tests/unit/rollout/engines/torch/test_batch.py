"""Continuous batching on models with real attention: results of running requests at a change of
weights.
"""

from collections.abc import Sequence

import pytest
import torch

from rollout.engines.engine import SamplingParams
from rollout.engines.torch.architecture import read_architecture
from rollout.engines.torch.batch import ContinuousBatch, Request
from rollout.engines.torch.decoder import Decoder
from rollout.engines.torch.decoder_weights import DecoderWeights, fuse
from rollout.engines.torch.kv_cache import KVCache
from rollout.engines.torch.slots import Slots
from tests.support.models.chain_model import CONFIG, counting
from tests.support.models.random_models import QWEN3, host_tensors, random_model

CPU = torch.device("cpu")
MAX_TOKENS = 64
SLOTS = 3


@pytest.fixture(scope="module")
def models() -> tuple[object, object]:
    """The weights before and after a swap."""
    return random_model(QWEN3, seed=1), random_model(QWEN3, seed=2)


def fused(model: object, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    return fuse(read_architecture(QWEN3), host_tensors(model), CPU, dtype)


def batch_of(model: object, dtype: torch.dtype = torch.float32) -> ContinuousBatch:
    architecture = read_architecture(QWEN3)
    cache = KVCache(architecture, SLOTS, MAX_TOKENS, CPU, dtype)
    batch = ContinuousBatch(
        Decoder(architecture, MAX_TOKENS, CPU, dtype), cache, Slots(SLOTS, CPU), SLOTS, CPU
    )
    batch.swap(0, fused(model, dtype))
    return batch


def asked(batch: ContinuousBatch, *prompts: tuple[int, ...], limit: int = 9) -> list[Request]:
    requests = [
        Request(prompt=prompt, sampling=SamplingParams(seed=place), limit=limit)
        for place, prompt in enumerate(prompts)
    ]
    for request in requests:
        batch.add(request)
    return requests


def cached_logprobs(
    request: Request, models: Sequence[object], swaps: Sequence[int]
) -> list[float]:
    """Log-probability of each token of the answer, by transformers: `models[i + 1]` is used after
    `swaps[i]` tokens, with the keys and values of the models before it.
    """
    past = None
    told = []
    text = [*request.prompt, *request.tokens]
    fed = 0
    for place in range(len(request.tokens)):
        model = models[sum(place >= swap for swap in swaps)]
        until = len(request.prompt) + place
        # Each position before the newest token was computed when it was sampled; a new request's whole
        # prompt is computed at once.
        output = model(torch.tensor([text[fed:until]]), past_key_values=past, use_cache=True)  # type: ignore[operator]
        past, fed = output.past_key_values, until
        told.append(float(torch.log_softmax(output.logits[0, -1].float(), dim=-1)[text[until]]))
    return told


def whole_logprobs(request: Request, model: object) -> list[float]:
    """The same by one model that computes the whole text again."""
    text = torch.tensor([[*request.prompt, *request.tokens]])
    logprobs = torch.log_softmax(model(text).logits[0].float(), dim=-1)  # type: ignore[operator]
    first = len(request.prompt)
    return [float(logprobs[first + place - 1, token]) for place, token in enumerate(request.tokens)]


def test_running_requests_continue_with_keys_and_values_of_the_old_weights(
    models: tuple[object, object],
) -> None:
    old, new = models
    batch = batch_of(old)
    first, second = asked(batch, (5, 17, 3, 40), (7,))
    with torch.inference_mode():
        for _ in range(4):
            batch.step()
        batch.swap(1, fused(new))
        while batch.busy:
            batch.step()
        for request in (first, second):
            assert request.version_starts == [(0, 0), (1, 4)]
            expected = cached_logprobs(request, models, [4])
            assert request.logprobs == pytest.approx(expected, abs=2e-4)
            recomputed = whole_logprobs(request, new)[4:]
            assert (
                max(
                    abs(item - other)
                    for item, other in zip(request.logprobs[4:], recomputed, strict=True)
                )
                > 0.05
            )


def test_requests_after_a_swap_use_only_the_new_weights(
    models: tuple[object, object],
) -> None:
    old, new = models
    batch = batch_of(old)
    asked(batch, (5, 17, 3, 40), limit=2)
    with torch.inference_mode():
        while batch.busy:
            batch.step()
        batch.swap(1, fused(new))
        (same,) = asked(
            batch, (5, 17, 3, 40)
        )  # its prefix was computed by the old weights, for another request
        while batch.busy:
            batch.step()
        assert same.version_starts == [(1, 0)]
        assert same.logprobs == pytest.approx(whole_logprobs(same, new), abs=2e-4)


def test_a_request_queued_over_a_swap_uses_only_the_new_weights(
    models: tuple[object, object],
) -> None:
    old, new = models
    batch = batch_of(old)
    *running, waiting = asked(batch, (1, 2), (3, 4), (5, 6), (5, 17, 3, 40), limit=4)
    with torch.inference_mode():
        batch.step()
        assert [len(request.tokens) for request in (*running, waiting)] == [1, 1, 1, 0]
        batch.swap(1, fused(new))
        while batch.busy:
            batch.step()
        assert waiting.logprobs == pytest.approx(whole_logprobs(waiting, new), abs=2e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_of_16_bit_weights_are_close_to_those_of_32_bits(
    models: tuple[object, object], dtype: torch.dtype
) -> None:
    batch = batch_of(models[0], dtype)
    requests = asked(batch, (5, 17, 3, 40), (7,), (9, 9, 9))
    with torch.inference_mode():
        while batch.busy:
            batch.step()
        model = random_model(QWEN3, seed=1).to(dtype)
        for request in requests:
            exact = whole_logprobs(request, models[0])
            assert request.logprobs == pytest.approx(whole_logprobs(request, model), abs=0.15)
            assert request.logprobs == pytest.approx(exact, abs=0.3)
            assert request.logprobs != pytest.approx(
                exact, abs=1e-6
            )  # the computation was in 16 bits


@pytest.mark.parametrize(
    ("stop_ids", "limit", "reason", "count"),
    [((4,), 3, "stop", 3), ((4,), 2, "length", 2), ((), 3, "length", 3)],
)
def test_a_stop_token_at_the_length_limit_counts_as_a_stop(
    stop_ids: tuple[int, ...], limit: int, reason: str, count: int
) -> None:
    architecture = read_architecture(CONFIG)
    cache = KVCache(architecture, 1, 32, CPU, torch.float32)
    batch = ContinuousBatch(
        Decoder(architecture, 32, CPU, torch.float32), cache, Slots(1, CPU), 1, CPU
    )
    batch.swap(0, fuse(architecture, counting(1), CPU, torch.float32))
    request = Request(prompt=(1,), sampling=SamplingParams(stop_ids=stop_ids), limit=limit)
    batch.add(request)
    with torch.inference_mode():
        while batch.busy:
            batch.step()
    assert (request.finish_reason, request.tokens) == (reason, [2, 3, 4][:count])
