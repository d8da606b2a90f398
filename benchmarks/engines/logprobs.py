"""Compare ways of computing log-probabilities over a large vocabulary: peak memory and time.

Each way computes the log-probability and the entropy of the same tokens from the same hidden states
and the same output head, in float32, and then the gradients of both:

    naive          all logits at once: log_softmax, gather, autograd
    checkpointed   chunks of 2²⁶ logits with autograd, each computed again in the backward pass
    ours           trainer/engines/step/logprobs.py

Each runs in a process of its own. Memory is its peak without the inputs, and with the gradients: on
a CPU the resident memory of the process, on a GPU what torch allocated. Times are the least of the
repeats: wall-clock, and the CPU time of the process, which other load on the machine changes less.
The error is the largest difference of a log-probability from the naive one.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TypeAlias

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks import command_line
from storage.records.types import Json
from trainer.engines.step.logprobs import token_logprobs

VOCABULARY = 151_936
"""Of Qwen3."""
CHECKPOINTED_LOGITS = 2**26
MAXRSS_UNIT = 1024
"""Bytes of a unit of Linux's ru_maxrss."""
Way: TypeAlias = Callable[[Tensor, torch.nn.Linear, Tensor, Tensor], tuple[Tensor, Tensor]]


def naive(
    hidden_NH: Tensor, head: torch.nn.Linear, target_N: Tensor, temperature_N: Tensor
) -> tuple[Tensor, Tensor]:
    logprobs_NV = F.log_softmax(head(hidden_NH) / temperature_N[:, None], dim=-1)
    with torch.no_grad():
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return logprobs_NV.gather(1, target_N[:, None])[:, 0], entropy_N


def checkpointed(
    hidden_NH: Tensor, head: torch.nn.Linear, target_N: Tensor, temperature_N: Tensor
) -> tuple[Tensor, Tensor]:
    size = max(1, CHECKPOINTED_LOGITS // head.out_features)
    parts = [
        checkpoint(naive, hidden_CH, head, target_C, temperature_C, use_reentrant=False)
        for hidden_CH, target_C, temperature_C in zip(
            torch.split(hidden_NH, size),
            torch.split(target_N, size),
            torch.split(temperature_N, size),
            strict=True,
        )
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


WAYS: dict[str, Way] = {"naive": naive, "checkpointed": checkpointed, "ours": token_logprobs}


def inputs(
    tokens: int, hidden: int, vocabulary: int, device: torch.device, seed: int
) -> tuple[Tensor, torch.nn.Linear, Tensor, Tensor]:
    draw = torch.Generator(device).manual_seed(seed)
    head = torch.nn.Linear(hidden, vocabulary, bias=False, device=device)
    with torch.no_grad():
        head.weight.normal_(0, 0.02, generator=draw)
    hidden_NH = torch.randn(tokens, hidden, device=device, generator=draw, requires_grad=True)
    target_N = torch.randint(vocabulary, (tokens,), device=device, generator=draw)
    return hidden_NH, head, target_N, torch.linspace(0.7, 1.2, tokens, device=device)


def measured(way: Way, arguments: argparse.Namespace) -> Json:
    """Measure one way in this process: {peak_bytes, seconds, cpu_s, logprobs}."""
    device = torch.device(arguments.device)
    given = inputs(arguments.tokens, arguments.hidden, arguments.vocabulary, device, arguments.seed)
    slope_N = torch.linspace(-1, 1, arguments.tokens, device=device)
    before = _held(device)
    seconds, cpu_s, logprobs = [], [], []
    for _ in range(arguments.repeats):
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        logprobs_N, _ = way(*given)
        torch.autograd.grad((logprobs_N * slope_N).sum(), [given[0], given[1].weight])
        logprobs = logprobs_N.tolist()  # waits for the device
        seconds.append(time.perf_counter() - start_s)
        cpu_s.append(time.process_time() - start_cpu_s)
    return {
        "peak_bytes": max(0, _peak(device) - before),  # the kernel counts pages in groups
        "seconds": min(seconds),
        "cpu_s": min(cpu_s),
        "logprobs": logprobs,
    }


def _held(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_UNIT


def compared(arguments: argparse.Namespace) -> Json:
    """Measure each way in a child process; return all printed numbers."""
    results: dict[str, Json] = {}
    for name in WAYS:
        command = [sys.executable, "-m", "benchmarks.engines.logprobs", "--way", name]
        for size in ("tokens", "hidden", "vocabulary", "repeats", "device", "seed"):
            command += [f"--{size}", str(getattr(arguments, size))]
        child = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        results[name] = json.loads(child.stdout)
        print(".", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    base = results["naive"]
    reference = base["logprobs"]
    return {
        "tokens": arguments.tokens,
        "hidden": arguments.hidden,
        "vocabulary": arguments.vocabulary,
        "device": arguments.device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "logits_bytes": 4 * arguments.tokens * arguments.vocabulary,
        "head_gradient_bytes": 4 * arguments.hidden * arguments.vocabulary,
        "ways": {
            name: {
                "peak_bytes": each["peak_bytes"],
                "peak_share": each["peak_bytes"] / base["peak_bytes"],
                "seconds": each["seconds"],
                "cpu_s": each["cpu_s"],
                "cpu_share": each["cpu_s"] / base["cpu_s"],
                "error": max(
                    abs(one - other) for one, other in zip(each["logprobs"], reference, strict=True)
                ),
            }
            for name, each in results.items()
        },
    }


def show(results: Json) -> None:
    print(
        f"{results['tokens']} tokens, hidden size {results['hidden']}, vocabulary "
        f"{results['vocabulary']}, on {results['device']} ({results['threads']} threads), torch "
        f"{results['torch']}\nall logits in float32: {results['logits_bytes'] / 1e6:.0f} MB; "
        f"gradient of the head: {results['head_gradient_bytes'] / 1e6:.0f} MB\n"
    )
    heads = ("peak MB", "of naive", "seconds", "CPU s", "of naive", "error")
    print(" " * 14 + "".join(f"{head:>10}" for head in heads))
    for name, each in results["ways"].items():
        print(
            f"{name:14}{each['peak_bytes'] / 1e6:10.0f}{each['peak_share']:10.2f}"
            f"{each['seconds']:10.2f}{each['cpu_s']:10.2f}{each['cpu_share']:10.2f}{each['error']:10.1e}"
        )


def main() -> None:
    arguments = parse()
    if arguments.way:
        print(json.dumps(measured(WAYS[arguments.way], arguments)))
        return
    results = compared(arguments)
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        show(results)


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = command_line.parser("engines.logprobs", __doc__, "--tokens 1024 --hidden 256 --json")
    parser.add_argument(
        "--tokens", type=int, default=2048, help="tokens of the loss (default: 2048)"
    )
    parser.add_argument(
        "--hidden", type=int, default=512, help="hidden size of the model (default: 512)"
    )
    parser.add_argument(
        "--vocabulary",
        type=int,
        default=VOCABULARY,
        help=f"size of the vocabulary (default: {VOCABULARY}, that of Qwen3)",
    )
    parser.add_argument(
        "--repeats", type=int, default=1, help="computations of each way (default: 1)"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, … (default: cpu)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument(
        "--way",
        choices=list(WAYS),
        help="measure this way only, in this process, and print its numbers as JSON",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    arguments = parser.parse_args(given)
    if min(arguments.tokens, arguments.hidden, arguments.vocabulary, arguments.repeats) < 1:
        parser.error("--tokens, --hidden, --vocabulary and --repeats start at 1")
    device = torch.device(arguments.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        parser.error(
            f"torch does not have {device} here: use a machine with a GPU, or --device cpu"
        )
    return arguments


if __name__ == "__main__":
    main()
