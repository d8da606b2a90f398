"""Small complete records for tests: each argument has a default, so that a test sets only the
values it is about.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Many

import numpy as np

from storage import layout
from storage.coordination import heartbeats
from storage.records.batches import Batch, BatchRow, Fate, LedgerEntry, SequenceKey
from storage.records.control import Heartbeat, ServiceState, WaitReason
from storage.records.machine_use import MachineUse
from storage.records.progress import PROGRESS_OF, Progress, ServiceKind
from storage.records.rollouts import (
    NOT_SAMPLED,
    Episode,
    FailureKind,
    Group,
    Prompt,
    Sequence,
    Shard,
)
from storage.records.weights import HostTensor
from storage.run import checkpoints
from storage.run.checkpoints import CheckpointState
from storage.store.object_store import ObjectStore
from storage.weights import manifests, replication

FIRST = SequenceKey(0, 0, 0, 0)


def sequence(
    prompt: Many[int] = (11, 12),
    answer: Many[int] = (40, 41, 2),
    *,
    policy: str = "solver",
    policies: tuple[str, ...] = ("solver", "verifier"),
    version: int = 0,
    logprob: float = -0.5,
    reward: float = 1.0,
    starts_episode: bool = True,
    name: str = "attempt",
) -> Sequence:
    """Prompt tokens without a policy, and an answer that `policy` sampled at `version`, each token
    with `logprob`.
    """
    p, a = len(prompt), len(answer)
    return Sequence(
        tokens=np.array([*prompt, *answer], dtype=np.int32),
        loss_mask=np.array([False] * p + [True] * a),
        logprobs=np.array([0.0] * p + [logprob] * a, dtype=np.float32),
        owners=np.array([NOT_SAMPLED] * p + [policies.index(policy)] * a, dtype=np.int8),
        versions=np.array([NOT_SAMPLED] * p + [version] * a, dtype=np.int32),
        policies=policies,
        reward=reward,
        starts_episode=starts_episode,
        name=name,
    )


def episode(
    *sequences: Sequence,
    reward: float = 1.0,
    error: str | None = None,
    failure_kind: FailureKind | None = None,
    **metrics: float,
) -> Episode:
    """An episode of `sequences` (one default sequence when there is neither a sequence nor an
    error).
    """
    own = sequences or (() if error else (sequence(reward=reward),))
    return Episode(
        sequences=own,
        reward=reward,
        metrics=metrics,
        error=error,
        failure_kind=failure_kind,
        seconds=0.25,
    )


def group(*episodes: Episode, prompt_id: str = "chained_addition/train/17") -> Group:
    """The episodes of one prompt (two by default: one right, one wrong)."""
    prompt = Prompt(prompt_id, {"question": "7+8-3=?", "answer": "12"})
    return Group(prompt, episodes or (episode(reward=1.0), episode(reward=0.0)))


def shard(
    *groups: Group, order: int = 0, weights: dict[str, dict[int, str]] | None = None
) -> Shard:
    """The shard of one order, by default one group of two episodes."""
    return Shard(
        order=order,
        attempt=0,
        worker="rollout-us-east-0",
        region="us-east",
        groups=groups or (group(),),
        weights={"solver": {0: "sha256:00"}} if weights is None else weights,
        started_s=1700000000.0,
        finished_s=1700000001.5,
    )


def row(
    key: SequenceKey = FIRST,
    *,
    prompt: Many[int] = (11, 12),
    answer: Many[int] = (40, 41, 2),
    version: int = 0,
    logprob: float = -0.5,
    advantage: float = 1.0,
    reward: float = 1.0,
    replay: bool = False,
) -> BatchRow:
    """A sequence of a batch: prompt tokens have no values, answer tokens all the same ones."""
    p, a = len(prompt), len(answer)
    return BatchRow(
        key=key,
        prompt_id="chained_addition/train/17",
        tokens=np.array([*prompt, *answer], dtype=np.int32),
        loss_mask=np.array([False] * p + [True] * a),
        logprobs=np.array([0.0] * p + [logprob] * a, dtype=np.float32),
        versions=np.array([NOT_SAMPLED] * p + [version] * a, dtype=np.int32),
        advantages=np.array([0.0] * p + [advantage] * a, dtype=np.float32),
        reward=reward,
        temperature=1.0,
        min_version=version,
        replay=replay,
    )


def entry(key: SequenceKey, fate: Fate = "filtered", reason: str = "zero_advantage") -> LedgerEntry:
    return LedgerEntry(key, fate, reason)


def batch(
    *rows: BatchRow,
    policy: str = "solver",
    step: int = 1,
    ledger: tuple[LedgerEntry, ...] = (),
    waiting: tuple[SequenceKey, ...] = (),
    shards: tuple[int, ...] = (0,),
    closed_below: int = 1,
    closed: tuple[int, ...] = (),
    metrics: dict[str, float] | None = None,
) -> Batch:
    """The batch of `policy` for `step`, by default one row."""
    return Batch(
        policy=policy,
        step=step,
        rows=rows or (row(),),
        ledger=ledger,
        waiting=waiting,
        shards=shards,
        closed_below=closed_below,
        closed=closed,
        metrics=metrics or {},
        created_s=1700000000.0,
    )


def tensors(value: int = 0) -> dict[str, HostTensor]:
    """Two small tensors of different dtypes whose bits depend on `value`."""
    return {
        "model.weight": HostTensor(
            "BF16", (2, 3), (np.arange(6, dtype=np.uint16) + value).reshape(2, 3)
        ),
        "model.scale": HostTensor("F32", (), np.array(value, dtype=np.uint32)),
    }


def checkpoint(run: ObjectStore, policy: str, step: int) -> None:
    """Store the checkpoint of a step."""
    checkpoints.save(run, policy, step, tensors(step), CheckpointState({}, 0.0))


def heartbeat(
    kind: ServiceKind,
    id: str,
    *,
    attempt: int = 0,
    beats: int = 1,
    beat_s: float = 1.0,
    started_s: float = 1.0,
    pid: int = 1,
    host: str = "here",
    state: str = ServiceState.WORKING,
    wait_reason: WaitReason = WaitReason.NONE,
    region: str = "",
    alive_s: float = 0.0,
    seconds: Mapping[str, float] | None = None,
    versions: Mapping[str, int] | None = None,
    note: str = "",
    progress: Progress | None = None,
    machine: MachineUse | None = None,
) -> Heartbeat:
    return Heartbeat(
        kind=kind,
        id=id,
        attempt=attempt,
        beats=beats,
        beat_s=beat_s,
        started_s=started_s,
        pid=pid,
        host=host,
        state=state,
        wait_reason=wait_reason,
        region=region,
        alive_s=alive_s,
        seconds=seconds or {},
        versions=versions or {},
        note=note,
        progress=progress or PROGRESS_OF[kind](),
        machine=machine,
    )


def put_heartbeat(run: ObjectStore, heartbeat: Heartbeat) -> None:
    run.put(layout.heartbeat(heartbeat.kind, heartbeat.id), heartbeats.encode(heartbeat))


def mirror_next(
    home: ObjectStore, mirror: ObjectStore, policy: str = "solver"
) -> replication.CopiedVersion | None:
    """Copy the first version that the mirror does not have."""
    newest = manifests.latest(mirror, policy)
    return replication.copy_version(home, mirror, policy, 0 if newest is None else newest + 1)
