"""Progress of a service as lines of its log: one line at most per heartbeat.

HeartbeatWriter ──every heartbeat──▶ ProgressLog.observe ──when one is due──▶ log, level INFO

A line is due `every_s` after the last one, for a trainer also after `every_steps` steps, and at the
service's end. Its words are for people; programs read heartbeats.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from storage.records.control import Heartbeat
from storage.records.progress import (
    BaseModelProgress,
    DataflowProgress,
    EvaluationProgress,
    MirrorProgress,
    RolloutProgress,
    SupervisorProgress,
    TrainerNodeProgress,
    TrainerProgress,
)

log = logging.getLogger(__name__)

NOTE_MAX = 300
"""Characters of a heartbeat's note in a line."""


@dataclass(frozen=True)
class _Logged:
    """The heartbeat of the last line."""

    at_s: float
    """By the clock of the log."""
    step: int
    beat: Heartbeat | None


class ProgressLog:
    """The log lines of one service; used by one thread at a time."""

    def __init__(
        self, every_s: float, every_steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._every_s, self._every_steps, self._clock = every_s, every_steps, clock
        self._last: _Logged | None = None
        """None before the first heartbeat, from which steps are counted."""

    def observe(self, beat: Heartbeat) -> None:
        """Log a line if one is due."""
        now_s = self._clock()
        step = beat.progress.step if isinstance(beat.progress, TrainerProgress) else 0
        if self._last is None:
            self._last = _Logged(now_s, step, None)
        is_due = now_s - self._last.at_s >= self._every_s
        has_stepped = step // self._every_steps > self._last.step // self._every_steps
        if is_due or has_stepped or beat.has_ended:
            log.info("%s", line(beat, self._last.beat))
            self._last = _Logged(now_s, step, beat)


def line(beat: Heartbeat, last: Heartbeat | None = None) -> str:
    """Describe a service's progress; its share of waiting is that since the heartbeat `last`.

    Example: `working; step 40, reward 0.85, staleness 0.7 (max 2), 3,120 tokens/s,
    9,216 tokens trained, waited 12%; versions: solver 40`.
    """
    state = f"{beat.state} for {beat.wait_reason}" if beat.wait_reason else str(beat.state)
    numbers = ", ".join([*_numbers(beat), *_waited(beat, last)])
    versions = ", ".join(f"{policy} {number}" for policy, number in beat.versions.items())
    note = " ".join(beat.note.split())[:NOTE_MAX]
    parts = (state, numbers, versions and f"versions: {versions}", note)
    return "; ".join(filter(None, parts))


def _numbers(beat: Heartbeat) -> Iterable[str]:
    """Write what the service counts and measures."""
    match beat.progress:
        case TrainerProgress() as progress:
            yield f"step {progress.step}"
            if progress.reward_mean is not None:
                yield f"reward {progress.reward_mean:.2f}"
            if progress.staleness_mean is not None and progress.staleness_max is not None:
                yield f"staleness {progress.staleness_mean:.1f} (max {progress.staleness_max:.0f})"
            yield f"{progress.tokens_per_s:,.0f} tokens/s"
            yield f"{progress.tokens_trained:,} tokens trained"
        case DataflowProgress() as progress:
            yield f"{progress.orders:,} orders"
            for policy, number in progress.batches.items():
                yield f"{policy}: {_batches(progress, policy, number)}"
        case RolloutProgress() as progress:
            yield f"{progress.orders_done:,} orders"
            yield f"{progress.episodes:,} episodes ({progress.episodes_failed:,} failed)"
            yield f"{progress.tokens:,} tokens"
            yield f"{progress.tokens_per_s:,.0f} tokens/s"
        case EvaluationProgress() as progress:
            yield f"{progress.episodes:,} episodes"
        case MirrorProgress() as progress:
            yield f"{sum(progress.mirrored_bytes.values()):,} bytes mirrored"
        case BaseModelProgress() as progress:
            yield f"{progress.base_model or 0:.0%} of the base models"
        case TrainerNodeProgress():
            return
        case SupervisorProgress() as progress:
            yield f"{progress.members_done} of {progress.members} members done"


def _batches(progress: DataflowProgress, policy: str, number: int) -> str:
    fates: Mapping[str, Mapping[str, int]] = {
        "waiting": progress.waiting,
        "trained": progress.trained,
        "replayed": progress.replayed,
        "filtered": progress.filtered,
        "expired": progress.expired,
    }
    counts = [f"{each[policy]:,} {fate}" for fate, each in fates.items() if each.get(policy)]
    return f"{number:,} batches ({', '.join(counts)})" if counts else f"{number:,} batches"


def _waited(beat: Heartbeat, last: Heartbeat | None) -> Iterable[str]:
    """Write the share of the time since `last`, else since the start, that the service waited for
    others.
    """
    passed_s = beat.alive_s - (last.alive_s if last else 0.0)
    if "wait" in beat.seconds and passed_s > 0:
        waited_s = beat.seconds["wait"] - (last.seconds.get("wait", 0.0) if last else 0.0)
        yield f"waited {min(1.0, max(0.0, waited_s / passed_s)):.0%}"
