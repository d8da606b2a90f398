"""Rollout engines on the same requests, with and without a stream of new weights.

    generate            transformers.generate: batches of --concurrency, without updates
    torch               the embedded engine
    sglang, POLICY      an SGLang server of its own, for each policy of the KV cache

Every engine answers the same prompts, each with a given number of tokens (log-normal), at
temperature 1; --concurrency requests are in progress at any time. `quiet` passes have one version
of the weights, `updates` a new one every --interval-s (updates.py). A pass answers all requests as
often as --seconds need; the best of --repeats counts, and the two kinds alternate.
"""

import argparse
import asyncio
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.engine import Work, with_transformers
from benchmarks.engines.shapes import SHAPES, forward_flops, random_weights, tensor_shapes
from benchmarks.engines.updates import (
    UpdateTimes,
    VersionStream,
    during_updates,
    reader_of,
    versions,
)
from rollout.config import EngineConfig, SglangConfig
from rollout.engines.engine import Engine, EngineFailedError, SamplingParams, make_engine
from storage.errors import AstraFlowError
from storage.records.types import Json

SHARE_TARGET = 0.95
"""Of the throughput without updates."""
SPARE_SLOTS = 1
"""For the request that asks for the first token of a version."""
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class PassCost:
    """One pass over the requests."""

    seconds: float
    engine_cores: float
    """Cores that the engine's processes used: of this process and its children, without the
    publisher.
    """
    all_cores: float
    """Cores that all programs of the machine used."""


async def answered(engine: Engine, work: Work, concurrency: int, times: int = 1) -> None:
    """Answer all requests `times` times, `concurrency` at any time."""
    slots = asyncio.Semaphore(concurrency)

    async def one(number: int, prompt: list[int], length: int) -> None:
        async with slots:
            params = SamplingParams(max_new_tokens=length, seed=number)
            answer = await engine.generate(prompt, params)
            assert len(answer.tokens) == length

    pairs = list(zip(work.prompts, work.lengths, strict=True)) * times
    async with asyncio.TaskGroup() as group:
        for number, (prompt, length) in enumerate(pairs):
            group.create_task(one(number, prompt, length))


async def measured(
    engine: Engine, stream: VersionStream, work: Work, arguments: argparse.Namespace
) -> Json:
    """Measure one engine: rates without and with updates, and the times of the updates."""
    reader, concurrency = reader_of(stream, engine), arguments.concurrency
    while not await reader.refresh():
        if reader.failures:
            raise EngineFailedError("the store's newest version could not be loaded; see the log")
    start_s = time.perf_counter()
    await answered(engine, work, concurrency)  # warms up, too
    times = math.ceil(arguments.seconds / (time.perf_counter() - start_s))

    async def one_pass() -> PassCost:
        clock = _Clock(stream.pids)
        await answered(engine, work, concurrency, times)
        return clock.cost()

    quiet, updates, loads = [], [], UpdateTimes()
    for _ in range(arguments.repeats):
        quiet.append(await one_pass())
        cost, found = await during_updates(one_pass, stream, reader, engine, arguments.interval_s)
        updates.append(cost)
        loads.publish_s += found.publish_s
        loads.load_s += found.load_s
        loads.first_token_s += found.first_token_s
    best = {"quiet": _best(quiet), "updates": _best(updates)}
    tokens = times * sum(work.lengths)
    return {
        "tokens_per_s": tokens / best["quiet"].seconds,
        "tokens_per_s_with_updates": tokens / best["updates"].seconds,
        "share_with_updates": best["quiet"].seconds / best["updates"].seconds,
        "updates": len(loads.load_s),
        "publish_s": _median(loads.publish_s),
        "load_s": _median(loads.load_s),
        "first_token_s": _median(loads.first_token_s),
        "cores": {
            name: {"engine": cost.engine_cores, "all": cost.all_cores}
            for name, cost in best.items()
        },
    }


class _Clock:
    """Wall-clock and CPU time since its creation."""

    def __init__(self, without: frozenset[int]) -> None:
        self._without = without
        self._start = time.perf_counter(), self._engine_s(), _busy_s()

    def cost(self) -> PassCost:
        start_s, engine_s, busy_s = self._start
        seconds = time.perf_counter() - start_s
        return PassCost(
            seconds=seconds,
            engine_cores=(self._engine_s() - engine_s) / seconds,
            all_cores=(_busy_s() - busy_s) / seconds,
        )

    def _engine_s(self) -> float:
        own, total = psutil.Process(), 0.0
        for process in [own, *own.children(recursive=True)]:
            if process.pid not in self._without:
                with suppress(psutil.NoSuchProcess):
                    total += sum(process.cpu_times()[:2])
        return total


def _busy_s() -> float:
    """Return the CPU seconds of all programs; those of low priority count apart on Linux."""
    times = psutil.cpu_times()
    return float(times.user + getattr(times, "nice", 0.0) + times.system)


def _best(passes: Iterable[PassCost]) -> PassCost:
    return min(passes, key=lambda each: each.seconds)


def _median(seconds: list[float]) -> float | None:
    return statistics.median(seconds) if seconds else None


def baseline(work: Work, arguments: argparse.Namespace) -> Json:
    """Measure transformers' generate."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainer.engines.torch.host_tensors import to_torch

    config = SHAPES[arguments.shape].config
    dtype = getattr(torch, _dtype(arguments))
    with torch.device(arguments.device):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)  # type: ignore[no-untyped-call]  # theirs
    weights = random_weights(tensor_shapes(config), arguments.seed)
    with torch.no_grad():
        for name, parameter in model.eval().named_parameters():
            parameter.copy_(to_torch(weights[name]))
    generate = with_transformers(model, arguments.concurrency)
    generate(Work(work.prompts[: arguments.concurrency], [2] * arguments.concurrency))
    seconds = []
    for _ in range(arguments.repeats):
        start_s = time.perf_counter()
        generate(work)
        seconds.append(time.perf_counter() - start_s)
    return {"tokens_per_s": sum(work.lengths) / min(seconds)}


def _dtype(arguments: argparse.Namespace) -> str:
    return "float32" if arguments.device == "cpu" else "bfloat16"


def configurations(arguments: argparse.Namespace, max_tokens: int) -> dict[str, EngineConfig]:
    """Return the settings of each engine, by the name of its row."""
    common: dict[str, Any] = {
        "device": arguments.device,
        "dtype": _dtype(arguments),
        "threads": arguments.threads,
        "max_concurrent": arguments.concurrency + SPARE_SLOTS,
        "max_tokens": max_tokens,
    }
    rows = {"torch": EngineConfig(**common)}
    for policy in arguments.kv_cache:
        sglang = SglangConfig(python=arguments.sglang_python, kv_cache=policy, check_every=0)
        rows[f"sglang, {policy}"] = EngineConfig(name="sglang", **common, sglang=sglang)
    return rows


def compared(arguments: argparse.Namespace, work: Work, max_tokens: int, say: Progress) -> Json:
    """Measure all engines on the same work: row → its numbers, or why there are none."""
    import torch

    config = SHAPES[arguments.shape].config
    say("rollout: generate")
    rows: dict[str, Json] = {}
    try:
        rows["generate"] = baseline(work, arguments)
    except torch.OutOfMemoryError as error:
        rows["generate"] = {"missing": str(error)}
    with (
        TemporaryDirectory(prefix="astraflow-benchmark-") as folder,
        versions(Path(folder), tensor_shapes(config), arguments.changed, arguments.seed) as stream,
    ):
        asyncio.run(_publish_first(stream))
        for name, engine_config in configurations(arguments, max_tokens).items():
            if not is_chosen(name, arguments.engines):
                continue
            if engine_config.name == "sglang" and not arguments.sglang_python:
                rows[name] = {"missing": "--sglang-python names no environment with sglang"}
                continue
            say(f"rollout: {name}")
            _free_device_memory()
            try:
                rows[name] = asyncio.run(_one_engine(engine_config, stream, work, arguments))
            except* (AstraFlowError, EngineFailedError) as errors:
                rows[name] = {"missing": _first(errors)}
    _add_ratios(rows, work, arguments)
    return {"requests": len(work.prompts), "tokens": sum(work.lengths), "engines": rows}


def _first(errors: ExceptionGroup[Any]) -> str:
    first: Exception = errors
    while isinstance(first, ExceptionGroup):
        first = first.exceptions[0]
    return str(first)


def is_chosen(row: str, engines: Sequence[str]) -> bool:
    """Return whether `engines` select a row: they are beginnings of names; none select all."""
    return not engines or any(row.startswith(each) for each in engines)


async def _publish_first(stream: VersionStream) -> None:
    await stream.publish()


async def _one_engine(
    config: EngineConfig, stream: VersionStream, work: Work, arguments: argparse.Namespace
) -> Json:
    engine = make_engine(config, SHAPES[arguments.shape].config)
    try:
        return await measured(engine, stream, work, arguments)
    finally:
        await engine.close()


def _free_device_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _add_ratios(rows: dict[str, Json], work: Work, arguments: argparse.Namespace) -> None:
    """Add the ratio to the baseline, and MFU where the device's peak is known."""
    lengths = [len(p) + n for p, n in zip(work.prompts, work.lengths, strict=True)]
    flops = forward_flops(SHAPES[arguments.shape].config, lengths, sum(work.lengths))
    base = rows["generate"].get("tokens_per_s")
    for row in rows.values():
        if "missing" in row:
            continue
        if base:
            row["of_baseline"] = row["tokens_per_s"] / base
        if arguments.peak_tflops:
            rate = flops / sum(work.lengths) * row["tokens_per_s"]
            row["mfu"] = rate / (1e12 * arguments.peak_tflops)


def show(results: Json) -> None:
    print(f"Rollout engines: {results['requests']} requests, {results['tokens']} tokens\n")
    heads = ("tokens/s", "of generate", "MFU", "with updates", "share", "updates", "load s")
    print(" " * 18 + "".join(f"{head:>13}" for head in (*heads, "first token s")))
    for name, row in results["engines"].items():
        if "missing" in row:
            print(f"{name:18}  missing: {row['missing']}")
            continue
        mfu = f"{row['mfu']:.1%}" if "mfu" in row else "–"
        ratio = f"{row['of_baseline']:.2f}" if "of_baseline" in row else "–"
        print(f"{name:18}{row['tokens_per_s']:13,.0f}{ratio:>13}{mfu:>13}", end="")
        if "updates" in row:
            print(
                f"{row['tokens_per_s_with_updates']:13,.0f}{row['share_with_updates']:13.1%}"
                f"{row['updates']:13}{_seconds(row['load_s'])}{_seconds(row['first_token_s'])}",
                end="",
            )
        print()
    cores = psutil.cpu_count()
    for name, row in results["engines"].items():
        if row.get("share_with_updates", 1) < SHARE_TARGET:
            used = row["cores"]
            print(
                f"\n{name}: below the target of {SHARE_TARGET:.0%}. Cores used without updates, by "
                f"the engine {used['quiet']['engine']:.2f}, by all programs "
                f"{used['quiet']['all']:.2f}; with updates {used['updates']['engine']:.2f} and "
                f"{used['updates']['all']:.2f}; the machine has {cores}"
            )


def _seconds(value: float | None) -> str:
    return f"{'–':>13}" if value is None else f"{value:13.3f}"
