"""What a night does: begin, go on, or skip.

    nights before it, promotion log, clock ──begin──▶ NightPlan     created once: a retry reads it
                                                  └─▶ NightOutcome  the night is over already

Nights do not overlap. A night that is due while an earlier one still runs is skipped. Where the
process of an earlier night has died, that night is abandoned: its run is stopped, and its data is
used by the next one.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from storage import layout
from storage.coordination import heartbeats
from storage.errors import AstraFlowError, ConfigError, ConflictError, CorruptError
from storage.formats.json_values import storable_text
from storage.plain_names import new_write_id
from storage.promotion import nights, promotions
from storage.promotion.nights import Night
from storage.records.control import RunEnd, Stop
from storage.records.nights import JUDGED, NightEnd, NightOutcome, NightPlan
from storage.run import runs
from storage.store.object_store import ObjectStore
from tasks.promotion import decision_log
from tasks.recurring import restarts
from tasks.recurring.due_time import due_s

log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 2.0
SILENCE_LIMIT_S = 60.0
"""A night whose heartbeat does not change for this time has died."""
EARLY_LIMIT_S = 86_400.0
"""A night cannot begin longer than this before its due time: every night until then would be
skipped. Clocks and time zones may differ by less.
"""
REASON_MAX = 2_000
"""Characters; a longer reason is cut."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When a night may begin, and with what."""

    late_limit_s: float
    """A night that begins later than this after its due time is skipped."""
    catches_up: bool
    """Begin late nights, too."""
    begins_with_champion: bool
    """The run begins with the champion's weights, not with the recipe's model."""


def begin(
    store: ObjectStore,
    name: str,
    night: str,
    schedule: Schedule,
    now_s: Callable[[], float] = time.time,
    pause: Callable[[float], None] = time.sleep,
) -> NightPlan | NightOutcome:
    """Return the plan of a night, created now or by an earlier try; its outcome where it is over.

    A night that dies again and again without storing anything new has failed.

    Raises:
        ConfigError: the night runs in another process, is due in more than a day, or cannot be
            stored; or the champion is not known.
        CorruptError: a record of this night or of one before it cannot be read.
    """
    own = nights.read_night(store, name, night)
    if own.outcome is not None:
        return own.outcome
    if own.plan is not None:
        if is_alive(store, name, night, pause):
            raise ConfigError(
                f"night {night} of {name} runs already, in another process; end that one first"
            )
        if reason := restarts.begin_again(store, own.plan):
            return _give_up(store, own.plan, NightEnd.FAILED, reason)
        return own.plan
    _refuse_early(night, now_s())
    if reason := _reason_to_skip(store, name, night, schedule, now_s(), pause):
        return end(store, name, night, NightEnd.SKIPPED, reason)
    plan = _planned(store, name, night, schedule, now_s())
    try:
        nights.create_plan(store, plan)
    except ConflictError:
        raise ConfigError(f"night {night} of {name} was begun by another process") from None
    return plan


def end(
    store: ObjectStore,
    name: str,
    night: str,
    how: NightEnd,
    reason: str,
    decision: int | None = None,
) -> NightOutcome:
    """Store how a night ended; returns the stored outcome, which is the first one."""
    outcome = NightOutcome(
        name=name,
        night=night,
        end=how,
        reason=storable_text(reason)[:REASON_MAX],
        ended_s=time.time(),
        decision=decision,
        write_id=new_write_id(),
    )
    try:
        nights.create_outcome(store, outcome)
    except ConflictError:
        return nights.read_outcome(store, name, night) or outcome
    return outcome


def is_alive(
    store: ObjectStore, name: str, night: str, pause: Callable[[float], None] = time.sleep
) -> bool:
    """Return whether the process of a night is alive: whether its heartbeat changes.

    Takes up to SILENCE_LIMIT_S. A night that said that it ends is not alive.
    """
    folder = store.sub(layout.night(name, night))
    before = _last_beat(folder)
    if before is None:
        return False
    for _ in range(int(SILENCE_LIMIT_S / HEARTBEAT_INTERVAL_S)):
        pause(HEARTBEAT_INTERVAL_S)
        now = _last_beat(folder)
        if now is None:
            return False
        if now != before:
            return True
    return False


def _last_beat(folder: ObjectStore) -> tuple[float, int] | None:
    """Return (start, number of heartbeats) of the night's process; None where there is none."""
    living = (beat for beat in heartbeats.readable(folder) if not beat.has_ended)
    return next(((beat.started_s, beat.beats) for beat in living), None)


def _is_early(night: str, now_s: float) -> bool:
    """Return whether a stored night cannot have begun yet, or is none."""
    try:
        return due_s(night) - now_s > EARLY_LIMIT_S
    except ConfigError:
        return True


def _refuse_early(night: str, now_s: float) -> None:
    early_s = due_s(night) - now_s
    if early_s > EARLY_LIMIT_S:
        raise ConfigError(
            f"night {night} is due in {early_s / EARLY_LIMIT_S:,.1f} days, and all nights before "
            "it would be skipped; correct night_id, or the clock of this machine"
        )


def _reason_to_skip(
    store: ObjectStore,
    name: str,
    night: str,
    schedule: Schedule,
    now_s: float,
    pause: Callable[[float], None],
) -> str:
    """Return why the night does not train; empty where it does. Abandons dead nights before it."""
    late_s = now_s - due_s(night)
    if late_s > schedule.late_limit_s and not schedule.catches_up:
        return (
            f"it was due {late_s / 3600:.1f} h ago, and the limit is "
            f"{schedule.late_limit_s / 3600:g} h; its data is used by the next night, or begin it "
            "with catch_up"
        )
    for other in _readable(store, name):
        if other.id > night and other.plan is not None and not _is_early(other.id, now_s):
            return f"the later night {other.id} has begun before; its window has this night's data"
        if other.id >= night or other.plan is None or other.outcome is not None:
            continue
        if is_alive(store, name, other.id, pause):
            return f"the night {other.id} still runs"
        reason = f"its process ended without an outcome; night {night} found that"
        _give_up(store, other.plan, NightEnd.ABANDONED, reason)
    return ""


def _give_up(store: ObjectStore, plan: NightPlan, how: NightEnd, reason: str) -> NightOutcome:
    """End a night whose process has died. Its run's members leave when they see the stop.

    An object of its run that cannot be read is logged: later nights do not need it. Where the whole
    store does not answer, the outcome is not stored either.
    """
    log.warning("night %s of %s is %s: %s", plan.night, plan.name, how.value, reason)
    run = store.sub(layout.run_prefix(plan.run_id))
    try:
        if run.exists(layout.RUN) and runs.read_stop(run) is None:
            state: RunEnd = "failed" if how is NightEnd.FAILED else "cancelled"
            runs.request_stop(run, Stop(state, reason, time.time()))
    except AstraFlowError as error:
        log.error("the run %s is not stopped: %s", plan.run_id, error)
    return end(store, plan.name, plan.night, how, reason)


def _planned(
    store: ObjectStore, name: str, night: str, schedule: Schedule, now_s: float
) -> NightPlan:
    before = [each for each in _readable(store, name) if each.plan is not None]
    judged = [each.plan for each in before if each.outcome and each.outcome.end in JUDGED]
    last = judged[-1] if judged else None
    standing = decision_log.fold(promotions.read_log(store, name))
    decision_log.require_known(store, standing)
    champion = standing.champion if schedule.begins_with_champion else None
    return NightPlan(
        name=name,
        night=night,
        run_id=f"{name}-{night}",
        number=len(before),
        due_s=due_s(night),
        began_s=now_s,
        champion=champion.number if champion else None,
        team=dict(champion.team) if champion else {},
        since_s=last.until_s if last else None,
        prompts_of=last.run_id if last else None,
        write_id=new_write_id(),
    )


def _readable(store: ObjectStore, name: str) -> tuple[Night, ...]:
    """Return all nights; CorruptError where one is unreadable: its data could be used twice."""
    stored = nights.read_all(store, name)
    if stored.unreadable:
        night, why = next(iter(stored.unreadable.items()))
        raise CorruptError(
            f"night {night} of {name} cannot be read: {why}; put the object back from a copy, or "
            f"delete {store.url}/{layout.night(name, night)} to forget the night"
        )
    return stored.readable
