"""Measure every engine on the same work, in one run.

    rollout     tokens/s of every rollout engine, and of transformers' generate; with a stream of
                new versions, too; time from a published version to its first token
    train       time of a step of every train engine, and of an ordinary loop with AdamW
    logprobs    peak memory of log-probabilities over a vocabulary of 152k, against all logits

A model of random weights: --shape tiny (default), or one of Qwen3's with --device cuda, which
computes in bf16 and reports MFU, too (its formula: benchmarks/engines/shapes.py). An engine that
cannot run here has the reason in its row. The rows are explained in benchmarks/engines/rollout.py,
updates.py, train.py and logprobs.py.

Wall-clock depends on other load, which is printed: compare the rows of one run only.
"""

import argparse
import json
import logging
import os
import sys
import time
from pathlib import Path

import psutil

from benchmarks import command_line
from benchmarks.engine import make_work
from benchmarks.engines import logprobs, rollout, train
from benchmarks.engines.shapes import SHAPES, peak_flops
from storage.records.types import Json

PARTS = ("rollout", "train", "logprobs")
KV_CACHE = ("keep", "recompute", "drain")
LOGPROBS_SHARE_TARGET = 0.25
"""Of the peak memory of the naive form."""


def compared(arguments: argparse.Namespace) -> Json:
    """Measure the parts that `arguments.only` names; return all printed numbers."""
    start_s = time.monotonic()

    def say(words: str) -> None:
        print(f"{time.monotonic() - start_s:6.0f} s  {words}", file=sys.stderr, flush=True)

    sizes = SHAPES[arguments.shape].sizes
    prompt = arguments.prompt_tokens
    prompt_tokens = max(1, prompt // 2), prompt + prompt // 2
    work = make_work(
        arguments.requests,
        sizes.vocab,
        arguments.spread,
        arguments.seed,
        prompt_tokens,
        arguments.answer_tokens,
        arguments.answer_tokens_max,
    )
    results: Json = {
        "machine": machine(arguments),
        "arguments": vars(arguments),
        "parameters": sizes.parameters,
    }
    if "rollout" in arguments.only:
        max_tokens = prompt_tokens[1] + arguments.answer_tokens_max
        results["rollout"] = rollout.compared(arguments, work, max_tokens, say)
    if "train" in arguments.only:
        results["train"] = train.compared(arguments, work, say)
    if "logprobs" in arguments.only:
        say("logprobs")
        own = logprobs.parse(["--device", arguments.device, "--seed", str(arguments.seed)])
        results["logprobs"] = logprobs.compared(own)
    say("done")
    results["load_at_end"] = os.getloadavg()[0]
    return results | {"targets": targets(results)}


def machine(arguments: argparse.Namespace) -> Json:
    import torch

    on_cpu = arguments.device == "cpu"
    return {
        "cores": psutil.cpu_count(),
        "cpu": _cpu_name(),
        "device": "cpu" if on_cpu else torch.cuda.get_device_name(arguments.device),
        "torch": torch.__version__,
        "load_at_start": os.getloadavg()[0],
    }


def _cpu_name() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return names[0] if names else "unknown"


def targets(results: Json) -> Json:
    """Return whether each target was met; those of parts that were not measured are left out."""
    met: Json = {}
    for name, row in results.get("rollout", {}).get("engines", {}).items():
        if "share_with_updates" in row:
            met[f"{name}: at least {rollout.SHARE_TARGET:.0%} of its throughput with updates"] = (
                row["share_with_updates"] >= rollout.SHARE_TARGET
            )
    if "logprobs" in results:
        share = results["logprobs"]["ways"]["ours"]["peak_share"]
        met["log-probabilities: at most a quarter of the naive memory"] = (
            share <= LOGPROBS_SHARE_TARGET
        )
    return met


def show(results: Json) -> None:
    here = results["machine"]
    print(
        f"{here['cpu']}, {here['cores']} cores, device {here['device']}, torch {here['torch']}; "
        f"load {here['load_at_start']:.1f} at the start, {results['load_at_end']:.1f} at the end\n"
        f"model {results['arguments']['shape']}: {results['parameters']:,} parameters"
    )
    for name, part in (("rollout", rollout), ("train", train), ("logprobs", logprobs)):
        if name in results:
            print()
            part.show(results[name])
    print()
    for target, is_met in results["targets"].items():
        print(f"{'met' if is_met else 'MISSED':7}{target}")


def main() -> None:
    arguments = parse()
    logging.basicConfig(level=logging.ERROR)
    import torch

    torch.set_num_threads(arguments.threads)
    results = compared(arguments)
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        show(results)


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = command_line.parser(
        "engines", __doc__, "--only rollout --sglang-python .venv-sglang/bin/python"
    )
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure"
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        default=[],
        metavar="NAME",
        help="beginnings of rows to measure besides the baselines, such as 'torch' 'deepspeed, 2' "
        "(default: all)",
    )
    parser.add_argument(
        "--shape", choices=list(SHAPES), default="tiny", help="model (default: tiny)"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, … (default: cpu)")
    parser.add_argument(
        "--peak-tflops",
        type=float,
        help="dense bf16 peak of a device, for MFU (default: that of a known GPU)",
    )
    parser.add_argument(
        "--sglang-python",
        default=os.environ.get("ASTRAFLOW_TEST_SGLANG_PYTHON", ""),
        help="interpreter of an environment with sglang, such as .venv-sglang/bin/python "
        "(default: ASTRAFLOW_TEST_SGLANG_PYTHON of the environment)",
    )
    parser.add_argument(
        "--kv-cache",
        nargs="+",
        choices=KV_CACHE,
        default=list(KV_CACHE),
        help="SGLang's policies of the KV cache at new weights (default: all)",
    )
    _add_sizes(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )
    arguments = parser.parse_args(given)
    work = SHAPES[arguments.shape].work
    for name in ("prompt_tokens", "answer_tokens", "answer_tokens_max", "micro_batch_tokens"):
        if getattr(arguments, name) is None:
            setattr(arguments, name, getattr(work, name))
    _check(parser, arguments)
    return arguments


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    by_shape = "(default: by shape)"
    for name, default, meaning in (
        ("requests", 192, "number of prompts"),
        ("concurrency", 64, "requests in progress at any time"),
        ("rows", 64, "rows of the training batch: the first requests"),
        ("steps", 3, "measured training steps"),
        ("repeats", 2, "passes over the requests; the best counts"),
        ("threads", 1, "compute threads of an engine or a rank on a CPU"),
        ("seed", 0, "random seed of weights, prompts and lengths"),
        ("prompt-tokens", None, "mean length of a prompt"),
        ("answer-tokens", None, "median length of an answer"),
        ("answer-tokens-max", None, "longest answer"),
        ("micro-batch-tokens", None, "tokens of one forward and backward pass"),
    ):
        words = by_shape if default is None else f"(default: {default})"
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} {words}")
    for name, amount, meaning in (
        ("spread", 0.8, "standard deviation of the logarithm of the answer length"),
        ("seconds", 6.0, "least duration of a pass, without other load"),
        ("interval-s", 2.0, "pause between two versions"),
        ("changed", 0.01, "share of the weights that a version changes"),
    ):
        parser.add_argument(
            f"--{name}", type=float, default=amount, help=f"{meaning} (default: {amount:g})"
        )


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Exit with a message for arguments that cannot be measured; find the device's peak."""
    counts = (
        *("requests", "concurrency", "rows", "steps", "repeats", "threads", "prompt_tokens"),
        *("answer_tokens", "answer_tokens_max", "micro_batch_tokens", "seconds", "interval_s"),
    )
    for name in counts:
        if getattr(arguments, name) <= 0:
            flag = name.replace("_", "-")
            parser.error(f"--{flag} is {getattr(arguments, name)}; it must be above 0")
    if not 0 < arguments.changed < 1:
        parser.error(f"--changed {arguments.changed} is not between 0 and 1")
    if arguments.rows > arguments.requests:
        parser.error(
            f"--rows {arguments.rows} is more than --requests {arguments.requests}: the rows of "
            "the batch are the first requests"
        )
    if arguments.device == "cpu":
        return
    import torch

    device = torch.device(arguments.device)
    if (device.index or 0) >= torch.cuda.device_count():
        parser.error(
            f"torch does not have {device} here: use a machine with a GPU, or --device cpu"
        )
    if arguments.peak_tflops is None:
        peak = peak_flops(torch.cuda.get_device_name(device))
        arguments.peak_tflops = peak / 1e12 if peak else None


if __name__ == "__main__":
    main()
