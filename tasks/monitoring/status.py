"""Status of a run, read from its stored objects alone, for `astraflow status` and `astraflow runs`.

Cheap enough for a poll every second of a run with 10,000 steps: the search for the newest version
starts at the trainer's heartbeat, and only the newest batch of a policy is read, once. The fields
are described in `status_schema.py`; whole curves are read by `training_curves.py`.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping

from storage import layout
from storage.coordination import heartbeats
from storage.errors import UNREADABLE, AstraFlowError
from storage.records.control import ClosingStep, Heartbeat, Stop
from storage.records.progress import (
    MirrorProgress,
    RolloutProgress,
    SupervisorProgress,
    TrainerProgress,
)
from storage.run import evaluations, orders, shards
from storage.run import runs as stored_runs
from storage.run.runs import RunRecord
from storage.store.object_store import ObjectStore
from storage.weights import tags
from tasks.monitoring import newest_objects
from tasks.monitoring.budget_status import read_budget
from tasks.monitoring.newest_objects import Newest
from tasks.monitoring.status_schema import (
    SILENT,
    Closing,
    EvalStatus,
    MemberStatus,
    OriginStatus,
    PolicyStatus,
    RegionStatus,
    RunSummary,
    State,
    Status,
)
from tasks.recipes.run_config import RunConfig
from tasks.recipes.stored_config import config_of

__all__ = [  # readers of a status need its types too
    "Closing",
    "EvalStatus",
    "MemberStatus",
    "PolicyStatus",
    "RegionStatus",
    "RunSummary",
    "State",
    "Status",
    "region_rates",
    "runs",
    "status",
    "status_of",
]

REASONS_MAX = 3
"""Objects of one kind that are named with the reason why they cannot be read."""
SHOWN_MAX = 1e15
"""A measurement beyond it, or one that is not finite, is not shown."""


def status(store: ObjectStore, run_id: str, now_s: float | None = None) -> Status:
    """Read the status of a run at `now_s` (Unix time, default: now).

    Raises:
        ConfigError: there is no such run.
    """
    return status_of(stored_runs.open_run(store, run_id), now_s)


def status_of(run: ObjectStore, now_s: float | None = None) -> Status:
    """Read the status of the run in this sub-store, as `status` does."""
    record = stored_runs.read_run(run)
    config = config_of(record.config, run)
    problems: list[str] = []
    beats, stop = _beats(run, problems), _stop(run, problems)
    now = time.time() if now_s is None else now_s
    limit_s = config.supervise.heartbeat_limit_s
    newest = {
        policy: newest_objects.find(run, policy, _hint(policy, beats), problems)
        for policy in config.policies
    }
    has_begun = any(each.batches for each in newest.values()) or shards.exists(run, 0)
    state = _state(stop, beats, record.created_s, now, limit_s, has_begun)
    played, tagged = evaluations.read_all(run), tags.read_all(run)
    problems += _unreadable("evaluation", played.unreadable) + _unreadable("tag", tagged.unreadable)
    scores = [
        EvalStatus(versions=dict(each.versions), dataset=each.dataset, **vars(score))
        for each in played.readable
        for score in evaluations.scores(each)
    ]
    return Status(
        run_id=record.run_id,
        state=state,
        reason=_reason(state, stop, beats),
        closing=_closing(stop, beats, now, limit_s),
        deployment=record.deployment,
        started=record.created_s,
        elapsed_s=max(0.0, _end_s(state, stop, beats, now) - record.created_s),
        steps=config.steps,
        origins=_origins(record),
        policies={
            name: _policy(each, config.steps, _beat(beats, f"trainer-{name}"))
            for name, each in newest.items()
        },
        regions={name: _region(name, beats, now, limit_s) for name in _regions(config, beats)},
        evals=scores,
        budget=read_budget(run, problems),
        members=[_member(beat, now, limit_s) for beat in beats],
        counts={
            "orders": orders.next_number(
                run, max((each.closed_below for each in newest.values()), default=0)
            ),
            "orders_done": max((each.orders_done for each in newest.values()), default=0),
            "evaluations": len({layout.evaluation(score.versions) for score in scores}),
        },
        problems=problems,
    )


def runs(store: ObjectStore, now_s: float | None = None) -> list[RunSummary]:
    """Read a summary of every run: first those that are unreadable, then the others by age."""
    now = time.time() if now_s is None else now_s
    seen = stored_runs.read_all(store)
    unreadable = dict(seen.unreadable)
    summaries: list[RunSummary] = []
    for run_id in seen.ids:
        try:
            summaries.append(_summary(store, run_id, now))
        except AstraFlowError as error:
            unreadable[run_id] = stored_runs.fault_of_one(store, error)
    return [_unreadable_run(run_id, why) for run_id, why in sorted(unreadable.items())] + summaries


def region_rates(beats: Iterable[Heartbeat], now_s: float, limit_s: float) -> dict[str, float]:
    """Add up the sampled tokens per second of every region over its workers' fresh heartbeats."""
    rates: dict[str, float] = {}
    for beat in beats:
        if isinstance(beat.progress, RolloutProgress):
            rate = beat.progress.tokens_per_s if is_alive(beat, now_s, limit_s) else 0.0
            rates[beat.region] = rates.get(beat.region, 0.0) + rate
    return rates


def _summary(store: ObjectStore, run_id: str, now_s: float) -> RunSummary:
    run = store.sub(layout.run_prefix(run_id))
    record = stored_runs.read_run(run)
    problems: list[str] = []
    stop, beats = _stop(run, problems), _beats(run, problems)
    config = config_of(record.config, run)
    versions = {
        policy: newest_objects.version(run, policy, _hint(policy, beats))
        for policy in config.policies
    }
    has_begun = any(versions.values()) or shards.exists(run, 0)
    limit_s = config.supervise.heartbeat_limit_s
    state = _state(stop, beats, record.created_s, now_s, limit_s, has_begun)
    return RunSummary(
        run_id=run_id,
        state=state,
        reason=_reason(state, stop, beats),
        deployment=record.deployment,
        started=record.created_s,
        elapsed_s=max(0.0, _end_s(state, stop, beats, now_s) - record.created_s),
        steps=config.steps,
        versions=versions,
        origins=_origins(record),
        problems=problems,
    )


def _origins(record: RunRecord) -> dict[str, OriginStatus]:
    return {
        policy: OriginStatus(run=origin.run, policy=origin.policy, version=origin.version)
        for policy, origin in record.origins.items()
    }


def _unreadable_run(run_id: str, why: str) -> RunSummary:
    return RunSummary(
        run_id=run_id,
        state="unreadable",
        reason=why,
        deployment="",
        started=None,
        elapsed_s=None,
        steps=None,
        versions={},
    )


def _stop(run: ObjectStore, problems: list[str]) -> Stop | None:
    """Read the run's stop. One that cannot be read is a problem; heartbeats then give the state."""
    try:
        return stored_runs.read_stop(run)
    except UNREADABLE as error:
        problems.append(str(error))
        return None


def _beats(run: ObjectStore, problems: list[str]) -> list[Heartbeat]:
    seen = heartbeats.read_all(run)
    problems += _unreadable("heartbeat", seen.unreadable)
    return seen.beats


def _unreadable(what: str, unreadable: Mapping[str, str]) -> list[str]:
    """Describe the unreadable objects of one kind: `1 evaluation cannot be read: evals/…: …`."""
    if not unreadable:
        return []
    num = len(unreadable)
    count = f"1 {what}" if num == 1 else f"{num} {what}s"
    reasons = "; ".join(list(unreadable.values())[:REASONS_MAX])
    more = f" (and {num - REASONS_MAX} more)" if num > REASONS_MAX else ""
    return [f"{count} cannot be read: {reasons}{more}"]


def _hint(policy: str, beats: Iterable[Heartbeat]) -> int:
    """Return the policy's newest version by its trainer's heartbeat; 0 without one."""
    beat = _beat(beats, f"trainer-{policy}")
    return beat.versions.get(policy, 0) if beat else 0


def _beat(beats: Iterable[Heartbeat], member: str) -> Heartbeat | None:
    return next((beat for beat in beats if beat.id == member), None)


def is_alive(beat: Heartbeat, now_s: float, limit_s: float) -> bool:
    return not beat.has_ended and now_s - beat.beat_s <= limit_s


def _state(
    stop: Stop | None,
    beats: Iterable[Heartbeat],
    created_s: float,
    now_s: float,
    limit_s: float,
    has_begun: bool,
) -> State:
    """The state in `stop.json`; before that, the run goes on as long as its supervisor is alive,
    whose first heartbeat follows the creation of the run.
    """
    if stop is not None:
        return stop.state
    supervisor = _beat(beats, "supervisor")
    goes_on = is_alive(supervisor, now_s, limit_s) if supervisor else now_s - created_s <= limit_s
    if not goes_on:
        return "interrupted"
    return "running" if has_begun else "starting"


def _reason(state: State, stop: Stop | None, beats: Iterable[Heartbeat]) -> str:
    if stop is not None:
        return stop.reason
    supervisor = _beat(beats, "supervisor")
    if state == "interrupted":
        last = f"; its last note: {supervisor.note}" if supervisor and supervisor.note else ""
        return f"its supervisor is gone; start the run again with the same run id to go on{last}"
    return supervisor.note if supervisor else ""


def _closing(
    stop: Stop | None, beats: Iterable[Heartbeat], now_s: float, limit_s: float
) -> Closing | None:
    supervisor = _beat(beats, "supervisor")
    if stop is None or supervisor is None or not is_alive(supervisor, now_s, limit_s):
        return None
    step, progress = supervisor.state, supervisor.progress
    if not isinstance(step, ClosingStep) or not isinstance(progress, SupervisorProgress):
        return None  # it has not polled the run since that was stopped
    return Closing(step=step, part=supervisor.note, share=progress.closing_share)


def _end_s(state: State, stop: Stop | None, beats: Iterable[Heartbeat], now_s: float) -> float:
    """Unix time of the run's end; its last heartbeat if it is interrupted; now if it goes on."""
    if stop is not None:
        return stop.at_s
    return max((beat.beat_s for beat in beats), default=now_s) if state == "interrupted" else now_s


def _policy(newest: Newest, steps: int, trainer: Heartbeat | None) -> PolicyStatus:
    metrics = {name: value for name, value in newest.metrics.items() if abs(value) <= SHOWN_MAX}
    return PolicyStatus(
        step=newest.version or 0,
        steps=steps,
        version=newest.version,
        batches=newest.batches,
        wait_fraction=_wait_fraction(trainer),
        reward_mean=metrics.get("dataflow/reward/mean"),
        accuracy=metrics.get("dataflow/accuracy/final"),
        staleness_mean=metrics.get("dataflow/staleness/mean"),
        staleness_max=metrics.get("dataflow/staleness/max"),
        tokens_trained=_tokens_trained(trainer),
    )


def _tokens_trained(trainer: Heartbeat | None) -> int:
    progress = trainer.progress if trainer else None
    return progress.tokens_trained if isinstance(progress, TrainerProgress) else 0


def _wait_fraction(trainer: Heartbeat | None) -> float | None:
    """Share of the trainer's measured wall-clock spent waiting; None before its first step."""
    if trainer is None or not trainer.seconds.get("step"):
        return None
    spent_s = {name: spent for name, spent in trainer.seconds.items() if name != "cpu"}
    return spent_s.get("wait", 0.0) / sum(spent_s.values())


def _regions(config: RunConfig, beats: Iterable[Heartbeat]) -> list[str]:
    """Return the regions of the recipe, then any other of a worker's heartbeat."""
    return list(
        dict.fromkeys(
            [*config.rollout.regions, *(beat.region for beat in beats if beat.kind == "rollout")]
        )
    )


def _region(name: str, beats: Iterable[Heartbeat], now_s: float, limit_s: float) -> RegionStatus:
    members = [beat for beat in beats if beat.region == name]
    workers = [beat for beat in members if beat.kind == "rollout"]
    counts = [each.progress for each in workers if isinstance(each.progress, RolloutProgress)]
    mirrors = [each.progress for each in members if isinstance(each.progress, MirrorProgress)]
    return RegionStatus(
        workers=sum(is_alive(beat, now_s, limit_s) for beat in workers),
        tokens_per_s=region_rates(workers, now_s, limit_s).get(name, 0.0),
        orders_done=sum(each.orders_done for each in counts),
        weights_in_home=_total(each.weights_bytes_home for each in counts),
        weights_in_mirror=_total(each.weights_bytes_mirror for each in counts),
        mirrored=_total(each.mirrored_bytes for each in mirrors),
        shards_out=sum(each.shard_bytes for each in counts),
    )


def _total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """policy → sum over all mappings."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def _member(beat: Heartbeat, now_s: float, limit_s: float) -> MemberStatus:
    silent = not beat.has_ended and not is_alive(beat, now_s, limit_s)
    return MemberStatus(
        id=beat.id,
        kind=beat.kind,
        state=SILENT if silent else beat.state,
        age_s=max(0.0, now_s - beat.beat_s),
        attempt=beat.attempt,
        region=beat.region,
        wait_reason="" if silent else beat.wait_reason,
        note=beat.note,
    )
