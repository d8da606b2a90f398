"""Starts, watches, replaces and ends the members of one run. Its memory is the store and Prefect:
its process may die.

every poll:  store + Prefect + heartbeats ──▶ decide(member) ──▶ launch | lost | retire | keep
run over  =  every member's work is done, or somebody asked it to stop (`stop.json`)
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from storage import layout
from storage.coordination import heartbeats
from storage.coordination.heartbeats import HeartbeatWriter
from storage.coordination.lifetime import backoff_s
from storage.errors import ConfigError, CorruptError, TransientError
from storage.records.control import ClosingStep, Heartbeat, ServiceState, Stop, WaitReason
from storage.records.progress import SupervisorProgress
from storage.run import runs
from storage.store.object_store import ObjectStore
from tasks.monitoring import closing_steps
from tasks.recipes import stored_config
from tasks.recipes.run_config import RunConfig
from tasks.supervision.awaited import Awaited
from tasks.supervision.awaited import words as awaited_words
from tasks.supervision.flow_processes import FlowProcesses
from tasks.supervision.launcher import Launched
from tasks.supervision.members import (
    SLOW_FACTOR,
    Decision,
    FlowRunPhase,
    Member,
    Seen,
    decide,
    is_done,
    members_of,
)

log = logging.getLogger(__name__)

_LAUNCHES_AT_ONCE = 3
"""Flow runs of one deployment and work queue that are launched at one look: their processes start
without slowing each other down."""
_RELAUNCH_S, _RELAUNCH_MAX_S = 1.0, 30.0
"""First and longest pause before a member that keeps ending early is launched again."""
_KILL_TIMEOUT_S = 35.0
"""Prefect kills a cancelled flow run that has not left after 30 s."""


class Launcher(Protocol):
    """Where flow runs come from: Prefect (`tasks.supervision.launcher.PrefectLauncher`)."""

    async def launch(self, member: Member, attempt: int) -> Launched | None: ...
    async def newest(self) -> Mapping[str, Launched] | None: ...
    async def declare_crashed(self, launched: Launched, reason: str) -> None: ...
    async def cancel(self, launched: Launched) -> None: ...
    async def bury(self, ended: Sequence[Launched]) -> None: ...


@dataclass(kw_only=True)
class _Watch:
    """What this supervisor process remembers of one member between two looks."""

    member: Member
    launched: Launched | None = None
    """Its newest flow run."""
    launched_at: float = 0.0
    taken_at: float = 0.0
    """When a worker took it; meanwhile, when it was last seen to wait for one."""
    beat: tuple[int, int] | None = None
    """(attempt, beats) of the newest attempt's heartbeat last seen."""
    beat_at: float = 0.0
    done: bool = False
    done_at: float = 0.0
    failures: int = 0
    """Attempts in a row that ended before they had lived for a while."""
    counted: int = -1
    """The attempt whose end was last counted."""
    not_before: float = 0.0
    abandoned: bool = False
    seen_active: bool = False
    """This supervisor saw a flow run of it that had not ended; before that, what ended may have
    been cancelled long ago.
    """
    last_words: str = ""
    """The note of its last heartbeat."""
    state: str = ""
    """The state of its last heartbeat."""
    called_slow: str = ""
    """The flow run that was last logged as slow."""

    @property
    def attempt(self) -> int:
        """The newest that Prefect or the store knows of; -1 before the first."""
        return max(
            self.launched.attempt if self.launched else -1, self.beat[0] if self.beat else -1
        )

    @property
    def has_beaten(self) -> bool:
        """Whether the newest attempt has."""
        return (
            self.beat is not None
            and self.launched is not None
            and self.beat[0] == self.launched.attempt
        )

    def hear(self, beat: Heartbeat, now: float) -> None:
        """An older attempt that lives on says nothing of the newest one."""
        if beat.attempt >= self.attempt and (beat.attempt, beat.beats) != self.beat:
            self.beat, self.beat_at = (beat.attempt, beat.beats), now
            self.state, self.last_words = beat.state, beat.note


@dataclass(kw_only=True)
class Supervisor:
    run: ObjectStore
    config: RunConfig
    heartbeat: HeartbeatWriter
    launcher: Launcher
    clock: Callable[[], float] = time.monotonic
    processes: FlowProcesses = field(default_factory=FlowProcesses)
    watches: dict[str, _Watch] = field(init=False)

    leave_within_s: float = field(init=False)
    """Time for the members to leave by themselves when the run ends."""
    over: Stop | None = None
    """Why the run is over, from whoever knows it first. Written to the store until it stands there.
    """
    _blind_since: float | None = field(default=None, init=False)
    """When the look began that is to show the store again."""
    _blind_s: float = field(default=0.0, init=False)
    """How long the store was out of sight, in all."""
    _unreadable: set[str] = field(default_factory=set, init=False)
    """Keys of the heartbeats that could not be read at the last look."""

    def __post_init__(self) -> None:
        self.leave_within_s = self.config.supervise.stop_timeout_s
        self.watches = {member.id: _Watch(member=member) for member in members_of(self.config)}

    async def supervise(self) -> Stop:
        """Keeps the run going until it is over; returns why it ended. Its members have left by
        then.
        """
        while True:
            stop = await self._round()
            if stop is not None:
                await self._wind_down(stop)
                return stop
            await asyncio.sleep(self.config.supervise.poll_interval_s)

    async def _round(self) -> Stop | None:
        """One look; the Stop that stands once the run is over. While the store is away nothing is
        decided; one that will never answer as it should ends the run, whose members are then ended
        through Prefect.
        """
        if self._blind_since is None:
            self._blind_since = self.clock()
        try:
            stop = await asyncio.to_thread(runs.read_stop, self.run)
            if stop is not None:
                return stop
            if self.over is None:
                found = await self._look()
                self.over = self.over or found
            return (
                await asyncio.to_thread(runs.request_stop, self.run, self.over)
                if self.over
                else None
            )
        except TransientError as error:
            log.warning("the store does not answer: %s", error)
            return None
        except (ConfigError, CorruptError) as error:
            log.error("the run cannot go on: %s", error)
            return Stop("failed", str(error), time.time())

    async def _look(self) -> Stop | None:
        """Look at all members and act; a Stop when the run is over. While Prefect is away nobody is
        launched or lost.
        """
        await asyncio.to_thread(self._read_store)
        if all(watch.done or watch.abandoned for watch in self.watches.values()):
            return Stop(
                "completed", f"all policies reached version {self.config.steps}", time.time()
            )
        newest = await self.launcher.newest()
        if newest is None:
            self.heartbeat.update(
                wait_reason=WaitReason.PREFECT,
                note="waiting for the Prefect server, which does not answer",
            )
            return None
        self._attach(newest)
        stop = await self._act_on_all()
        self.heartbeat.update(note=self._note())
        return stop

    async def _act_on_all(self) -> Stop | None:
        launches: Counter[tuple[str, str]] = Counter()
        try:
            for watch in self.watches.values():
                failed = await self._act(watch, launches)
                if failed is not None:
                    return failed
        except ConfigError as error:
            log.error("the run cannot go on: %s", error)
            return Stop("failed", str(error), time.time())
        return None

    def _note(self) -> str:
        """What the run waits for: the base models, then members that are not at work yet, then what
        the dataflow waits for, and after its last order whoever is not done.
        """
        preparing = self.watches["base-model"]
        if not preparing.done and preparing.last_words:
            return preparing.last_words
        if self.watches["dataflow"].done:
            busy = [watch for watch in self.watches.values() if not (watch.done or watch.abandoned)]
            named = ", ".join(
                f"{watch.member.id} ({watch.last_words or watch.state or 'starting'})"
                for watch in busy
            )
            return f"waiting for: {named}" if named else ""
        now = self._now()
        awaited = [
            Awaited(
                id=watch.member.id,
                phase=watch.launched.phase if watch.launched else FlowRunPhase.NONE,
                since_s=now - watch.launched_at,
                loading=watch.has_beaten,
                queue=watch.member.queue,
            )
            for watch in self.watches.values()
            if not (
                watch.done
                or watch.abandoned
                or (watch.has_beaten and watch.state != ServiceState.STARTING)
            )
        ]
        return "; ".join(
            filter(None, (awaited_words(awaited), self.watches["dataflow"].last_words))
        )

    def _now(self) -> float:
        """The clock by which members are judged. It stands still while the store is out of sight,
        when nobody is heard.
        """
        return self.clock() - self._blind_s

    def _read_store(self) -> None:
        beats = {beat.id: beat for beat in self._beats()}
        ended = [
            watch
            for watch in self.watches.values()
            if not watch.done and is_done(self.run, self.config, watch.member)
        ]
        if self._blind_since is not None:
            self._blind_s += self.clock() - self._blind_since
            self._blind_since = None
        now = self._now()
        for watch in ended:
            watch.done, watch.done_at = True, now
        for watch in self.watches.values():
            if (beat := beats.get(watch.member.id)) is not None:
                watch.hear(beat, now)
        done = [watch.member.id for watch in self.watches.values() if watch.done]
        self.heartbeat.update(
            state=ServiceState.WORKING,
            progress=SupervisorProgress(members=len(self.watches), members_done=len(done)),
        )

    def _beats(self) -> list[Heartbeat]:
        """Those that can be read; the others are logged once. ConfigError when they cannot even be
        listed.
        """
        seen = heartbeats.look(self.run)
        if layout.HEARTBEATS in seen.unreadable:
            raise ConfigError(seen.unreadable[layout.HEARTBEATS])
        for key in seen.unreadable.keys() - self._unreadable:
            log.warning(
                "a heartbeat cannot be read, its member is taken for silent: %s",
                seen.unreadable[key],
            )
        self._unreadable = set(seen.unreadable)
        return seen.beats

    def _attach(self, newest: Mapping[str, Launched]) -> None:
        """To each member's newest flow run, whichever supervisor launched it."""
        for watch in self.watches.values():
            found = newest.get(watch.member.id)
            if found is not None:
                if watch.launched is None:
                    watch.launched_at = self._now()
                if watch.launched is None or found.phase is FlowRunPhase.SCHEDULED:
                    watch.taken_at = self._now()
                watch.launched = found
                watch.seen_active = watch.seen_active or found.phase is not FlowRunPhase.ENDED

    async def _act(self, watch: _Watch, launches: Counter[tuple[str, str]]) -> Stop | None:
        settings = self.config.supervise
        now = self._now()
        if watch.abandoned or now < watch.not_before:
            return None
        launched = watch.launched
        silent_s = now - watch.beat_at if watch.has_beaten else None
        seen = Seen(
            done=watch.done,
            phase=launched.phase if launched else FlowRunPhase.NONE,
            since_launch_s=now - watch.taken_at,
            silent_s=silent_s,
            since_done_s=now - watch.done_at,
            works=await self._works(watch, now),
        )
        decision = decide(
            seen,
            launch_timeout_s=settings.launch_timeout_s,
            heartbeat_limit_s=settings.heartbeat_limit_s,
            stop_timeout_s=settings.stop_timeout_s,
        )
        if decision is Decision.RETIRE and launched is not None:
            await self.launcher.cancel(launched)
        if decision is Decision.LOST and launched is not None:
            await self.launcher.declare_crashed(
                launched, "its heartbeat in the object store stopped"
            )
            await asyncio.to_thread(
                self.processes.terminate, launched.flow_run_id
            )  # two attempts would slow each other down
            watch.launched = replace(launched, phase=FlowRunPhase.ENDED, state_name="no heartbeat")
            decision = Decision.LAUNCH
        place = (watch.member.deployment, watch.member.queue)
        if decision is Decision.LAUNCH and launches[place] < _LAUNCHES_AT_ONCE:
            launches[place] += 1
            return await self._launch(watch)
        return None

    async def _works(self, watch: _Watch, now: float) -> bool:
        """Whether a member that has used half of its limit of silence, or of leaving, has a process
        here that works. Before that nobody asks.
        """
        settings, launched = self.config.supervise, watch.launched
        if launched is None:
            return False
        if watch.done:
            since, limit_s = watch.done_at, settings.stop_timeout_s
        elif watch.has_beaten:
            since, limit_s = watch.beat_at, settings.heartbeat_limit_s
        else:
            since, limit_s = watch.taken_at, settings.launch_timeout_s
        if (
            launched.phase not in (FlowRunPhase.PENDING, FlowRunPhase.RUNNING)
            or now - since <= limit_s / 2
        ):
            self.processes.forget(launched.flow_run_id)
            return False
        idle_s = await asyncio.to_thread(self.processes.idle_s, launched.flow_run_id)
        works = idle_s is not None and idle_s < limit_s / 2
        if works and now - since > limit_s and watch.called_slow != launched.flow_run_id:
            watch.called_slow = launched.flow_run_id
            what = "was done" if watch.done else "was last heard of"
            log.warning(
                "%s %s %.0f s ago, but its process works: waiting for it",
                watch.member.id,
                what,
                now - since,
            )
        return works

    async def _launch(self, watch: _Watch) -> Stop | None:
        """Start the member's next attempt, unless it keeps dying young."""
        now = self._now()
        attempt = watch.attempt + 1
        ended = watch.launched
        if ended is not None and ended.attempt > watch.counted:
            watch.counted = ended.attempt
            lived_s = watch.beat_at - watch.launched_at
            watch.failures = (
                1 if lived_s > 3 * self.config.supervise.heartbeat_limit_s else watch.failures + 1
            )
            if watch.seen_active:
                found, level = "ended before its work was done", logging.WARNING
            else:
                found, level = "is taken up again", logging.INFO
            log.log(
                level,
                "%s %s (%s): launching attempt %d",
                watch.member.id,
                found,
                ended.state_name,
                attempt,
            )
            await self.launcher.bury([ended])
            if watch.failures > self.config.supervise.restarts_max:
                return self._give_up(watch)
            watch.not_before = now + backoff_s(watch.failures, _RELAUNCH_S, _RELAUNCH_MAX_S)
        launched = await self.launcher.launch(watch.member, attempt)
        if launched is not None:
            watch.launched, watch.launched_at, watch.taken_at, watch.seen_active = (
                launched,
                now,
                now,
                True,
            )
        return None

    def _give_up(self, watch: _Watch) -> Stop | None:
        """A member that cannot live fails the run; a rollout worker only when it was the last of
        its kind.
        """
        watch.abandoned = True
        said = f", the last time with: {watch.last_words}" if watch.last_words else ""
        reason = (
            f"{watch.member.id} ended {watch.failures} times in a row without finishing{said}; "
            "its flow run's log says more"
        )
        log.error(reason)
        if watch.member.kind == "rollout" and any(
            other.member.kind == "rollout" and not other.abandoned
            for other in self.watches.values()
        ):
            return None
        return Stop("failed", reason, time.time())

    async def _wind_down(self, stop: Stop) -> None:
        """Members see `stop.json` and leave, also those whose process is still starting. One that
        has not begun, or does not leave within the limit, is cancelled; after a completed run, one
        whose process works is given more time.
        """
        closing_steps.record(self.heartbeat, ClosingStep.LEAVING)
        found = await self.launcher.newest() or {}
        for launched in found.values():
            if launched.phase is FlowRunPhase.SCHEDULED:
                await self.launcher.cancel(launched)
        if not await self._all_left(self.leave_within_s, patient=stop.state == "completed"):
            for member, launched in (await self.launcher.newest() or {}).items():
                if launched.phase is not FlowRunPhase.ENDED:
                    log.warning("cancelling %s, which did not leave by itself", member)
                    await self.launcher.cancel(launched)
            await self._all_left(_KILL_TIMEOUT_S)
        await self.launcher.bury(list(found.values()))

    async def _all_left(self, limit_s: float, patient: bool = False) -> bool:
        """Whether every member's flow run has ended, waited for up to `limit_s`; and longer while
        one works, if `patient`.
        """
        began = self.clock()
        while True:
            newest = await self.launcher.newest()
            left = {
                member: found
                for member, found in (newest or {}).items()
                if found.phase is not FlowRunPhase.ENDED
            }
            if newest is not None and not left:
                return True
            closing_steps.record(self.heartbeat, ClosingStep.LEAVING, ", ".join(sorted(left)))
            waited_s = self.clock() - began
            if waited_s >= limit_s and not (
                patient and waited_s < SLOW_FACTOR * limit_s and await self._any_works(left)
            ):
                return False
            await asyncio.sleep(self.config.supervise.poll_interval_s / 4)

    async def _any_works(self, left: Mapping[str, Launched]) -> bool:
        idle_s = [
            await asyncio.to_thread(self.processes.idle_s, launched.flow_run_id)
            for launched in left.values()
        ]
        return any(each is not None and each < self.leave_within_s / 2 for each in idle_s)


def start(store: ObjectStore, run_id: str, config: RunConfig, deployment: str) -> ObjectStore:
    """Open the run, or create it. A run that was stopped before is taken up again; a completed one
    is refused.

    Raises:
        ConfigError: the run exists with another configuration, or is completed.
    """
    wanted = config.model_dump(mode="json")
    run = runs.create_run(
        store, run_id, wanted, deployment=deployment, fill_defaults=stored_config.filled
    )
    stop = runs.check_restart(store, run_id, wanted, stored_config.filled)
    if stop is not None:
        log.info("taking up run %s, which was %s", run_id, stop.state)
        runs.clear_stop(run)
    return run
