"""A policy's metrics over its steps, from the run's manifests and batches. For reports and MLflow.

manifest of version n  (`trainer/…`)  ┐
batch n                (`dataflow/…`) ┴─▶ CurvePoint n ─▶ History: one array per metric
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from storage.errors import UNREADABLE, NotFoundError
from storage.records.batches import Batch
from storage.run import batches, fates
from storage.run.fates import BatchFates
from storage.store.object_store import ObjectStore
from storage.weights import manifests

K = TypeVar("K")

STEPS_READ_MAX = 2000
"""Steps that one history reads; a longer run is sampled evenly."""
READERS = 8
"""Objects read at once."""


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """Metrics of one training step. Number 0 is the base model."""

    number: int
    created_s: float
    """Unix time at which its weights were published; the batch's time while they are not."""
    metrics: Mapping[str, float]
    """`trainer/…` of the manifest and `dataflow/…` of the batch."""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Versions behind → sequences of the batch."""
    fates: BatchFates | None = None
    """Counts of the ledger of the batch; None without a readable batch."""
    is_complete: bool = False
    """Whether both objects of the step were read."""


@dataclass(frozen=True, eq=False)
class History:
    """One policy's steps in order, S of them."""

    policy: str
    steps: tuple[CurvePoint, ...]
    num_steps: int
    """Steps of the run; more than S when they were sampled."""

    @property
    def numbers(self) -> list[int]:
        """[S]"""
        return [step.number for step in self.steps]

    def series(self, name: str) -> NDArray[np.float64]:
        """[S] values of one metric, NaN where a step lacks it."""
        return np.array([step.metrics.get(name, np.nan) for step in self.steps], dtype=np.float64)

    def has(self, name: str) -> bool:
        return any(name in step.metrics for step in self.steps)

    def staleness(self) -> Counter[int]:
        """Versions behind → sequences, over all steps."""
        return _summed(step.staleness for step in self.steps)


def read_history(
    run: ObjectStore,
    policy: str,
    newest: int,
    steps_max: int = STEPS_READ_MAX,
    known: Mapping[int, CurvePoint] | None = None,
) -> History:
    """Read steps 0 to `newest`; of more than `steps_max`, an even sample with both ends.

    Complete steps of `known`, an earlier reading, are not read again: they never change.
    """
    complete = {number: step for number, step in (known or {}).items() if step.is_complete}

    def read(number: int) -> CurvePoint | None:
        return complete.get(number) or read_step(run, policy, number)

    numbers = sample(newest + 1, steps_max)
    with ThreadPoolExecutor(READERS, thread_name_prefix="history") as pool:
        steps = list(pool.map(read, numbers))
    return History(policy, tuple(step for step in steps if step is not None), newest + 1)


def read_steps(run: ObjectStore, policy: str, numbers: Sequence[int]) -> list[CurvePoint]:
    """Read the published steps among `numbers`, up to the first that is not published yet."""
    points = []
    for number in numbers:
        if not manifests.exists(run, policy, number):
            break
        step = read_step(run, policy, number)
        points.append(step or CurvePoint(number=number, created_s=0.0, metrics={}))
    return points


def read_step(run: ObjectStore, policy: str, number: int) -> CurvePoint | None:
    """Read one step from those of its objects that can be read (`verify` reports the others); None
    when none can.
    """
    of_batch: CurvePoint | None = None
    if number > 0:
        with suppress(NotFoundError, *UNREADABLE):
            of_batch = _of_batch(batches.read(run, policy, number))
    try:
        manifest = manifests.read_manifest(run, policy, number)
    except (NotFoundError, *UNREADABLE):
        return of_batch
    point = of_batch or CurvePoint(number=number, created_s=0.0, metrics={})
    return replace(
        point,
        created_s=manifest.created_s,
        metrics={**point.metrics, **manifest.metrics},
        is_complete=of_batch is not None or number == 0,
    )


def sample(count: int, limit: int) -> list[int]:
    """Return at most `limit` of the numbers below `count`, evenly spread, with both ends. Example:
    (10, 4) → [0, 3, 6, 9].
    """
    if count <= limit:
        return list(range(count))
    return sorted({round(index * (count - 1) / (limit - 1)) for index in range(limit)})


def _of_batch(batch: Batch) -> CurvePoint:
    staleness = Counter(batch.step - 1 - row.min_version for row in batch.rows if not row.replay)
    return CurvePoint(
        number=batch.step,
        created_s=batch.created_s,
        metrics=batch.metrics,
        staleness=staleness,
        fates=fates.of_batch(batch),
    )


def _summed(counts: Iterable[Mapping[K, int]]) -> Counter[K]:
    total: Counter[K] = Counter()
    for each in counts:
        total.update(each)
    return total
