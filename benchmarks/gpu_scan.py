"""Compare a trainer's scan for changes on a GPU with a copy of all weights to the host.

The weights are synthetic: fp32 masters on the device, normal with deviation 0.02. A step is one of
Adam (benchmarks/weight_steps.py) that changes a given share of the bf16 weights. Both methods give
the same host tensors:

    whole   each tensor is rounded to bf16 on the device and copied to the host
    scan    each tensor is compared on the device with the bits published last; only its changes
            are copied to the host

Seconds are wall-clock, of the fastest repeat; `compare` is the part of the scan on the device.
Memory is the device's peak without the masters; `kept` is its part that remains between
publications: the bits published last.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import command_line, weight_steps
from benchmarks.weight_steps import DEVIATION, UPDATE_DEVIATION, UPDATE_MAX
from storage.formats.safetensors import weights_digest
from storage.records.types import Json
from storage.records.weights import HostTensor
from trainer.engines.torch.changed_elements import DeviceScan, changes
from trainer.engines.torch.host_tensors import to_host

PUBLISHED, BYTES = "BF16", 2
MODELS_GB = (3.4, 16.4)
"""Qwen3 with 1.7 and with 8 billion weights, in bf16."""
LAYERS = 32
LAYER_PARTS = (("q", 8), ("k", 4), ("v", 4), ("o", 8), ("gate", 24), ("up", 24), ("down", 24))
"""Matrices of a layer and their relative sizes, as in Qwen3 1.7B; each layer also has two norms."""
EMBEDDING_SHARE = 0.1
WARM_GB = 0.01
DRAWN = 2**26
"""Random numbers drawn on the device at once."""


def sizes(elements: int) -> dict[str, int]:
    """Return the tensor sizes of a model of `elements` weights: LAYERS layers, norm, embedding."""
    layer = int(elements * (1 - EMBEDDING_SHARE)) // LAYERS
    unit = layer / (1.01 * sum(share for _, share in LAYER_PARTS))
    norm = max(1, int(layer**0.5) // 4)
    parts = {"norm": norm}
    for number in range(LAYERS):
        parts |= {f"layers.{number}.{name}": int(unit * share) for name, share in LAYER_PARTS}
        parts |= {f"layers.{number}.norm_{place}": norm for place in ("in", "out")}
    return {"embedding": elements - sum(parts.values())} | parts


def model(elements: int, device: torch.device, draw: torch.Generator) -> dict[str, Tensor]:
    masters = {name: torch.empty(size, device=device) for name, size in sizes(elements).items()}
    for chunk in chunks(masters):
        chunk.normal_(0, DEVIATION, generator=draw)
    return masters


def step(masters: dict[str, Tensor], lr: float, draw: torch.Generator) -> None:
    for chunk in chunks(masters):
        update = (
            torch.empty_like(chunk)
            .normal_(0, UPDATE_DEVIATION, generator=draw)
            .clamp_(-UPDATE_MAX, UPDATE_MAX)
        )
        chunk.sub_(update, alpha=lr)


def chunks(tensors: dict[str, Tensor]) -> Iterator[Tensor]:
    for tensor in tensors.values():
        yield from torch.split(tensor, DRAWN)


def measure(gb: float, device: torch.device, lr: float, repeats: int, seed: int) -> Json:
    """Measure one model; return all printed numbers."""
    elements = int(gb * 1e9 / BYTES)
    draw = torch.Generator(device).manual_seed(seed)
    masters = model(elements, device, draw)
    masters_bytes = sum(tensor.nbytes for tensor in masters.values())

    def copied() -> dict[str, HostTensor]:
        return {name: to_host(tensor, PUBLISHED) for name, tensor in masters.items()}

    whole = [timed(device, copied)[1:] for _ in range(repeats)]
    scan = DeviceScan()

    def scanned() -> dict[str, HostTensor]:
        return {name: scan.to_host(name, tensor, PUBLISHED) for name, tensor in masters.items()}

    published, first_s, _ = timed(device, scanned)
    first_bytes = scan.num_bytes
    scans = []
    for _ in range(repeats):
        step(masters, lr, draw)
        published, *spent = timed(device, scanned)
        scans.append(spent)
    crossed = (scan.num_bytes - first_bytes) // repeats
    exact = weights_digest(published) == weights_digest(copied())
    scan = DeviceScan()  # frees the published bits; `compared` makes a copy
    alone = [compared(masters, lr, device, draw) for _ in range(repeats)]
    return {
        "gb": elements * BYTES / 1e9,
        "tensors": len(masters),
        "changed": alone[0][1] / elements,
        "bytes_crossed": {"whole": elements * BYTES, "scan": crossed},
        "seconds": {
            "whole": min(seconds for seconds, _ in whole),
            "scan": min(seconds for seconds, _ in scans),
            "first_scan": first_s,
            "compare": min(seconds for seconds, _ in alone),
        },
        "device_memory_bytes": {
            "masters": masters_bytes,
            "whole": max(0, max(peak for _, peak in whole) - masters_bytes),
            "scan": max(0, max(peak for _, peak in scans) - masters_bytes),
            "kept": elements * BYTES,
        },
        "bit_exact": exact,
    }


def compared(
    masters: dict[str, Tensor], lr: float, device: torch.device, draw: torch.Generator
) -> tuple[float, int]:
    """Compare all tensors with those of the step before, on the device alone.

    Returns the seconds, and the number of changed elements.
    """
    seconds, num_changed = 0.0, 0
    for name, tensor in masters.items():
        bits = tensor.to(torch.bfloat16).view(torch.int16)
        step({name: tensor}, lr, draw)
        count, spent_s, _ = timed(device, partial(compare, tensor, bits))
        seconds, num_changed = seconds + spent_s, num_changed + count
    return seconds, num_changed


def compare(tensor: Tensor, bits: Tensor) -> int:
    return sum(len(places) for _, places, _ in changes(tensor, torch.bfloat16, bits))


def timed(device: torch.device, call: Callable[[], Any]) -> tuple[Any, float, int]:
    """Return the result of a call, its seconds, and the peak memory of the device (0 on a CPU)."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    start_s = time.perf_counter()
    result = call()
    if on_gpu:
        torch.cuda.synchronize(device)
    return (
        result,
        time.perf_counter() - start_s,
        torch.cuda.max_memory_allocated(device) if on_gpu else 0,
    )


def show(results: Json) -> None:
    print(f"{results['device']}, torch {results['torch']}")
    for each in results["models"]:
        crossed, seconds = each["bytes_crossed"], each["seconds"]
        memory = each["device_memory_bytes"]
        print(
            f"\n{each['gb']:.2f} GB of bf16 weights in {each['tensors']} tensors, "
            f"{each['changed']:.3%} changed"
        )
        print(f"{'':12}{'MB crossed':>14}{'seconds':>12}{'peak device MB without masters':>34}")
        for name in ("whole", "scan"):
            sizes_mb = f"{crossed[name] / 1e6:14.1f}", f"{memory[name] / 1e6:34.0f}"
            print(f"{name:12}{sizes_mb[0]}{seconds[name]:12.3f}{sizes_mb[1]}")
        print(
            f"comparison alone {seconds['compare']:.3f} s; the first scan, which copies all "
            f"tensors, {seconds['first_scan']:.3f} s"
        )
        print(f"bit exact: {each['bit_exact']}")


def main() -> None:
    arguments = parse()
    device = torch.device(arguments.device)
    lr = weight_steps.synthetic(1, arguments.changed, arguments.seed)[2]
    measure(WARM_GB, device, lr, 1, arguments.seed)  # the device's start and the compiled loops
    models = []
    for gb in arguments.gb:
        models.append(measure(gb, device, lr, arguments.repeats, arguments.seed))
        print(".", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    results = {"device": name, "torch": torch.__version__, "models": models}
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        show(results)


def parse() -> argparse.Namespace:
    parser = command_line.parser("gpu_scan", __doc__, "--json --gb 3.4")
    parser.add_argument(
        "--gb",
        type=float,
        nargs="+",
        default=list(MODELS_GB),
        help="models to measure, GB of bf16 weights (default: 3.4 16.4)",
    )
    parser.add_argument(
        "--changed",
        type=float,
        default=0.01,
        help="share of the weights that a step changes (default: 0.01)",
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="steps that are measured (default: 3)"
    )
    parser.add_argument(
        "--device",
        default="cuda",
        help="cuda, cuda:1, …; cpu runs without a bus to measure (default: cuda)",
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        parser.error(
            f"torch does not have {device} here: use a machine with a GPU, or --device cpu, which "
            "measures no bus"
        )
    if not 0 < arguments.changed < 1:
        parser.error(f"--changed {arguments.changed} is not between 0 and 1")
    if min(arguments.gb) < 1e-4 or arguments.repeats < 1:
        parser.error("--gb starts at 0.0001, --repeats at 1")
    return arguments


if __name__ == "__main__":
    main()
