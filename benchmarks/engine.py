"""Compare the tokens per second of the torch rollout engine with those of `transformers.generate`.

Both sample at temperature 1 from the same Qwen3 model with random float32 weights, on one thread,
for the same prompts. Each request has a number of tokens (log-normal, as the answers of a policy),
forced by disabling stop ids. The baseline is ordinary use: batches of `--concurrency` left-padded
prompts through `generate` with its default dynamic cache. `generate` has one length for a batch, so
it runs to the longest answer; only requested tokens are counted, for both. The engine receives all
requests at once and also returns the log-probability and version of every token. In a second table
all requests have the same length: continuous batching has no advantage there, and only the cost of
a decode step counts.

CPU seconds are those of the whole process, little affected by other load; wall-clock seconds are
not. The best of `--repeats` passes counts; the two alternate.
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks import command_line
from storage.records.types import Json
from storage.records.weights import HostTensor

PROMPT_TOKENS = (8, 24)
"""Shortest and longest prompt; lengths between are equally likely."""
ANSWER_TOKENS_MAX = 256
MEDIAN_ANSWER_TOKENS = 48


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The best pass of an engine."""

    tokens: int
    cpu_s: float
    wall_s: float
    tokens_per_cpu_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class Work:
    """Requests: a prompt and a number of tokens each."""

    prompts: list[list[int]]
    lengths: list[int]


def make_work(
    requests: int,
    vocab: int,
    spread: float,
    seed: int,
    prompt_tokens: tuple[int, int] = PROMPT_TOKENS,
    median: int = MEDIAN_ANSWER_TOKENS,
    longest: int = ANSWER_TOKENS_MAX,
) -> Work:
    """Draw requests; `spread` is the standard deviation of the log of the answer length.

    Prompts have one of the lengths `prompt_tokens`, or one between; answers the `median` length,
    and `longest` at most.
    """
    rng = np.random.default_rng(seed)
    prompts = [
        rng.integers(0, vocab, rng.integers(*prompt_tokens, endpoint=True)).tolist()
        for _ in range(requests)
    ]
    lengths = np.clip(rng.lognormal(np.log(median), spread, requests), 1, longest).round()
    return Work(prompts, lengths.astype(int).tolist())


def make_model(hidden: int, layers: int, vocab: int, seed: int) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        intermediate_size=3 * hidden,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    )
    model: Any = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]  # transformers is not typed
    return model.eval()


def with_transformers(model: Any, concurrency: int) -> Callable[[Work], None]:
    """Return a function that generates all requests in batches of `concurrency`, in their order."""
    import torch

    def generate(work: Work) -> None:
        for first in range(0, len(work.prompts), concurrency):
            prompts = work.prompts[first : first + concurrency]
            width = max(map(len, prompts))
            tokens = torch.tensor(
                [[0] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device
            )
            mask = torch.tensor(
                [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts],
                device=model.device,
            )
            longest = max(work.lengths[first : first + concurrency])
            sampling = {
                "do_sample": True,
                "temperature": 1.0,
                "top_k": 0,
                "top_p": 1.0,
                "pad_token_id": 0,
            }
            answer = model.generate(tokens, attention_mask=mask, max_new_tokens=longest, **sampling)
            assert answer.shape[1] == width + longest

    return generate


def with_engine(model: Any, concurrency: int) -> tuple[Callable[[Work], None], Callable[[], None]]:
    """Return a function that generates all requests with the engine, and one that closes it."""
    from rollout.config import EngineConfig
    from rollout.engines.engine import SamplingParams, make_engine

    config = EngineConfig(
        max_concurrent=concurrency, max_tokens=PROMPT_TOKENS[1] + ANSWER_TOKENS_MAX
    )
    engine = make_engine(config, model.config.to_dict())
    loop = asyncio.new_event_loop()
    arrays = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    tensors = {name: HostTensor("F32", a.shape, a.view(np.uint32)) for name, a in arrays.items()}
    loop.run_until_complete(engine.load(0, tensors))

    async def all_of(work: Work) -> None:
        params = [
            SamplingParams(max_new_tokens=length, seed=i) for i, length in enumerate(work.lengths)
        ]
        answers = await asyncio.gather(*map(engine.generate, work.prompts, params))
        assert [len(answer.tokens) for answer in answers] == work.lengths

    def close() -> None:
        loop.run_until_complete(engine.close())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    return lambda work: loop.run_until_complete(all_of(work)), close


def measure(generate: Callable[[Work], None], work: Work) -> Rate:
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    generate(work)
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    tokens = sum(work.lengths)
    return Rate(
        tokens=tokens,
        cpu_s=cpu_s,
        wall_s=wall_s,
        tokens_per_cpu_s=tokens / cpu_s,
        tokens_per_s=tokens / wall_s,
    )


def compare(arguments: argparse.Namespace, spread: float) -> Json:
    """Measure both on the same work: `{"transformers": Rate, "engine": Rate, "ratio_cpu": …}`."""
    model = make_model(arguments.hidden, arguments.layers, arguments.vocab, arguments.seed)
    work = make_work(arguments.requests, arguments.vocab, spread, arguments.seed)
    baseline = with_transformers(model, arguments.concurrency)
    engine, close = with_engine(model, arguments.concurrency)
    warm_up = make_work(arguments.concurrency, arguments.vocab, 0.0, arguments.seed + 1)
    baseline(warm_up)
    engine(warm_up)
    passes = [(measure(baseline, work), measure(engine, work)) for _ in range(arguments.repeats)]
    close()
    theirs, ours = (min(rates, key=lambda rate: rate.cpu_s) for rates in zip(*passes, strict=True))
    return {
        "transformers": asdict(theirs),
        "engine": asdict(ours),
        "ratio_cpu": ours.tokens_per_cpu_s / theirs.tokens_per_cpu_s,
        "ratio_wall": max(o.tokens_per_s for _, o in passes)
        / max(t.tokens_per_s for t, _ in passes),
        "answer_tokens": {"mean": float(np.mean(work.lengths)), "max": max(work.lengths)},
    }


def main() -> None:
    arguments = parse()
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    import torch

    torch.set_num_threads(1)
    results = {"mixed": compare(arguments, arguments.spread), "equal": compare(arguments, 0.0)}
    if arguments.json:
        print(json.dumps({"arguments": vars(arguments), **results}, indent=2))
        return
    for name, result in results.items():
        lengths = result["answer_tokens"]
        print(
            f"{name} lengths: {arguments.requests} requests, {lengths['mean']:.0f} tokens on "
            f"average, {lengths['max']} at most"
        )
        for side in ("transformers", "engine"):
            rate = result[side]
            print(
                f"  {side:13} {rate['tokens_per_cpu_s']:9,.0f} tokens/CPU s "
                f"{rate['tokens_per_s']:9,.0f} tokens/s"
            )
        print(f"  {'ratio':13} {result['ratio_cpu']:9.2f}              {result['ratio_wall']:9.2f}")


def parse() -> argparse.Namespace:
    parser = command_line.parser("engine", __doc__, "--hidden 64 --layers 2 --vocab 360 --json")
    for name, default, meaning in (
        ("hidden", 128, "width of the model; a multiple of 8"),
        ("layers", 4, "layers of the model"),
        ("vocab", 512, "size of its vocabulary"),
        ("requests", 256, "number of prompts"),
        ("concurrency", 64, "sequences decoded together, by both"),
        ("repeats", 3, "passes of each; the best counts"),
        ("seed", 0, "random seed of weights, prompts and lengths"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{meaning} (default: {default})"
        )
    parser.add_argument(
        "--spread",
        type=float,
        default=0.8,
        help="standard deviation of the logarithm of the answer length (default: 0.8)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
