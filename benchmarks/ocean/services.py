"""The processes of the ocean benchmark that use the store: the trainer at home, a worker and the
mirror in the region.

`python -m benchmarks.ocean.services JSON` with `role`, `home`, `mirror` (store URLs) and `run`.
Each answers every line of JSON on its standard input with one on its output, and ends with its
input. Times are those of the monotonic clock, which the network namespaces of a machine share.

A made-up model has two states, before and after one step; version v is the state v mod 2, so that
every version differs from the one before in the same share of its elements. `plain` is AstraFlow's
way: 6 bytes a change as two plain objects.
"""

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from benchmarks import weight_steps
from benchmarks.delta_formats import AstraFlowFormat
from storage.coordination.heartbeats import HeartbeatWriter
from storage.coordination.lifetime import Lifetime
from storage.formats.safetensors import weights_digest
from storage.records.types import Json
from storage.records.weights import HostTensor, Manifest
from storage.store.object_store import ObjectStore, open_store
from storage.weights import manifests, publisher, reader, replication
from storage.weights.manifests import LoadedWeights
from storage.weights.read_through import read_through_mirror

POLICY = "model"
LAYERS = 24
EMBEDDING = 0.275
"""Share of the elements in the embedding, as in Qwen2.5-0.5B."""
MATRICES = {
    "q": 0.054,
    "k": 0.008,
    "v": 0.008,
    "o": 0.054,
    "gate": 0.292,
    "up": 0.292,
    "down": 0.292,
}
"""Shares of a layer's elements."""
BEAT_INTERVAL_S = 2.0


class Service(Protocol):
    def handle(self, order: Json) -> Json: ...


class Trainer:
    """Publishes, from both states of the model in memory."""

    def __init__(self, spec: Json) -> None:
        self._home = open_store(spec["home"])
        before, after, _ = weight_steps.synthetic(spec["elements"], spec["changed"], spec["seed"])
        self._bits = before, after
        self._states = as_tensors(before), as_tensors(after)
        self._digests = [weights_digest(state) for state in self._states]
        self._num_changes = int(np.count_nonzero(before != after))
        self._bases: dict[str, LoadedWeights] = {}

    def handle(self, order: Json) -> Json:
        """Publish the next version of a run; the tensors are in hand when the clock starts."""
        version, run = order["version"], self._home.sub(order["run"])
        tensors = self._states[version % 2]
        cpu_s, start_s = time.process_time(), time.monotonic()
        if order["format"] == "plain":
            _publish_plain(run, version, self._bits[(version - 1) % 2], self._bits[version % 2])
        else:
            base = self._bases.get(order["run"]) if order["format"] == "delta" else None
            manifest = publisher.publish(run, POLICY, version, tensors, base=base)
        published_s, cpu_s = time.monotonic(), time.process_time() - cpu_s
        if order["format"] != "plain":
            self._bases = {order["run"]: LoadedWeights(manifest, tensors)}
        times = {"start_s": start_s, "published_s": published_s, "cpu_s": cpu_s}
        return times | {
            "digest": self._digests[version % 2],
            "num_changes": self._num_changes,
            "peak_mb": peak_mb(),
        }


class Worker:
    """Follows one run's versions as a rollout worker's refresher does, looking every
    `interval_s`.
    """

    def __init__(self, spec: Json) -> None:
        run = open_store(spec["home"]).sub(spec["run"])
        self._run = (
            read_through_mirror(run, replication.of_run(run, spec["mirror"]))
            if spec["mirror"]
            else run
        )
        self._interval_s = spec["interval_s"]
        self._held: LoadedWeights | None = None
        self._spare: LoadedWeights | None = None
        self._flat = np.zeros(0, dtype=np.uint16)

    def handle(self, order: Json) -> Json:
        """Look until `version` is there, read it, and tell when what happened; or, for `digest`,
        tell what is held.
        """
        if order["do"] == "digest":
            held = self._held.tensors if self._held else as_tensors(self._flat)
            return {"digest": weights_digest(held), "peak_mb": peak_mb()}
        version, plain = order["version"], order["format"] == "plain"
        if plain and self._held:
            self._flat, self._held, self._spare = as_flat(self._held.tensors), None, None
        while True:
            looked_s = time.monotonic()
            found = self._look(version, plain)
            if found:
                break
            time.sleep(self._interval_s)
        noticed_s, cpu_s = time.monotonic(), time.process_time()
        if isinstance(found, Manifest):
            read = reader.read(
                self._run, POLICY, found.version, self._held, manifest=found, spare=self._spare
            )
            self._held, self._spare = read, self._held
        else:
            _read_plain(self._run, version, self._flat)
        return {
            "looked_s": looked_s,
            "noticed_s": noticed_s,
            "held_s": time.monotonic(),
            "cpu_s": time.process_time() - cpu_s,
        }

    def _look(self, version: int, plain: bool) -> Manifest | bool:
        """What is new; nothing, as long as `version` is not there."""
        if plain:
            return self._run.exists(_plain(version, "complete"))
        return (
            manifests.newer(self._run, POLICY, self._held.manifest.version if self._held else -1)
            or False
        )


class Mirror:
    """Keeps the region's copy of one run."""

    def __init__(self, spec: Json) -> None:
        run = open_store(spec["home"]).sub(spec["run"])
        threading.Thread(
            target=self._keep, args=(run, replication.of_run(run, spec["mirror"])), daemon=True
        ).start()

    def handle(self, order: Json) -> Json:
        return {"cpu_s": time.process_time(), "peak_mb": peak_mb()}

    def _keep(self, run: ObjectStore, mirror: ObjectStore) -> None:
        with HeartbeatWriter(
            run, "mirror", "mirror", attempt=0, interval_s=BEAT_INTERVAL_S
        ) as pulse:
            lifetime = Lifetime(run, pulse, threading.Event(), why_over=lambda run: "")
            replication.replicate(lifetime, mirror, [POLICY])


def as_tensors(bits: Any) -> dict[str, HostTensor]:
    """A flat model [elements] as named tensors, cut as a small Qwen is; the last one takes what
    rounding leaves.
    """
    tensors: dict[str, HostTensor] = {}
    start = 0
    for name, size in sizes(len(bits)).items():
        tensors[name] = HostTensor("BF16", (size,), bits[start : start + size])
        start += size
    return tensors


def as_flat(tensors: Mapping[str, HostTensor]) -> Any:
    """The other way round, as new memory."""
    elements = sum(tensor.bits.size for tensor in tensors.values())
    return np.concatenate([tensors[name].bits for name in sizes(elements)])


def sizes(elements: int) -> dict[str, int]:
    """Elements of each tensor, in their order: an embedding, LAYERS layers of seven matrices, and
    the rest.
    """
    found = {"embedding": int(EMBEDDING * elements)}
    layer = (elements - found["embedding"]) // LAYERS
    found |= {
        f"layers.{i:02d}.{name}": int(share * layer)
        for i in range(LAYERS)
        for name, share in MATRICES.items()
    }
    return found | {"norm": elements - sum(found.values())}


def _publish_plain(run: ObjectStore, version: int, old: Any, new: Any) -> None:
    parts = AstraFlowFormat().encode(old, new)
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(run.put, (_plain(version, name) for name in ("indices", "values")), parts))
    run.create(_plain(version, "complete"), b"{}")


def _read_plain(run: ObjectStore, version: int, bits: Any) -> None:
    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(run.get, (_plain(version, name) for name in ("indices", "values"))))
    AstraFlowFormat().apply(bits, parts)


def _plain(version: int, name: str) -> str:
    return f"plain/{version:08d}/{name}"


def peak_mb() -> float:
    """The most memory this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(arguments: Sequence[str]) -> None:
    spec = json.loads(arguments[0])
    roles: dict[str, type[Trainer] | type[Worker] | type[Mirror]] = {
        "trainer": Trainer,
        "worker": Worker,
        "mirror": Mirror,
    }
    service: Service = roles[spec["role"]](spec)
    print(json.dumps({"ready": spec["role"]}), flush=True)
    orders = iter(sys.stdin.readline, "")
    for line in orders:
        print(json.dumps(service.handle(json.loads(line))), flush=True)
    os._exit(0)  # the mirroring thread has no end of its own


if __name__ == "__main__":
    main(sys.argv[1:])
