"""Compare the delta codec with the formats of two papers: size, CPU time and exactness.

All encode and apply the same change of bf16 weights in one run:

    ours              the project's codec; `ours_2_threads`: on two threads
    astraflow_format  u32 index and u16 value of every changed element
    pulse_format      index deltas within rows, raw values, zstd and SHA-256
    astraflow_worker  the update of AstraFlow's rollout worker, from the bytes of astraflow_format

The two formats are minimal NumPy implementations (benchmarks/delta_formats.py); the papers'
programs do more work. The worker reads the bytes from a file, sorts the indices, and scatters two
bytes a change into the model's memory-mapped safetensors file. Not counted: its separate process,
and the engine's reading of the file. The entropy bound is that of a code which does not use the
weights: the positions of independent changes plus the distribution of the steps. Everything but
`ours_2_threads` runs on one thread, tensor by tensor, the worker over the whole model.

Times are CPU seconds (process time of all threads); GB are the size of the model in bf16. `apply`
changes the old bits in place, without a digest. `renew` is the update of a rollout worker, which
continues to generate with the old weights: it writes the new weights to other memory, which has
been used before, and computes their digest. `scan` is the codec's first loop alone.
`read_gb_per_s` is the speed at which one thread reads memory; `scan` reads old and new bits, so it
can reach at most half of that speed.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from benchmarks import command_line, weight_steps
from benchmarks.delta_formats import AstraFlowFormat, AstraFlowWorker, PulseFormat
from storage.formats.safetensors import Digest, digest, from_safetensors
from storage.records.types import Json
from storage.records.weights import HostTensor
from storage.weights.codec import delta_loops, deltas
from storage.weights.codec.delta_blocks import BLOCK_ELEMENTS

TENSOR_ELEMENTS = 2**26
"""Size of a synthetic tensor: 134 MB of bf16, as the embedding of a mid-sized model."""
MEMORY_FOLDER = Path("/dev/shm")
"""A folder in memory, in which AstraFlow's worker has the model, too."""
Pair = tuple[Any, Any]


class Ours:
    """The project's codec, with the interface of the other formats."""

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads

    def encode(self, old: Any, new: Any) -> list[bytes]:
        base, tensors = self._cut(old), self._cut(new)
        sources = {name: name for name in base}
        return [
            change.blob for change in deltas.encode(base, tensors, sources, threads=self.threads)
        ]

    def apply(self, bits: Any, blobs: list[bytes]) -> None:
        def apply(tensor: HostTensor, blob: bytes) -> None:
            deltas.apply(tensor, memoryview(blob), in_place=True)

        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(apply, self._cut(bits).values(), blobs))

    def renew(self, old: Any, new: Any, blobs: list[bytes]) -> list[str]:
        def renew(base: HostTensor, into: HostTensor, blob: bytes) -> str:
            digest = Digest()
            deltas.apply(base, memoryview(blob), into=into.bits, digest=digest)
            return str(digest)

        with ThreadPoolExecutor(self.threads) as pool:
            return list(pool.map(renew, self._cut(old).values(), self._cut(new).values(), blobs))

    def _cut(self, bits: Any) -> dict[str, HostTensor]:
        """Cut the bits into one tensor for each thread; a tensor is the unit of parallel work."""
        return {
            str(number): HostTensor("BF16", part.shape, part)
            for number, part in enumerate(np.array_split(bits, self.threads))
        }


def renew_in_turn(format: Any, old: Any, new: Any, blobs: list[bytes]) -> list[str]:
    """Copy the old bits, apply the changes, return the digest: `renew` of the other formats."""
    np.copyto(new, old)
    format.apply(new, blobs)
    return [digest(HostTensor("BF16", new.shape, new))]


@dataclass(kw_only=True)
class CodecCost:
    """Total size and time of a format over all tensors."""

    num_bytes: int = 0
    encode_cpu_s: float = 0.0
    encode_s: float = 0.0
    apply_cpu_s: float = 0.0
    apply_s: float = 0.0
    renew_cpu_s: float = 0.0
    bit_exact: bool = True


def measure(pairs: Mapping[str, Pair], format: Any, progress: Callable[[], None]) -> CodecCost:
    """Measure one pass over all tensors. Copying the bits is outside the measured time."""
    cost = CodecCost()
    for old, new in pairs.values():
        blob, cpu_s, wall_s = _timed(partial(format.encode, old, new))
        cost.encode_cpu_s, cost.encode_s = cost.encode_cpu_s + cpu_s, cost.encode_s + wall_s
        cost.num_bytes += sum(map(len, blob))
        bits = old.copy()
        _, cpu_s, wall_s = _timed(partial(format.apply, bits, blob))
        cost.apply_cpu_s, cost.apply_s = cost.apply_cpu_s + cpu_s, cost.apply_s + wall_s
        cost.bit_exact &= bool((bits == new).all())
        bits[:] = 0
        _, cpu_s, _ = _timed(
            partial(getattr(format, "renew", partial(renew_in_turn, format)), old, bits, blob)
        )
        cost.renew_cpu_s += cpu_s
        cost.bit_exact &= bool((bits == new).all())
        progress()
    return cost


def measure_worker(
    pairs: Mapping[str, Pair], folder: Path, progress: Callable[[], None]
) -> CodecCost:
    """Measure AstraFlow's worker, which updates the whole model at once, in its file.

    `renew` is the same update. Encoding is not the worker's and is not measured.
    """
    worker, cost = AstraFlowWorker(folder), CodecCost()
    old, new = (np.concatenate([pair[which] for pair in pairs.values()]) for which in (0, 1))
    blob = worker.encode(old, new)
    cost.num_bytes = sum(map(len, blob))
    worker.store(old, blob)
    _, cost.apply_cpu_s, cost.apply_s = _timed(worker.update)
    cost.renew_cpu_s = cost.apply_cpu_s
    cost.bit_exact = bool((worker.updated() == new).all())
    progress()
    return cost


def report(pairs: Mapping[str, Pair], progress: Callable[[], None], folder: Path) -> Json:
    """Measure all formats; return all printed numbers. `folder` is in memory.

    The compiled loops are warm before the first measurement.
    """
    elements = sum(old.size for old, _ in pairs.values())
    gb = 2 * elements / 1e9
    num_changes = sum(int(np.count_nonzero(old != new)) for old, new in pairs.values())
    formats = {
        "ours": Ours(),
        "astraflow_format": AstraFlowFormat(),
        "pulse_format": PulseFormat(),
        "ours_2_threads": Ours(threads=2),
    }
    old, new = next(iter(pairs.values()))
    first = {"warm": (old[:BLOCK_ELEMENTS], new[:BLOCK_ELEMENTS])}
    for format in formats.values():
        measure(first, format, lambda: None)
    measure_worker(first, folder, lambda: None)
    costs = {name: measure(pairs, format, progress) for name, format in formats.items()}
    costs["astraflow_worker"] = measure_worker(pairs, folder, progress)
    scan_cpu_s = sum(_timed(partial(_scan, old, new))[1] for old, new in pairs.values())
    single, double = costs["ours"], costs["ours_2_threads"]
    return {
        "elements": elements,
        "tensors": len(pairs),
        "changed": num_changes / elements,
        "entropy_bound": entropy_bound(pairs, num_changes, elements),
        "bytes_per_change": {name: cost.num_bytes / num_changes for name, cost in costs.items()},
        "encode_gb_per_cpu_s": {
            name: gb / cost.encode_cpu_s for name, cost in costs.items() if cost.encode_cpu_s
        },
        "apply_gb_per_cpu_s": {name: gb / cost.apply_cpu_s for name, cost in costs.items()},
        "renew_gb_per_cpu_s": {name: gb / cost.renew_cpu_s for name, cost in costs.items()},
        "scan_gb_per_cpu_s": gb / scan_cpu_s,
        "read_gb_per_s": read_speed(),
        "two_threads": {
            "encode": single.encode_s / double.encode_s,
            "apply": single.apply_s / double.apply_s,
        },
        "bit_exact": all(cost.bit_exact for cost in costs.values()),
    }


def entropy_bound(pairs: Mapping[str, Pair], num_changes: int, elements: int) -> float:
    """Compute bytes per change: (H(share changed) · elements + H(steps) · changes) / changes / 8.

    H is the entropy in bits.
    """
    share = num_changes / elements
    positions = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) / share
    counts = np.zeros(2**16, dtype=np.int64)
    for old, new in pairs.values():
        for start in range(0, old.size, BLOCK_ELEMENTS):
            part = slice(start, start + BLOCK_ELEMENTS)
            counts += np.bincount((new[part] - old[part])[old[part] != new[part]], minlength=2**16)
    shares = counts[counts > 0] / num_changes
    return float(positions - (shares * np.log2(shares)).sum()) / 8


def read_speed() -> float:
    """Return the GB of memory that one thread reads per CPU second: best of three passes."""
    words = np.ones(2**26, dtype=np.uint64)
    _read(words)
    return max(words.nbytes / 1e9 / _timed(lambda: _read(words))[1] for _ in range(3))


@njit(nogil=True)
def _read(words: Any) -> Any:
    total = np.uint64(0)
    for word in words:
        total ^= word
    return total


def _scan(old: Any, new: Any) -> None:
    for start in range(0, old.size, BLOCK_ELEMENTS):
        delta_loops.find(old[start : start + BLOCK_ELEMENTS], new[start : start + BLOCK_ELEMENTS])


def _timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    result = call()
    return result, time.process_time() - cpu_s, time.perf_counter() - wall_s


def load(old: Path, new: Path) -> dict[str, Pair]:
    """Read the bf16 and fp16 tensors that two safetensors files have in common, each flat."""
    before, after = from_safetensors(old.read_bytes()), from_safetensors(new.read_bytes())
    pairs = {
        name: (tensor.bits.reshape(-1), after[name].bits.reshape(-1))
        for name, tensor in before.items()
        if tensor.dtype in ("BF16", "F16")
        and name in after
        and after[name].shape == tensor.shape
        and tensor.bits.size
    }
    if not any((old != new).any() for old, new in pairs.values()):
        sys.exit(f"{old} and {new} have no common 16-bit tensor with changes: nothing to measure")
    return pairs


def cut(old: Any, new: Any) -> Iterator[tuple[str, Pair]]:
    """Cut flat weights into tensors of TENSOR_ELEMENTS."""
    for start in range(0, old.size, TENSOR_ELEMENTS):
        yield (
            f"{start}",
            (old[start : start + TENSOR_ELEMENTS], new[start : start + TENSOR_ELEMENTS]),
        )


def show(results: Json) -> None:
    print(
        f"{results['elements']:,} elements in {results['tensors']} tensors, "
        f"{results['changed']:.3%} changed ({results['made_by']}); "
        f"entropy bound {results['entropy_bound']:.3f} bytes a change; "
        f"load average {results['load_before']:.1f} before, {results['load_after']:.1f} after"
    )
    print(
        f"\n{'':18}{'bytes/change':>14}{'encode GB/CPU s':>18}"
        f"{'apply GB/CPU s':>18}{'renew GB/CPU s':>18}"
    )
    for name in results["bytes_per_change"]:
        print(
            f"{name:18}{results['bytes_per_change'][name]:14.3f}"
            f"{results['encode_gb_per_cpu_s'].get(name, math.nan):18.2f}"
            f"{results['apply_gb_per_cpu_s'][name]:18.2f}"
            f"{results['renew_gb_per_cpu_s'][name]:18.2f}"
        )
    faster = results["two_threads"]
    print(
        f"\nscan alone {results['scan_gb_per_cpu_s']:.1f} GB per CPU s; memory is read at "
        f"{results['read_gb_per_s']:.1f} GB/s"
    )
    print(
        f"two threads: encode {faster['encode']:.2f} times, apply {faster['apply']:.2f} times as "
        "fast"
    )
    print(f"bit exact: {results['bit_exact']}")


def main() -> None:
    arguments = parse()
    load_before = os.getloadavg()[0]
    if arguments.old:
        pairs, made_by = (
            load(Path(arguments.old), Path(arguments.new)),
            f"{arguments.old} and {arguments.new}",
        )
    elif arguments.train:
        old, new = weight_steps.trained(arguments.train, arguments.seed)
        pairs, made_by = (
            dict(cut(old, new)),
            f"a real step of AdamW at learning rate {arguments.train:g}",
        )
    else:
        old, new, lr = weight_steps.synthetic(arguments.elements, arguments.changed, arguments.seed)
        pairs, made_by = dict(cut(old, new)), f"a synthetic step at learning rate {lr:.2g}"
    with tempfile.TemporaryDirectory(
        dir=MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None
    ) as folder:
        results = report(
            pairs, lambda: print(".", end="", flush=True, file=sys.stderr), Path(folder)
        )
    print(file=sys.stderr)
    results |= {"made_by": made_by, "load_before": load_before, "load_after": os.getloadavg()[0]}
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        show(results)


def parse() -> argparse.Namespace:
    parser = command_line.parser(
        "codec", __doc__, "--elements 500000000 --changed 0.01 --seed 0 --json"
    )
    parser.add_argument(
        "--elements",
        type=int,
        default=500_000_000,
        help="number of synthetic weights (default: 500000000: 1 GB of bf16)",
    )
    parser.add_argument(
        "--changed",
        type=float,
        default=0.01,
        help="share of the weights that a step changes (default: 0.01)",
    )
    parser.add_argument(
        "--train",
        type=float,
        metavar="LR",
        help="use a real step of a model of 20 million weights, trained at this learning rate",
    )
    parser.add_argument("--old", metavar="FILE", help="safetensors file with weights before a step")
    parser.add_argument("--new", metavar="FILE", help="safetensors file with them after the step")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    arguments = parser.parse_args()
    if bool(arguments.old) != bool(arguments.new):
        parser.error("--old and --new go together")
    if not 0 < arguments.changed < 1:
        parser.error(f"--changed {arguments.changed} is not between 0 and 1")
    return arguments


if __name__ == "__main__":
    main()
