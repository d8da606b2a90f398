"""Compare the delta codec with the formats of two papers: size, CPU time, exactness on equal bits.

    ours               the project's codec
    astraflow_format   u32 index and u16 value of every changed element
    pulse_format       index deltas within rows, raw values, zstd and SHA-256
    astraflow_worker   the update of AstraFlow's rollout worker with the bytes of its format

The two formats are implemented in NumPy in the cheapest way (benchmarks/delta_formats.py). The
worker reads a file, sorts the indices and scatters two bytes a change into the model's mapped
safetensors file; its extra process, and the engine's reload of the file, are not counted. The
entropy bound is that of a code that does not use the weights: positions of independent changes plus
the distribution of the bit deltas. All run on one thread, tensor by tensor, the worker over the
whole model; `ours` runs again on two threads.

Times are CPU seconds (process time of all threads); GB are those of the model in bf16. `apply`
changes the old bits in place without a check. `renew` is the work of a rollout worker, which
generates with the old weights meanwhile: the new weights are written to other memory, used before,
and digested. `scan` is the codec's first loop alone. `read_gb_per_s` is the machine's memory
bandwidth on one thread: `scan` reads old and new bits, so it reaches half of it at most.
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
"""Size of a synthetic tensor: 134 MB of bf16, the embedding of a mid-sized model."""
MEMORY_FOLDER = Path("/dev/shm")
"""Folder in memory, as AstraFlow's worker uses for the model."""
Pair = tuple[Any, Any]


class Ours:
    """The project's codec with the interface of the other formats."""

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
            deltas.apply(base, memoryview(blob), into=into.bits, tell=digest.update)
            return str(digest)

        with ThreadPoolExecutor(self.threads) as pool:
            return list(pool.map(renew, self._cut(old).values(), self._cut(new).values(), blobs))

    def _cut(self, bits: Any) -> dict[str, HostTensor]:
        """Cut the bits into a tensor for each thread; tensors are processed in parallel."""
        return {
            str(number): HostTensor("BF16", part.shape, part)
            for number, part in enumerate(np.array_split(bits, self.threads))
        }


def renew_in_turn(format: Any, old: Any, new: Any, blobs: list[bytes]) -> list[str]:
    """Copy, apply and digest: `renew` for a format that does not have one."""
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
    """Measure a format over all tensors; copying the old bits is not counted."""
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
    """Measure AstraFlow's worker, which updates the whole model in its file and does not encode."""
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
    """Measure all formats, after a warm-up of the compiled loops; `folder` is in memory."""
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
    single, double = found["ours"], found["ours_2_threads"]
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
        "two_threads": {
            "encode": single.encode_s / double.encode_s,
            "apply": single.apply_s / double.apply_s,
        },
        "bit_exact": all(each.bit_exact for each in found.values()),
    }


def entropy_bound(pairs: Mapping[str, Pair], num_changes: int, elements: int) -> float:
    """Return bytes per change: (H(changed) · elements + H(bit deltas) · changes) / changes / 8."""
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
    """Return GB read per CPU second on one thread, the best of three passes over 512 MB."""
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
    """Load the 16-bit tensors of equal name and shape in two safetensors files, flattened."""
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
        sys.exit(f"{old} and {new} have no 16-bit tensor of equal shape and other bits to measure")
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
        f"changed ({found['made_by']}); entropy bound {found['entropy_bound']:.3f} bytes a change; "
        f"load average {found['load_before']:.1f} before, {found['load_after']:.1f} after"
    )
    rates = ("encode", "apply", "renew")
    columns = "".join(f"{f'{rate} GB/CPU s':>18}" for rate in rates)
    print(f"\n{'':18}{'bytes/change':>14}{columns}")
    for name, num_bytes in found["bytes_per_change"].items():
        columns = "".join(f"{found[f'{r}_gb_per_cpu_s'].get(name, math.nan):18.2f}" for r in rates)
        print(f"{name:18}{num_bytes:14.3f}{columns}")
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
            f"a trained step of AdamW at learning rate {arguments.train:g}",
        )
    else:
        old, new, lr = weight_steps.synthetic(arguments.elements, arguments.changed, arguments.seed)
        pairs, made_by = dict(cut(old, new)), f"a synthetic step at learning rate {lr:.2g}"
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
        help="number of synthetic weights (default: 500000000, 1 GB)",
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
        help="train a model of 20 million weights at this learning rate instead",
    )
    parser.add_argument("--old", metavar="FILE", help="safetensors file with your weights")
    parser.add_argument(
        "--new", metavar="FILE", help="safetensors file with the same weights after a step"
    )
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
