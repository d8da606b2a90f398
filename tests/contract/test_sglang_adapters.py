"""Adapters that a real SGLang server applies itself, of one policy and of two: `make test-engines`."""

import asyncio
import os
import signal

import numpy as np
import psutil
import pytest

from rollout.config import EngineConfig, SglangConfig
from rollout.engines.engine import Generation, SamplingParams
from rollout.engines.sglang.engine import SglangRolloutEngine
from storage.formats import adapters
from storage.formats.safetensors import weights_digest
from storage.records.types import Json
from storage.records.weights import HostTensor, StoredAdapter
from tests.support.models.random_models import QWEN3, host_tensors, random_model
from tests.support.models.trainer_cases import reference_logprobs, reference_model
from tests.support.runs.builders import row
from tests.support.sglang_servers import SGLANG_PYTHON
from trainer.engines.torch.host_tensors import to_host, to_torch

pytestmark = pytest.mark.skipif(
    not SGLANG_PYTHON, reason="needs an environment with sglang; `make test-engines` makes one"
)
MODEL: Json = {**QWEN3, "intermediate_size": 128, "max_position_embeddings": 2048}
"""A server on a CPU pads other sizes, and has no room for adapters of them then."""
FORM = StoredAdapter(kind="lora", rank=4, alpha=6.0, rslora=True)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPT = (1, 2, 3, 4)
LONG = SamplingParams(max_new_tokens=600)
SHORT = SamplingParams(max_new_tokens=20)


def adapted(
    base: dict[str, HostTensor], seed: int, targets: tuple[str, ...] = TARGETS
) -> dict[str, HostTensor]:
    """The base with an adapter in bfloat16, as a trainer publishes it."""
    draw = np.random.default_rng(seed)
    tensors = dict(base)
    for name, weight in base.items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] not in targets:
            continue
        outputs, inputs = weight.shape
        for end, shape in (("lora_A", (FORM.rank, inputs)), ("lora_B", (outputs, FORM.rank))):
            values = draw.normal(0, 0.2, shape).astype(np.float32)
            tensors[f"{layer}.{end}.weight"] = to_host(to_torch(host_float(values)), "BF16")
    return tensors


def host_float(values: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]") -> HostTensor:
    return HostTensor("F32", values.shape, np.ascontiguousarray(values).view(np.uint32))


def errors(answer: Generation, tensors: dict[str, HostTensor]) -> float:
    """Return the largest error of a log-probability, by plain transformers with merged weights."""
    merged = dict(adapters.merged(FORM, tensors).tensors)
    told = row(prompt=PROMPT, answer=answer.tokens.tolist())
    expected = reference_logprobs(reference_model(merged, MODEL), told).detach().numpy()
    return float(np.abs(answer.logprobs - expected[len(PROMPT) - 1 :]).max())


def spans_of(answer: Generation) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in answer.spans]


async def test_a_server_applies_the_adapter_of_each_version() -> None:
    """Version 0 is the base; a long answer begins with version 1 and keeps it."""
    base = host_tensors(random_model(MODEL))
    versions = {1: adapted(base, 1), 2: adapted(base, 2, ("q_proj", "v_proj")), 3: adapted(base, 3)}
    sglang = SglangConfig(python=SGLANG_PYTHON, memory_share=0.5, adapter_rank=8)
    config = EngineConfig(name="sglang", max_concurrent=8, max_tokens=1024, sglang=sglang)
    engine = SglangRolloutEngine(config, MODEL)
    try:
        await engine.load(0, base)
        answer = await engine.generate(PROMPT, SHORT)
        assert spans_of(answer) == [(0, 0, 20)]
        assert errors(answer, base) < 1e-4
        await engine.load_adapter(1, FORM, versions[1])
        long = asyncio.ensure_future(engine.generate(PROMPT, LONG))
        answer = await engine.generate(PROMPT, SHORT)
        assert spans_of(answer) == [(1, 0, 20)]
        assert errors(answer, versions[1]) < 1e-4
        assert errors(answer, base) > 0.1
        await engine.load_adapter(2, FORM, versions[2])
        assert not long.done()
        assert engine.digest(2) == weights_digest(versions[2])
        answer = await engine.generate(PROMPT, SHORT)
        assert spans_of(answer) == [(2, 0, 20)]
        assert errors(answer, versions[2]) < 1e-4
        answer = await long
        assert spans_of(answer) == [(1, 0, 600)]
        assert errors(answer, versions[1]) < 1e-4
        await engine.load_adapter(3, FORM, versions[3])
        running = [asyncio.ensure_future(engine.generate(PROMPT, LONG)) for _ in range(3)]
        for pid in engine.server_pids():
            os.kill(pid, signal.SIGKILL)
        for answer in await asyncio.gather(*running):
            assert spans_of(answer) == [(3, 0, 600)]
            assert errors(answer, versions[3]) < 1e-4
    finally:
        await engine.close()


async def test_two_policies_share_a_server_with_an_adapter_each() -> None:
    """The requests of both are computed in one batch; each has the weights of its own policy."""
    base = host_tensors(random_model(MODEL))
    own = {seed: adapted(base, seed) for seed in (1, 2, 3)}
    others = {seed: adapted(host_tensors(random_model(MODEL)), seed) for seed in (11, 12)}
    sglang = SglangConfig(python=SGLANG_PYTHON, memory_share=0.5, adapter_rank=8, shared=True)
    config = EngineConfig(name="sglang", max_concurrent=8, max_tokens=1024, sglang=sglang)
    solver = SglangRolloutEngine(config, MODEL)
    verifier = solver.another(MODEL)
    try:
        await solver.load(0, base)
        await verifier.load_adapter(11, FORM, others[11])
        both = solver.generate(PROMPT, SHORT), verifier.generate(PROMPT, SHORT)
        plain, judged = await asyncio.gather(*both)
        assert (spans_of(plain), spans_of(judged)) == ([(0, 0, 20)], [(11, 0, 20)])
        assert errors(plain, base) < 1e-4
        assert errors(judged, others[11]) < 1e-4
        assert errors(judged, base) > 0.1

        long = asyncio.ensure_future(verifier.generate(PROMPT, LONG))
        for version in (1, 2):
            await solver.load_adapter(version, FORM, own[version])
            answer = await solver.generate(PROMPT, SHORT)
            assert spans_of(answer) == [(version, 0, 20)]
            assert errors(answer, own[version]) < 1e-4
        assert not long.done()
        assert spans_of(answer := await long) == [(11, 0, 600)]
        assert errors(answer, others[11]) < 1e-4

        await verifier.load_adapter(12, FORM, others[12])
        (pid,) = solver.server_pids()
        assert verifier.server_pids() == [pid]
        running = [
            asyncio.ensure_future(engine.generate(PROMPT, LONG)) for engine in (solver, verifier)
        ]
        os.kill(pid, signal.SIGKILL)
        for answer, version, tensors in zip(
            await asyncio.gather(*running), (2, 12), (own[2], others[12]), strict=True
        ):
            assert spans_of(answer) == [(version, 0, 600)]
            assert errors(answer, tensors) < 1e-4

        (pid,) = solver.server_pids()
        await solver.close()
        await verifier.load_adapter(13, FORM, others[11])
        answer = await verifier.generate(PROMPT, SHORT)
        assert spans_of(answer) == [(13, 0, 20)]
        assert errors(answer, others[11]) < 1e-4
        assert verifier.server_pids() == [pid]
        await verifier.close()
        assert not psutil.pid_exists(pid)
    finally:
        await solver.close()
        await verifier.close()
