"""Train engines on the same batch: the time of a step, tokens per second.

    transformers              an ordinary loop of transformers and AdamW (plain_training.py)
    torch                     the embedded engine; `packed`: rows without padding; `compiled`: its
                              layers, in the first step
    torch, 2 ranks            the same, its weights shared out by FSDP2
    deepspeed                 ZeRO, stages 1 to 3

The batch has the first requests of the rollout benchmark as its rows, all of them in one optimizer
step of PPO. Each engine is measured in a process of its own, which has --threads compute threads a
rank, and takes one step to warm up (`first_s`, in the JSON only). Seconds are those of the fastest
of --steps, CPU seconds those of all ranks in the step that used the fewest. `loss` is that of the
first step: it shows that all engines do the same work. Tokens are those of the rows, prompts
included, padding excluded.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import psutil

from benchmarks.engine import Work
from benchmarks.engines.plain_training import PlainTraining
from benchmarks.engines.rollout import Progress, is_chosen
from benchmarks.engines.shapes import SHAPES, forward_flops, random_weights, tensor_shapes
from storage.records.batches import Batch, BatchRow, SequenceKey
from storage.records.types import Json
from trainer.config import TrainConfig
from trainer.engines.engine import TrainEngine, make_engine
from trainer.memory import train_bytes

BASELINE = "transformers"
ROWS: dict[str, Json] = {
    BASELINE: {},
    "torch": {},
    "torch, packed": {"packing": "packed"},
    "torch, compiled": {"compile": True},
    "torch, 2 ranks": {"ranks": 2},
    "deepspeed, stage 2": {"engine": "deepspeed", "deepspeed": {"stage": 2}},
    **{
        f"deepspeed, 2 ranks, stage {stage}": {
            "engine": "deepspeed",
            "ranks": 2,
            "deepspeed": {"stage": stage},
        }
        for stage in (1, 2, 3)
    },
}
"""Row → settings by which it differs from the others."""
BEHAVIOUR_DEVIATION = 0.1
"""Standard deviation of the log-probabilities of the sampler around those of a uniform policy."""
LAST_WORDS = 300
"""Characters of an error that a row shows."""


def make_batch(work: Work, vocab: int, seed: int) -> Batch:
    """Return the requests as the rows of a batch: random answers and advantages."""
    draw = np.random.default_rng(seed)
    rows = []
    for number, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True)):
        size = len(prompt) + length
        mask = np.arange(size) >= len(prompt)
        tokens = np.concatenate([prompt, draw.integers(0, vocab, length)]).astype(np.int32)
        behaviour = draw.normal(-np.log(vocab), BEHAVIOUR_DEVIATION, size)
        rows.append(
            BatchRow(
                key=SequenceKey(number, 0, 0, 0),
                prompt_id=str(number),
                tokens=tokens,
                loss_mask=mask,
                logprobs=np.where(mask, behaviour, 0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                advantages=np.where(mask, draw.normal(), 0).astype(np.float32),
                reward=0.0,
                temperature=1.0,
                min_version=0,
            )
        )
    return Batch(
        policy="model",
        step=1,
        rows=tuple(rows),
        ledger=(),
        waiting=(),
        shards=(),
        closed_below=0,
        closed=(),
    )


def settings_of(name: str, arguments: argparse.Namespace) -> TrainConfig:
    """Return the settings of a row."""
    on_cpu = arguments.device == "cpu"
    return TrainConfig(
        **{
            "loss": {"name": "ppo_clip", "aggregate": "token_mean"},
            "normalize_advantages": False,
            "micro_batch_tokens": arguments.micro_batch_tokens,
            "precision": "fp32" if on_cpu else "bf16",
            "activation_checkpointing": arguments.shape != "tiny",
            "device": arguments.device,
            "threads": arguments.threads,
            **ROWS[name],
        }
    )


def measured(engine: Any, batch: Batch, steps: int) -> Json:
    """Take a step to warm up, then `steps` more: the fastest one's seconds, the least CPU time."""
    start_s = time.perf_counter()
    loss = engine.step(batch)["trainer/loss"]
    first_s = time.perf_counter() - start_s
    seconds, cpu_s = [], []
    for number in range(2, steps + 2):
        start_s, start_cpu_s = time.perf_counter(), _cpu_s()
        engine.step(replace(batch, step=number))
        seconds.append(time.perf_counter() - start_s)
        cpu_s.append(_cpu_s() - start_cpu_s)
    return {"first_s": first_s, "step_s": min(seconds), "cpu_s": min(cpu_s), "loss": loss}


def _cpu_s() -> float:
    own = psutil.Process()
    processes = [own, *own.children(recursive=True)]
    return float(sum(sum(process.cpu_times()[:2]) for process in processes))


def in_this_process(order: Json) -> Json:
    """Measure the row that `order` describes."""
    import torch

    config, shape = TrainConfig(**order["settings"]), SHAPES[order["shape"]]
    make: Any = PlainTraining if order["name"] == BASELINE else make_engine
    engine: TrainEngine | PlainTraining = make(config, shape.config, order["seed"])
    engine.set_weights(random_weights(tensor_shapes(shape.config), order["seed"]))
    work = Work(order["prompts"], order["lengths"])
    batch = make_batch(work, shape.sizes.vocab, order["seed"])
    result = measured(engine, batch, order["steps"])
    if torch.cuda.is_available() and config.device != "cpu":
        result["peak_bytes"] = torch.cuda.max_memory_allocated()
    return result


def compared(arguments: argparse.Namespace, work: Work, say: Progress) -> Json:
    """Measure every row in a child process: row → its numbers, or why there are none."""
    shape = SHAPES[arguments.shape]
    order: Json = {
        "shape": arguments.shape,
        "seed": arguments.seed,
        "steps": arguments.steps,
        "prompts": work.prompts[: arguments.rows],
        "lengths": work.lengths[: arguments.rows],
    }
    lengths = [
        len(prompt) + length
        for prompt, length in zip(order["prompts"], order["lengths"], strict=True)
    ]
    flops = 3 * forward_flops(shape.config, lengths, sum(order["lengths"]))
    rows: dict[str, Json] = {}
    for name in ROWS:
        if name != BASELINE and not is_chosen(name, arguments.engines):
            continue
        say(f"train: {name}")
        config = settings_of(name, arguments)
        settings = config.model_dump(mode="json", exclude_unset=True)
        row = _in_child(order | {"name": name, "settings": settings})
        rows[name] = row
        if "missing" in row:
            continue
        row["tokens_per_s"] = sum(lengths) / row["step_s"]
        if BASELINE in rows and "step_s" in rows[BASELINE]:
            row["of_baseline"] = rows[BASELINE]["step_s"] / row["step_s"]
        if "peak_bytes" in row:
            row["estimated_bytes"] = sum(train_bytes(config, shape.sizes).values())
        if arguments.peak_tflops:
            peak = 1e12 * arguments.peak_tflops * config.ranks
            row["mfu"] = flops / (row["step_s"] * peak)
    return {"rows": len(lengths), "tokens": sum(lengths), "engines": rows}


def _in_child(order: Json) -> Json:
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.engines.train"],
        input=json.dumps(order),
        capture_output=True,
        text=True,
    )
    if child.returncode:
        last = (child.stderr.strip() or "no words").splitlines()[-1][:LAST_WORDS]
        return {"missing": f"its process ended with status {child.returncode}: {last}"}
    result: Json = json.loads(child.stdout.splitlines()[-1])
    return result


def show(results: Json) -> None:
    print(f"Train engines: a step on {results['rows']} rows, {results['tokens']} tokens\n")
    heads = ("step s", "speed-up", "tokens/s", "CPU s", "MFU", "peak GB", "estimate")
    print(" " * 28 + "".join(f"{head:>11}" for head in (*heads, "loss")))
    for name, row in results["engines"].items():
        if "missing" in row:
            print(f"{name:28}  missing: {row['missing']}")
            continue
        ratio = f"{row['of_baseline']:.2f}" if "of_baseline" in row else "–"
        mfu = f"{row['mfu']:.1%}" if "mfu" in row else "–"
        peak, estimate = (
            f"{row[key] / 1e9:.1f}" if key in row else "–"
            for key in ("peak_bytes", "estimated_bytes")
        )
        print(
            f"{name:28}{row['step_s']:11.3f}{ratio:>11}{row['tokens_per_s']:11,.0f}"
            f"{row['cpu_s']:11.2f}{mfu:>11}{peak:>11}{estimate:>11}{row['loss']:11.5f}"
        )


if __name__ == "__main__":
    print(json.dumps(in_this_process(json.load(sys.stdin))))
