"""The delta codec against two papers' formats: size, CPU time and exactness on the same bf16 bits,
in one run.

`ours` is the project's codec; `astraflow_format` is u32 index and u16 value of every changed
element; `pulse_format` is index deltas within rows, raw values, zstd and SHA-256
(benchmarks/delta_formats.py). These two are formats, written anew in NumPy in the cheapest way:
programs do more. `astraflow_worker` does what AstraFlow's rollout worker really does with the same
bytes: it reads them from a file, sorts the indices, and scatters two bytes a change into the
model's memory-mapped safetensors file (not counted: the process of its own in which it does so, and
what the engine does with the file afterwards). The entropy bound is that of a code that does not
use the weights: positions of independent changes plus the distribution of the steps. All run on one
thread, tensor by tensor, the worker over the whole model; `ours` runs once more on two.

CPU seconds count (process time of all threads); GB are those of the model in bf16. `apply` changes
the old bits in place and proves nothing; `renew` is what a rollout worker does, who goes on
generating with the old weights: the new ones are made beside them, in memory that was used before,
and digested. `scan` is the codec's first loop alone, `read_gb_per_s` the machine's own speed at
reading memory on one thread, so `scan`, which reads old and new bits, can at best reach half of it.
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
"""Made-up weights are cut into tensors of this size: 134 MB of bf16, an embedding of a mid-sized
model.
"""
MEMORY_FOLDER = Path("/dev/shm")
"""Where AstraFlow's worker keeps the model, too."""
Pair = tuple[Any, Any]


class Ours:
    """The project's codec as a format like the others."""

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
        """A tensor for each thread: what is applied side by side are tensors."""
        return {
            str(number): HostTensor("BF16", part.shape, part)
            for number, part in enumerate(np.array_split(bits, self.threads))
        }


def renew_in_turn(format: Any, old: Any, new: Any, blobs: list[bytes]) -> list[str]:
    """The other formats' `renew`: a copy, the changes, the digest."""
    np.copyto(new, old)
    format.apply(new, blobs)
    return [digest(HostTensor("BF16", new.shape, new))]


@dataclass(kw_only=True)
class Measured:
    num_bytes: int = 0
    encode_cpu_s: float = 0.0
    encode_s: float = 0.0
    apply_cpu_s: float = 0.0
    apply_s: float = 0.0
    renew_cpu_s: float = 0.0
    bit_exact: bool = True


def measure(pairs: Mapping[str, Pair], format: Any, progress: Callable[[], None]) -> Measured:
    """One pass over all tensors. The applied bits are a copy, made outside the measured time."""
    found = Measured()
    for old, new in pairs.values():
        blob, cpu_s, wall_s = _timed(partial(format.encode, old, new))
        found.encode_cpu_s, found.encode_s = found.encode_cpu_s + cpu_s, found.encode_s + wall_s
        found.num_bytes += sum(map(len, blob))
        bits = old.copy()
        _, cpu_s, wall_s = _timed(partial(format.apply, bits, blob))
        found.apply_cpu_s, found.apply_s = found.apply_cpu_s + cpu_s, found.apply_s + wall_s
        found.bit_exact &= bool((bits == new).all())
        bits[:] = 0
        _, cpu_s, _ = _timed(
            partial(getattr(format, "renew", partial(renew_in_turn, format)), old, bits, blob)
        )
        found.renew_cpu_s += cpu_s
        found.bit_exact &= bool((bits == new).all())
        progress()
    return found


def measure_worker(
    pairs: Mapping[str, Pair], folder: Path, progress: Callable[[], None]
) -> Measured:
    """AstraFlow's worker updates the whole model at once, in its file; there is no other `renew`.
    Who encodes is another.
    """
    worker, found = AstraFlowWorker(folder), Measured()
    old, new = (np.concatenate([pair[which] for pair in pairs.values()]) for which in (0, 1))
    blob = worker.encode(old, new)
    found.num_bytes = sum(map(len, blob))
    worker.store(old, blob)
    _, found.apply_cpu_s, found.apply_s = _timed(worker.update)
    found.renew_cpu_s = found.apply_cpu_s
    found.bit_exact = bool((worker.updated() == new).all())
    progress()
    return found


def report(pairs: Mapping[str, Pair], progress: Callable[[], None], folder: Path) -> Json:
    """Everything that is printed. The compiled loops are warm before anything is measured. `folder`
    is in memory.
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
    found = {name: measure(pairs, format, progress) for name, format in formats.items()}
    found["astraflow_worker"] = measure_worker(pairs, folder, progress)
    scan_cpu_s = sum(_timed(partial(_scan, old, new))[1] for old, new in pairs.values())
    one, two = found["ours"], found["ours_2_threads"]
    return {
        "elements": elements,
        "tensors": len(pairs),
        "changed": num_changes / elements,
        "entropy_bound": entropy_bound(pairs, num_changes, elements),
        "bytes_per_change": {name: each.num_bytes / num_changes for name, each in found.items()},
        "encode_gb_per_cpu_s": {
            name: gb / each.encode_cpu_s for name, each in found.items() if each.encode_cpu_s
        },
        "apply_gb_per_cpu_s": {name: gb / each.apply_cpu_s for name, each in found.items()},
        "renew_gb_per_cpu_s": {name: gb / each.renew_cpu_s for name, each in found.items()},
        "scan_gb_per_cpu_s": gb / scan_cpu_s,
        "read_gb_per_s": read_speed(),
        "two_threads": {"encode": one.encode_s / two.encode_s, "apply": one.apply_s / two.apply_s},
        "bit_exact": all(each.bit_exact for each in found.values()),
    }


def entropy_bound(pairs: Mapping[str, Pair], num_changes: int, elements: int) -> float:
    """Bytes per change: (H(share changed) · elements + H(steps) · changes) / changes / 8."""
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
    """GB of memory read per CPU second, one thread, best of three passes over 512 MB."""
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
    """The bf16 and fp16 tensors of the same name and shape in two safetensors files, flat."""
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
        sys.exit(
            f"{old} and {new} have no 16-bit tensor in common that differs: nothing to measure"
        )
    return pairs


def cut(old: Any, new: Any) -> Iterator[tuple[str, Pair]]:
    for start in range(0, old.size, TENSOR_ELEMENTS):
        yield (
            f"{start}",
            (old[start : start + TENSOR_ELEMENTS], new[start : start + TENSOR_ELEMENTS]),
        )


def show(found: Json) -> None:
    print(
        f"{found['elements']:,} elements in {found['tensors']} tensors, {found['changed']:.3%} "
        "changed "
        f"({found['made_by']}); entropy bound {found['entropy_bound']:.3f} bytes a change; "
        f"load average {found['load_before']:.1f} before, {found['load_after']:.1f} after"
    )
    print(
        f"\n{'':18}{'bytes/change':>14}{'encode GB/CPU s':>18}"
        f"{'apply GB/CPU s':>18}{'renew GB/CPU s':>18}"
    )
    for name in found["bytes_per_change"]:
        print(
            f"{name:18}{found['bytes_per_change'][name]:14.3f}"
            f"{found['encode_gb_per_cpu_s'].get(name, math.nan):18.2f}"
            f"{found['apply_gb_per_cpu_s'][name]:18.2f}"
            f"{found['renew_gb_per_cpu_s'][name]:18.2f}"
        )
    faster = found["two_threads"]
    print(
        f"\nscan alone {found['scan_gb_per_cpu_s']:.1f} GB per CPU s; memory is read at "
        f"{found['read_gb_per_s']:.1f} GB/s"
    )
    print(
        f"two threads: encode {faster['encode']:.2f} times, apply {faster['apply']:.2f} times as "
        "fast"
    )
    print(f"bit exact: {found['bit_exact']}")


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
        pairs, made_by = dict(cut(old, new)), f"a made-up step at learning rate {lr:.2g}"
    with tempfile.TemporaryDirectory(
        dir=MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None
    ) as folder:
        found = report(pairs, lambda: print(".", end="", flush=True, file=sys.stderr), Path(folder))
    print(file=sys.stderr)
    found |= {"made_by": made_by, "load_before": load_before, "load_after": os.getloadavg()[0]}
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)


def parse() -> argparse.Namespace:
    parser = command_line.parser(
        "codec", __doc__, "--elements 500000000 --changed 0.01 --seed 0 --json"
    )
    parser.add_argument(
        "--elements",
        type=int,
        default=500_000_000,
        help="made-up weights (default: 500000000: 2 GB)",
    )
    parser.add_argument(
        "--changed",
        type=float,
        default=0.01,
        help="share of them that a step changes (default: 0.01)",
    )
    parser.add_argument(
        "--train",
        type=float,
        metavar="LR",
        help="really train a model of 20 million weights, at this rate",
    )
    parser.add_argument("--old", metavar="FILE", help="safetensors file with weights of your own …")
    parser.add_argument(
        "--new", metavar="FILE", help="… and one with the same weights after a step"
    )
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: 0)")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    arguments = parser.parse_args()
    if bool(arguments.old) != bool(arguments.new):
        parser.error("--old and --new go together")
    if not 0 < arguments.changed < 1:
        parser.error(f"--changed {arguments.changed} is no share between 0 and 1")
    return arguments


if __name__ == "__main__":
    main()
