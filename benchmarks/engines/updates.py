"""A stream of new versions, from a trainer to the first token that each of them samples.

    process of its own: publish ──▶ store (a folder) ──▶ WeightSync ──▶ engine.load ──▶ first token

Versions are published and read by the code of trainers and workers. Two states of the weights,
which differ in a share of their elements, take turns: odd versions have one of them, even versions
the other.

    load          from the end of the publication until the version samples: notice it (the worker
                  polls every POLL_S), read and verify it, load it
    first token   from the end of the publication until the answer to a request of one token, asked
                  when the version samples; a slot of the engine is free for it
"""

import asyncio
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from benchmarks.engines.shapes import changed, random_weights
from rollout.config import RolloutConfig
from rollout.engines.engine import Engine, SamplingParams
from rollout.service.weight_loader import WeightLoader
from rollout.service.weight_sync import WeightSync
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.records.weights import HostTensor
from storage.store.object_store import ObjectStore, open_store
from storage.weights import publisher
from storage.weights.manifests import LoadedWeights

T = TypeVar("T")
POLICY = "model"
ANCHOR_EVERY = 20
POLL_S = RolloutConfig().refresh_interval_s


@dataclass(frozen=True)
class Published:
    """A version; seconds of the monotonic clock, which the processes of a machine share."""

    version: int
    started_s: float
    ended_s: float


class _Publisher:
    """In the publishing process: both states, and the version that was published last."""

    def __init__(
        self, folder: str, shapes: Mapping[str, tuple[int, ...]], share: float, seed: int
    ) -> None:
        self._run = open_store(folder)
        before = random_weights(shapes, seed)
        self._states: list[Mapping[str, HostTensor]] = [before, changed(before, share, seed)]
        self._base: LoadedWeights | None = None

    def publish(self) -> Published:
        version = self._base.manifest.version + 1 if self._base else 0
        tensors, started_s = self._states[version % 2], time.monotonic()
        manifest = publisher.publish(
            self._run,
            POLICY,
            version,
            tensors,
            base=self._base,
            anchor=version % ANCHOR_EVERY == 0,
        )
        self._base = LoadedWeights(manifest, tensors)
        return Published(version, started_s, time.monotonic())


_publisher: _Publisher


def _start(folder: str, shapes: Mapping[str, tuple[int, ...]], share: float, seed: int) -> None:
    global _publisher
    _publisher = _Publisher(folder, shapes, share, seed)


def _publish() -> Published:
    return _publisher.publish()


class VersionStream:
    """The versions of one store, published by a process of its own."""

    def __init__(self, folder: Path, pool: ProcessPoolExecutor) -> None:
        self.run: ObjectStore = open_store(str(folder))
        self._pool = pool
        self.pids: frozenset[int] = frozenset()
        """Of the publishing process, which an engine's CPU time does not include."""

    async def publish(self) -> Published:
        """Publish the next version; version 0 is the first."""
        loop = asyncio.get_running_loop()
        published = await loop.run_in_executor(self._pool, _publish)
        self.pids = frozenset(
            each.pid for each in multiprocessing.active_children() if each.pid is not None
        )
        return published


@contextmanager
def versions(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], share: float, seed: int
) -> Iterator[VersionStream]:
    """Start the publishing process of a store in `folder`; end it with the block."""
    arguments = str(folder), shapes, share, seed
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawned, _start, arguments) as pool:
        yield VersionStream(folder, pool)


@dataclass
class UpdateTimes:
    """Seconds of each version that was loaded while the stream ran."""

    publish_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)


def reader_of(stream: VersionStream, engine: Engine) -> WeightSync:
    """Return what keeps a worker's engine at the newest version."""
    heartbeat = HeartbeatWriter(stream.run, "rollout", "benchmark", 0, interval_s=60.0)
    return WeightSync(stream.run, POLICY, WeightLoader(engine), POLL_S, heartbeat)


async def during_updates(
    work: Callable[[], Awaitable[T]],
    stream: VersionStream,
    reader: WeightSync,
    engine: Engine,
    interval_s: float,
) -> tuple[T, UpdateTimes]:
    """Return the result of `work`, and the times of the versions that were loaded meanwhile.

    A version is published `interval_s` after the one before; the stream ends when the work has
    ended and a version was loaded.
    """
    published: dict[int, Published] = {}
    loaded: dict[int, tuple[float, float]] = {}
    first, ended = asyncio.Event(), asyncio.Event()

    async def publish() -> None:
        while not ended.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), interval_s)
            if not ended.is_set():
                each = await stream.publish()
                published[each.version] = each

    async def follow() -> None:
        while not ended.is_set():
            if await reader.refresh():
                version, loaded_s = engine.version, time.monotonic()
                answer = await engine.generate([1], SamplingParams(max_new_tokens=1))
                assert answer.spans[0].version >= version
                loaded[version] = loaded_s, time.monotonic()
                first.set()
            await asyncio.sleep(POLL_S)

    async with asyncio.TaskGroup() as group:
        group.create_task(publish())
        group.create_task(follow())
        result = await work()
        await first.wait()
        ended.set()
    times = UpdateTimes()
    for version in sorted(loaded.keys() & published.keys()):
        each, (loaded_s, first_token_s) = published[version], loaded[version]
        times.publish_s.append(each.ended_s - each.started_s)
        times.load_s.append(loaded_s - each.ended_s)
        times.first_token_s.append(first_token_s - each.ended_s)
    return result, times
