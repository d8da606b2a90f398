"""Starts, watches, replaces and ends the members of one run. All of its state can be read again
from the store and Prefect, so its process may die.

every poll:  store + Prefect + heartbeats ──▶ decide(member) ──▶ launch | lost | retire | keep
run over  =  every member's work is done, its budget is used up, or somebody asked it to stop
             (`stop.json`)
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from storage import layout
from storage.coordination import heartbeats
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.coordination.lifetime import backoff_s
from storage.errors import ConfigError, CorruptError, TransientError
from storage.records.control import PLANNED_ENDS, Heartbeat, ServiceState, Stop, WaitReason
from storage.records.progress import SupervisorProgress
from storage.run import runs
from storage.store.object_store import ObjectStore
from tasks import prompt_windows
from tasks.base_models.stored import resolve
from tasks.events.run_events import EventQueue
from tasks.monitoring import closing_steps
from tasks.recipes import stored_config
from tasks.recipes.run_config import RunConfig
from tasks.services import last_words
from tasks.supervision.awaited import waiting_note
from tasks.supervision.budget import BudgetMeter
from tasks.supervision.flow_processes import FlowProcesses
from tasks.supervision.launcher import Launched, Launcher
from tasks.supervision.member_watch import MemberWatch, SilenceLimits
from tasks.supervision.members import Decision, FlowRunPhase, is_done, members_of
from tasks.supervision.shutdown import Shutdown

log = logging.getLogger(__name__)

_LAUNCHES_AT_ONCE = 3
"""Flow runs of one deployment and work queue that are launched in one poll: their processes start
without slowing each other down."""
_RELAUNCH_S, _RELAUNCH_MAX_S = 1.0, 30.0
"""First and longest pause before a member that keeps ending early is launched again."""
_LIVED_FACTOR = 3
"""An attempt that lived longer than this many heartbeat limits resets its member's failures."""


@dataclass(kw_only=True)
class Supervisor:
    run: ObjectStore
    config: RunConfig
    heartbeat: HeartbeatWriter
    launcher: Launcher
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    processes: FlowProcesses = field(default_factory=FlowProcesses)
    watches: dict[str, MemberWatch] = field(init=False)
    budget: BudgetMeter = field(init=False)
    events: EventQueue = field(init=False)

    leave_within_s: float = field(init=False)
    """Time for the members to leave by themselves when the run ends."""
    over: Stop | None = None
    """Why the run is over, from whoever finds out first. Written to the store until that
    succeeds.
    """
    _store_unreachable_since: float | None = field(default=None, init=False)
    """Start of the poll that has not read the store yet."""
    _store_unreachable_s: float = field(default=0.0, init=False)
    """Total time in which the store could not be read."""
    _unreadable: set[str] = field(default_factory=set, init=False)
    """Keys of the heartbeats that could not be read in the last poll."""

    def __post_init__(self) -> None:
        self.leave_within_s = self.config.supervise.stop_timeout_s
        self.watches = {member.id: MemberWatch(member=member) for member in members_of(self.config)}
        self.events = EventQueue(self.run, self.config.policies)
        self.budget = BudgetMeter(
            run=self.run,
            config=self.config.budget,
            clock=self.clock,
            wall_clock=self.wall_clock,
        )

    async def supervise(self) -> Stop:
        """Keep the run going until it is over and its members have left; returns why it ended."""
        while True:
            stop = await self.poll()
            if stop is not None:
                log.info("the run is %s: %s", stop.state, stop.reason)
                await self.shutdown(stop).run()
                return stop
            await asyncio.sleep(self.config.supervise.poll_interval_s)

    def shutdown(self, stop: Stop) -> Shutdown:
        """The end of the members. Those that work get more time, unless the run was cancelled or
        failed: a trainer saves its checkpoint.
        """
        return Shutdown(
            launcher=self.launcher,
            processes=self.processes,
            heartbeat=self.heartbeat,
            clock=self.clock,
            poll_interval_s=self.config.supervise.poll_interval_s,
            leave_within_s=self.leave_within_s,
            patient=stop.state in PLANNED_ENDS,
        )

    async def poll(self) -> Stop | None:
        """Poll store and Prefect once and act; returns the stored Stop once the run is over.

        While the store does not answer nothing is decided. A store that cannot be used without a
        person's correction ends the run; its members are then ended through Prefect.
        """
        if self._store_unreachable_since is None:
            self._store_unreachable_since = self.clock()
        try:
            stop = await asyncio.to_thread(runs.read_stop, self.run)
            if stop is not None:
                self.over = stop
                return stop
            if self.over is None:
                reached = await self._poll_members()
                self.over = self.over or reached  # a cancellation may have come meanwhile
            if self.over is None:
                return None
            self.over = await asyncio.to_thread(runs.request_stop, self.run, self.over)
            return self.over
        except TransientError as error:
            log.warning("the store does not answer: %s", error)
            return None
        except (ConfigError, CorruptError) as error:
            log.error("the run cannot go on: %s", error)
            return Stop("failed", str(error), time.time())

    async def _poll_members(self) -> Stop | None:
        """Read the state of all members and act; a Stop when the run is over. While Prefect does
        not answer no member is launched or declared lost.
        """
        used_up = await asyncio.to_thread(self._read_store)
        if all(watch.is_over for watch in self.watches.values()):
            return Stop(
                "completed", f"all policies reached version {self.config.steps}", time.time()
            )
        if used_up:
            return Stop("exhausted", used_up, time.time())
        newest = await self.launcher.newest()
        if newest is None:
            self._report(
                WaitReason.PREFECT, "waiting for the Prefect server, which does not answer"
            )
            return None
        for watch in self.watches.values():
            if watch.member.id in newest:
                watch.observe_flow_run(newest[watch.member.id], self._now())
        stop = await self._act_on_all()
        note = waiting_note(self.watches, self._now())
        self._report(WaitReason.MEMBERS if note else WaitReason.NONE, note)
        return stop

    async def _act_on_all(self) -> Stop | None:
        launches: Counter[tuple[str, str]] = Counter()
        try:
            for watch in self.watches.values():
                stop = await self._act(watch, launches)
                if stop is not None:
                    return stop
        except ConfigError as error:
            log.error("the run cannot go on: %s", error)
            return Stop("failed", str(error), time.time())
        return None

    def _report(self, wait_reason: WaitReason, note: str) -> None:
        self.heartbeat.update(
            state=ServiceState.WORKING,
            wait_reason=wait_reason,
            note=note,
        )

    def _now(self) -> float:
        """The clock by which members are judged. It stops while the store cannot be read, when no
        heartbeat can be seen.
        """
        return self.clock() - self._store_unreachable_s

    def _read_store(self) -> str:
        """Note heartbeats and finished work; return the budgets that are used up."""
        beats = {beat.id: beat for beat in self._heartbeats()}
        used_up = self.budget.measure(beats.values())
        finished = [
            watch
            for watch in self.watches.values()
            if not watch.done and is_done(self.run, self.config, watch.member)
        ]
        if self._store_unreachable_since is not None:
            self._store_unreachable_s += self.clock() - self._store_unreachable_since
            self._store_unreachable_since = None
        now = self._now()
        for watch in finished:
            watch.done, watch.done_at = True, now
            log.info("%s has done its work", watch.member.id)
        for watch in self.watches.values():
            if (beat := beats.get(watch.member.id)) is not None:
                watch.observe_heartbeat(beat, now)
        num_done = sum(watch.done for watch in self.watches.values())
        progress = SupervisorProgress(members=len(self.watches), members_done=num_done)
        self.heartbeat.update(progress=progress)
        return used_up

    def _heartbeats(self) -> list[Heartbeat]:
        """Read all readable heartbeats of attempts that were launched; the others are logged once.

        Raises:
            ConfigError: the heartbeats cannot be listed.
        """
        newest = {
            member: watch.launched.attempt
            for member, watch in self.watches.items()
            if watch.launched
        }
        seen = heartbeats.launchable(heartbeats.read_all(self.run), newest)
        if layout.HEARTBEATS in seen.unreadable:
            raise ConfigError(seen.unreadable[layout.HEARTBEATS])
        for key in seen.unreadable.keys() - self._unreadable:
            log.warning(
                "a heartbeat cannot be read, its member is taken for silent: %s",
                seen.unreadable[key],
            )
        self._unreadable = set(seen.unreadable)
        return seen.beats

    @property
    def _limits(self) -> SilenceLimits:
        settings = self.config.supervise
        return SilenceLimits(
            launch_s=settings.launch_timeout_s,
            heartbeat_s=settings.heartbeat_limit_s,
            stop_s=settings.stop_timeout_s,
        )

    async def _act(self, watch: MemberWatch, launches: Counter[tuple[str, str]]) -> Stop | None:
        now = self._now()
        if watch.abandoned or now < watch.not_before:
            return None
        decision = watch.decide(now, await self._works(watch, now), self._limits)
        if decision is Decision.RETIRE and watch.launched is not None:
            if watch.logged_retired != watch.launched.flow_run_id:
                watch.logged_retired = watch.launched.flow_run_id
                log.info("%s has done its work and not left: cancelling it", watch.member.id)
            await self.launcher.cancel(watch.launched)
        if decision is Decision.LOST and watch.launched is not None:
            await self._declare_lost(watch, watch.launched)
            decision = Decision.LAUNCH
        queue = (watch.member.deployment, watch.member.queue)
        if decision is Decision.LAUNCH and launches[queue] < _LAUNCHES_AT_ONCE:
            launches[queue] += 1
            return await self._launch(watch)
        return None

    async def _declare_lost(self, watch: MemberWatch, launched: Launched) -> None:
        """Declare the attempt crashed and end its process here, which would slow the next one."""
        log.warning("%s is lost: attempt %d is silent", watch.member.id, launched.attempt)
        await self.launcher.declare_crashed(launched, "its heartbeat in the object store stopped")
        await asyncio.to_thread(self.processes.terminate, launched.flow_run_id)
        watch.launched = replace(launched, phase=FlowRunPhase.ENDED, state_name="no heartbeat")

    async def _works(self, watch: MemberWatch, now: float) -> bool:
        """Whether the member's process runs here and works. It is not measured before the member
        has been silent for half of its limit.
        """
        launched = watch.launched
        if launched is None:
            return False
        since, limit_s = watch.silence(self._limits)
        running = launched.phase in (FlowRunPhase.PENDING, FlowRunPhase.RUNNING)
        if not running or now - since <= limit_s / 2:
            self.processes.forget(launched.flow_run_id)
            return False
        idle_s = await asyncio.to_thread(self.processes.idle_s, launched.flow_run_id)
        works = idle_s is not None and idle_s < limit_s / 2
        if works and now - since > limit_s and watch.logged_slow != launched.flow_run_id:
            watch.logged_slow = launched.flow_run_id
            log.warning(
                "%s %s %.0f s ago, but its process works: waiting for it",
                watch.member.id,
                "was done" if watch.done else "gave its last sign of life",
                now - since,
            )
        return works

    async def _launch(self, watch: MemberWatch) -> Stop | None:
        """Start the member's next attempt, unless too many in a row ended soon."""
        now, attempt = self._now(), watch.attempt + 1
        ended = watch.launched
        if ended is not None and ended.attempt > watch.counted:
            self._count_end(watch, ended)
            if watch.seen_active:
                await self._log_last_words(watch.member.id, ended)
            await self.launcher.bury([ended])
            if watch.failures > self.config.supervise.restarts_max:
                return self._give_up(watch)
            watch.not_before = now + backoff_s(watch.failures, _RELAUNCH_S, _RELAUNCH_MAX_S)
        launched = await self.launcher.launch(watch.member, attempt)
        if launched is not None:
            watch.begin_attempt(launched, now)
            self.events.add_attempt("member.launched", watch.member.id, launched)
            log.info("%s: attempt %d is launched", watch.member.id, attempt)
        return None

    def _count_end(self, watch: MemberWatch, ended: Launched) -> None:
        """Count the end of an attempt as a failure, unless it ended before this supervisor began:
        it may have been cancelled with the run, which is resumed now.
        """
        watch.counted = ended.attempt
        if watch.seen_active:
            self.events.add_attempt("member.lost", watch.member.id, ended, reason=ended.state_name)
            lived_s = watch.beat_at - watch.launched_at
            lived = lived_s > _LIVED_FACTOR * self.config.supervise.heartbeat_limit_s
            watch.failures = 1 if lived else watch.failures + 1
        log.log(
            logging.WARNING if watch.seen_active else logging.INFO,
            "%s %s (%s): launching #%d",
            watch.member.id,
            "ended before its work was done" if watch.seen_active else "is taken up again",
            ended.state_name,
            watch.attempt + 2,  # attempts are numbered from 0, names from 1
        )

    async def _log_last_words(self, member: str, ended: Launched) -> None:
        """Log how the attempt's process ended, and the end of its log."""
        lines = await self.launcher.last_words(ended)
        how = last_words.exit_words(ended.message) or ended.state_name
        end = "".join(f"\n  | {line}" for line in lines) or " nothing"
        log.warning("%s: attempt %d ended: %s. It wrote last:%s", member, ended.attempt, how, end)

    def _give_up(self, watch: MemberWatch) -> Stop | None:
        """Abandon a member that keeps ending. That fails the run, except for a rollout worker that
        is not the last one.
        """
        watch.abandoned = True
        note = f", the last time with: {watch.note}" if watch.note else ""
        reason = (
            f"{watch.member.id} ended {watch.failures} times in a row without finishing{note}; "
            "its flow run's log says more"
        )
        log.error(reason)
        if watch.member.kind == "rollout" and any(
            other.member.kind == "rollout" and not other.abandoned
            for other in self.watches.values()
        ):
            return None
        return Stop("failed", reason, time.time())


def start(store: ObjectStore, run_id: str, config: RunConfig, deployment: str) -> ObjectStore:
    """Open the run, or create it; resume a run that was stopped before. One that is completed keeps
    its stop: its members are ended, and its closing steps taken again.

    Raises ConfigError for a run whose closing steps were taken, and what `create` raises.
    """
    run = create(store, run_id, config, deployment)
    resolved = config.model_dump(mode="json")
    stop = runs.check_restart(
        store, run_id, resolved, stored_config.comparable, closing_steps.all_taken
    )
    if stop is not None:
        log.info("taking up run %s, which was %s", run_id, stop.state)
        runs.clear_stop(run)
    return run


def create(store: ObjectStore, run_id: str, config: RunConfig, deployment: str) -> ObjectStore:
    """Open the run, or create it.

    A new run gets the numbers of the versions of other runs that it begins with, and the rows of
    its data windows. For a run that exists neither is looked up.

    Raises:
        EmptyWindowError: a data window has no row; nothing was stored.
        ConfigError: the run exists with another configuration; a version that it begins with does
            not exist; the files of a data window cannot be used.
    """
    resolved = config.model_dump(mode="json")
    models = {policy: spec.model for policy, spec in config.policies.items()}
    new = store.sub(layout.run_prefix(run_id))
    exists = new.exists(layout.RUN)
    origins = {} if exists else resolve(store, models)
    windows = {} if exists else prompt_windows.freeze(new, config)
    return runs.create_run(
        store,
        run_id,
        resolved,
        deployment=deployment,
        fill_defaults=stored_config.comparable,
        origins=origins,
        windows=windows,
    )
