"""The members of a run, and what the supervisor does about each. Pure data and one pure function
without Prefect, so that every case can be tested as a table.

    member  ─ is its work done? (store)                ┐
            ─ state of its newest flow run (Prefect)   ├─▶ decide ─▶ launch | lost | retire | keep
            ─ time since its heartbeat changed (store) │
            ─ does its process work? (this machine)    ┘
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from storage.run import checkpoints, evaluations, orders
from storage.store.object_store import ObjectStore
from storage.weights import manifests
from tasks.recipes.run_config import RunConfig

Kind = Literal[
    "base_model", "dataflow", "rollout", "trainer", "trainer_node", "evaluation", "mirror"
]


@dataclass(frozen=True, kw_only=True)
class Member:
    """One service of a run. Example: `Member(id="trainer-solver", kind="trainer",
    deployment="train/trainer", parameters={"policy": "solver"})`.
    """

    id: str
    """Stable over restarts; names its heartbeat and its flow runs' tag."""
    kind: Kind
    deployment: str
    """The Prefect deployment that starts it."""
    parameters: Mapping[str, Any]
    """Parameters of its flow, beside run id, member id and attempt."""
    queue: str = ""
    """Work queue into which it is launched; empty: the deployment's default."""


def members_of(config: RunConfig) -> tuple[Member, ...]:
    """Return every service that the run needs, in the order in which they are launched."""
    rollout = [
        Member(
            id=f"rollout-{region}-{index}",
            kind="rollout",
            deployment=spec.deployment or "rollout/worker",
            parameters={"region": region},
            queue="" if spec.deployment else region,
        )
        for region, spec in config.rollout.regions.items()
        for index in range(spec.workers)
    ]
    trainers = [
        Member(
            id=f"trainer-{policy}",
            kind="trainer",
            deployment="train/trainer",
            parameters={"policy": policy},
        )
        for policy in config.policies
    ]
    nodes = [
        Member(
            id=f"trainer-{policy}-node-{node}",
            kind="trainer_node",
            deployment="train-node/trainer-node",
            parameters={"policy": policy, "node": node},
        )
        for policy, spec in config.policies.items()
        for node in range(1, spec.train.nodes)
    ]
    mirrors = [
        Member(
            id=f"mirror-{region}",
            kind="mirror",
            deployment="mirror/mirror",
            parameters={"region": region},
            queue=region,
        )
        for region, spec in config.rollout.regions.items()
        if spec.mirror
    ]
    evaluation = (
        [
            Member(
                id="evaluation", kind="evaluation", deployment="evaluate/evaluation", parameters={}
            )
        ]
        if config.evaluation
        else []
    )
    return (
        Member(id="base-model", kind="base_model", deployment="prepare/base-model", parameters={}),
        Member(id="dataflow", kind="dataflow", deployment="dataflow/dataflow", parameters={}),
        *trainers,
        *nodes,
        *mirrors,
        *rollout,
        *evaluation,
    )


def is_done(run: ObjectStore, config: RunConfig, member: Member) -> bool:
    """Whether the member's work is complete, judged only by the objects that it has to write."""
    match member.kind:
        case "base_model":
            return all(manifests.exists(run, policy, 0) for policy in config.policies)
        case "trainer" | "trainer_node":
            # The last checkpoint, which another run may continue, is stored after the last version.
            return checkpoints.exists(run, member.parameters["policy"], config.steps)
        case "dataflow" | "rollout":
            return orders.has_ended(run)
        case "mirror":
            # It may copy the rest within the time to stop: a slow mirror does not delay the run.
            return all(manifests.exists(run, policy, config.steps) for policy in config.policies)
        case "evaluation":
            return evaluations.exists(run, dict.fromkeys(config.policies, config.steps))


class FlowRunPhase(Enum):
    """Prefect's view of a member's newest flow run, as coarse as the decision needs it."""

    NONE = "none"
    SCHEDULED = "scheduled"
    """No worker has it yet."""
    PENDING = "pending"
    """A worker is starting its process."""
    RUNNING = "running"
    ENDED = "ended"


SLOW_FACTOR = 10
"""Largest factor on the limits of a silent member, and that of one whose process works: on a
machine with ten times the work that it has cores for, everything takes ten times as long.
"""


class Decision(Enum):
    LAUNCH = "launch"
    LOST = "lost"
    """Declare the flow run crashed and launch the next attempt."""
    RETIRE = "retire"
    """Its work is done but its flow run goes on: cancel it."""
    KEEP = "keep"


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A member's state at one poll."""

    done: bool
    phase: FlowRunPhase
    since_launch_s: float
    """Since a worker took the newest attempt (or since this supervisor first saw it)."""
    silent_s: float | None
    """Since the attempt's heartbeat last changed, on the supervisor's clock; None before its first
    beat.
    """
    since_done_s: float = 0.0
    works: bool = False
    """Its process was found on this machine and used CPU time lately."""
    failures: int = 0
    """Attempts in a row that ended soon. Each after the first doubles the time that the next one
    may be silent: on another machine, whose load is not known, it may be slow.
    """


def decide(
    seen: Seen, *, launch_timeout_s: float, heartbeat_limit_s: float, stop_timeout_s: float
) -> Decision:
    """Decide about a member: by its finished work, else Prefect's state, else its heartbeat."""
    slowness = SLOW_FACTOR if seen.works else 1
    if seen.done:
        active = seen.phase in (FlowRunPhase.SCHEDULED, FlowRunPhase.PENDING, FlowRunPhase.RUNNING)
        return (
            Decision.RETIRE
            if active and seen.since_done_s > slowness * stop_timeout_s
            else Decision.KEEP
        )
    if seen.phase in (FlowRunPhase.NONE, FlowRunPhase.ENDED):
        return Decision.LAUNCH
    if seen.phase is FlowRunPhase.SCHEDULED:
        return Decision.KEEP  # another flow run would wait for the same worker
    slowness = max(slowness, min(2 ** max(seen.failures - 1, 0), SLOW_FACTOR))
    if seen.silent_s is None:
        return Decision.LOST if seen.since_launch_s > slowness * launch_timeout_s else Decision.KEEP
    return Decision.LOST if seen.silent_s > slowness * heartbeat_limit_s else Decision.KEEP
