"""The processes of the ocean benchmark: the trainer at home, a worker and the mirror in the region.

`python -m benchmarks.ocean.services JSON` with `role`, `home`, `mirror` (store URLs) and `run`. It
responds to every line of JSON on its standard input with one on its output, and ends at the end of
its input. Times are those of the monotonic clock, which the network namespaces of a machine share.

A synthetic model has two states, before and after one step; version v is the state v mod 2, so that
every version differs from the one before in the same share of its elements. `plain` is the format
of AstraFlow's paper: 6 bytes a change in two objects.
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
from storage.coordination.heartbeat_writer import HeartbeatWriter
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
    def handle(self, message: Json) -> Json: ...


class Trainer:
    """Publishes versions from both states of the model in memory."""

    def __init__(self, spec: Json) -> None:
        self._home = open_store(spec["home"])
        before, after, _ = weight_steps.synthetic(spec["elements"], spec["changed"], spec["seed"])
        self._bits = before, after
        self._states = as_tensors(before), as_tensors(after)
        self._digests = [weights_digest(state) for state in self._states]
        self._num_changes = int(np.count_nonzero(before != after))
        self._bases: dict[str, LoadedWeights] = {}

    def handle(self, message: Json) -> Json:
        """Publish the next version of a run; the tensors are in memory before the time starts."""
        version, run = message["version"], self._home.sub(message["run"])
        tensors = self._states[version % 2]
        cpu_s, start_s = time.process_time(), time.monotonic()
        if message["format"] == "plain":
            _publish_plain(run, version, self._bits[(version - 1) % 2], self._bits[version % 2])
        else:
            base = self._bases.get(message["run"]) if message["format"] == "delta" else None
            manifest = publisher.publish(run, POLICY, version, tensors, base=base)
        published_s, cpu_s = time.monotonic(), time.process_time() - cpu_s
        if message["format"] != "plain":
            self._bases = {message["run"]: LoadedWeights(manifest, tensors)}
        times = {"start_s": start_s, "published_s": published_s, "cpu_s": cpu_s}
        return times | {
            "digest": self._digests[version % 2],
            "num_changes": self._num_changes,
            "peak_mb": peak_mb(),
        }


class VersionLoader:
    """Loads one run's versions as a rollout worker does, polling every `interval_s`."""

    def __init__(self, spec: Json) -> None:
        run = open_store(spec["home"]).sub(spec["run"])
        self._run = (
            read_through_mirror(run, replication.of_run(run, spec["mirror"]))
            if spec["mirror"]
            else run
        )
        self._interval_s = spec["interval_s"]
        self._loaded: LoadedWeights | None = None
        self._spare: LoadedWeights | None = None
        self._flat = np.zeros(0, dtype=np.uint16)

    def handle(self, message: Json) -> Json:
        """Poll until `version` exists, load it, return the times; `digest`: return the digest."""
        if message["do"] == "digest":
            tensors = self._loaded.tensors if self._loaded else as_tensors(self._flat)
            return {"digest": weights_digest(tensors), "peak_mb": peak_mb()}
        version, plain = message["version"], message["format"] == "plain"
        if plain and self._loaded:
            self._flat, self._loaded, self._spare = as_flat(self._loaded.tensors), None, None
        while True:
            polled_s = time.monotonic()
            newest = self._poll(version, plain)
            if newest:
                break
            time.sleep(self._interval_s)
        noticed_s, cpu_s = time.monotonic(), time.process_time()
        if isinstance(newest, Manifest):
            loaded = reader.read(
                self._run, POLICY, newest.version, self._loaded, manifest=newest, spare=self._spare
            )
            self._loaded, self._spare = loaded, self._loaded
        else:
            _read_plain(self._run, version, self._flat)
        return {
            "polled_s": polled_s,
            "noticed_s": noticed_s,
            "loaded_s": time.monotonic(),
            "cpu_s": time.process_time() - cpu_s,
        }

    def _poll(self, version: int, plain: bool) -> Manifest | bool:
        """Return the newest version, or False while `version` does not exist."""
        if plain:
            return self._run.exists(_plain(version, "complete"))
        current = self._loaded.manifest.version if self._loaded else -1
        return manifests.newer(self._run, POLICY, current) or False


class Mirror:
    """Replicates one run to the region's mirror."""

    def __init__(self, spec: Json) -> None:
        run = open_store(spec["home"]).sub(spec["run"])
        threading.Thread(
            target=self._keep, args=(run, replication.of_run(run, spec["mirror"])), daemon=True
        ).start()

    def handle(self, message: Json) -> Json:
        return {"cpu_s": time.process_time(), "peak_mb": peak_mb()}

    def _keep(self, run: ObjectStore, mirror: ObjectStore) -> None:
        with HeartbeatWriter(
            run, "mirror", "mirror", attempt=0, interval_s=BEAT_INTERVAL_S
        ) as heartbeat:
            lifetime = Lifetime(run, heartbeat, threading.Event(), why_over=lambda run: "")
            replication.replicate(lifetime, mirror, [POLICY])


def as_tensors(bits: Any) -> dict[str, HostTensor]:
    """Cut a flat model [elements] into named tensors with the shares of a small Qwen."""
    tensors: dict[str, HostTensor] = {}
    start = 0
    for name, size in sizes(len(bits)).items():
        tensors[name] = HostTensor("BF16", (size,), bits[start : start + size])
        start += size
    return tensors


def as_flat(tensors: Mapping[str, HostTensor]) -> Any:
    """Concatenate the tensors in new memory."""
    elements = sum(tensor.bits.size for tensor in tensors.values())
    return np.concatenate([tensors[name].bits for name in sizes(elements)])


def sizes(elements: int) -> dict[str, int]:
    """Return the elements of each tensor: embedding, LAYERS layers of seven matrices, the rest."""
    parts = {"embedding": int(EMBEDDING * elements)}
    layer = (elements - parts["embedding"]) // LAYERS
    parts |= {
        f"layers.{i:02d}.{name}": int(share * layer)
        for i in range(LAYERS)
        for name, share in MATRICES.items()
    }
    return parts | {"norm": elements - sum(parts.values())}


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
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(arguments: Sequence[str]) -> None:
    spec = json.loads(arguments[0])
    roles: dict[str, type[Trainer] | type[VersionLoader] | type[Mirror]] = {
        "trainer": Trainer,
        "worker": VersionLoader,
        "mirror": Mirror,
    }
    service: Service = roles[spec["role"]](spec)
    print(json.dumps({"ready": spec["role"]}), flush=True)
    messages = iter(sys.stdin.readline, "")
    for line in messages:
        print(json.dumps(service.handle(json.loads(line))), flush=True)
    os._exit(0)  # the replication thread does not end


if __name__ == "__main__":
    main(sys.argv[1:])
