"""Starts, watches, replaces and ends the members of one run. Its memory is the store and Prefect: its process may die.

every poll:  store + Prefect + heartbeats ──▶ decide(member) ──▶ launch | lost | retire | keep
run over  =  every member's work is done, or somebody asked it to stop (`stop.json`)
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from storage import heartbeats, runs
from storage.errors import ConfigError, TransientError
from storage.heartbeats import Pulse
from storage.objects import ObjectStore
from storage.records import Stop
from tasks.config import RunConfig
from tasks.launcher import Launched
from tasks.members import Decision, Member, Phase, Seen, decide, is_done, members_of

log = logging.getLogger(__name__)

_LAUNCHES_AT_ONCE = 3
"""Process workers start this many flow processes of one deployment's pool without slowing each other down."""
_BACKOFF_MAX_S = 30.0
_KILL_TIMEOUT_S = 35.0
"""Prefect kills a cancelled flow run that has not left after 30 s."""


class Launcher(Protocol):
    """Where flow runs come from: Prefect (`tasks.launcher.PrefectLauncher`)."""

    async def launch(self, member: Member, attempt: int) -> Launched | None: ...
    async def newest(self) -> Mapping[str, Launched] | None: ...
    async def declare_crashed(self, launched: Launched, reason: str) -> None: ...
    async def cancel(self, launched: Launched) -> None: ...
    async def bury(self, ended: Sequence[Launched]) -> None: ...


@dataclass
class _Watch:
    """What this supervisor process remembers of one member between two looks."""

    member: Member
    launched: Launched | None = None
    launched_at: float = 0.0
    beat: tuple[int, int] | None = None
    """(attempt, beats) of the heartbeat last seen."""
    beat_at: float = 0.0
    done: bool = False
    done_at: float = 0.0
    failures: int = 0
    """Attempts in a row that ended before they had lived for a while."""
    not_before: float = 0.0
    abandoned: bool = False
    seen_active: bool = False
    """This supervisor saw a flow run of it that had not ended; before that, what ended may have been cancelled long ago."""
    last_words: str = ""
    """The note of its last heartbeat."""


@dataclass
class Supervisor:
    run: ObjectStore
    config: RunConfig
    pulse: Pulse
    launcher: Launcher
    clock: Callable[[], float] = time.monotonic
    watches: dict[str, _Watch] = field(init=False)

    leave_within_s: float = field(init=False)
    """Time for the members to leave by themselves when the run ends."""

    def __post_init__(self) -> None:
        self.leave_within_s = self.config.supervise.stop_timeout_s
        self.watches = {member.id: _Watch(member) for member in members_of(self.config)}

    async def supervise(self) -> Stop:
        """Keeps the run going until it is over; returns why it ended. Its members have left by then."""
        while True:
            stop = await asyncio.to_thread(runs.read_stop, self.run)
            if stop is None:
                stop = await self._look()
            if stop is not None:
                await self._wind_down()
                return stop
            await asyncio.sleep(self.config.supervise.poll_interval_s)

    async def _look(self) -> Stop | None:
        """One round over all members; a Stop when the run is over."""
        try:
            await asyncio.to_thread(self._read_store)
        except TransientError as error:
            log.warning("the store does not answer: %s", error)
            return None
        if all(watch.done or watch.abandoned for watch in self.watches.values()):
            return await self._stop("completed", f"all policies reached version {self.config.steps}")
        await self._read_prefect()
        launches: dict[str, int] = {}
        for watch in self.watches.values():
            failed = await self._act(watch, launches)
            if failed is not None:
                return failed
        return None

    def _read_store(self) -> None:
        now = self.clock()
        beats = {beat.id: beat for beat in heartbeats.read_all(self.run)}
        for watch in self.watches.values():
            if not watch.done and is_done(self.run, self.config, watch.member):
                watch.done, watch.done_at = True, now
            beat = beats.get(watch.member.id)
            if beat is not None and (beat.attempt, beat.beats) != watch.beat:
                watch.beat, watch.beat_at, watch.last_words = (beat.attempt, beat.beats), now, beat.note
        preparing = beats.get("base-model")
        if preparing is not None and "base_model" in preparing.progress:
            self.pulse.update(progress={"base_model": preparing.progress["base_model"]})
        # What a person should hear comes from whoever the others wait for: first the base model, then the dataflow.
        speaker = beats.get("dataflow") if self.watches["base-model"].done else preparing
        self.pulse.update(note=speaker.note if speaker else "")
        done = [watch.member.id for watch in self.watches.values() if watch.done]
        self.pulse.update(state="working", progress={"members": len(self.watches), "members_done": len(done)})

    async def _read_prefect(self) -> None:
        newest = await self.launcher.newest()
        for watch in self.watches.values():
            if newest is None:
                if watch.launched is not None:
                    watch.launched = Launched(watch.launched.attempt, Phase.UNKNOWN, watch.launched.flow_run_id, "unknown")
                continue
            found = newest.get(watch.member.id)
            if found is not None:
                if watch.launched is None:
                    watch.launched_at = self.clock()
                watch.launched = found
                watch.seen_active = watch.seen_active or found.phase is not Phase.ENDED

    async def _act(self, watch: _Watch, launches: dict[str, int]) -> Stop | None:
        settings = self.config.supervise
        now = self.clock()
        if watch.abandoned or now < watch.not_before:
            return None
        launched = watch.launched
        # A heartbeat that has not changed since the launch may be a former life's, left in the store.
        mine = watch.beat is not None and launched is not None and watch.beat[0] == launched.attempt
        mine = mine and watch.beat_at > watch.launched_at
        seen = Seen(
            done=watch.done,
            phase=launched.phase if launched else Phase.NONE,
            since_launch_s=now - watch.launched_at,
            silent_s=now - watch.beat_at if mine else None,
            since_done_s=now - watch.done_at,
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
            await self.launcher.declare_crashed(launched, "its heartbeat in the object store stopped")
            watch.launched = replace(launched, phase=Phase.ENDED, state_name="no heartbeat")
            decision = Decision.LAUNCH
        if decision is Decision.LAUNCH and launches.get(watch.member.deployment, 0) < _LAUNCHES_AT_ONCE:
            launches[watch.member.deployment] = launches.get(watch.member.deployment, 0) + 1
            return await self._launch(watch)
        return None

    async def _launch(self, watch: _Watch) -> Stop | None:
        """Start the member's next attempt, unless it keeps dying young."""
        now = self.clock()
        attempt = 0
        if (ended := watch.launched) is not None:
            attempt = ended.attempt + 1
            lived_s = watch.beat_at - watch.launched_at
            watch.failures = 1 if lived_s > 3 * self.config.supervise.heartbeat_limit_s else watch.failures + 1
            if watch.seen_active:
                found, level = "ended before its work was done", logging.WARNING
            else:
                found, level = "is taken up again", logging.INFO
            log.log(level, "%s %s (%s): launching attempt %d", watch.member.id, found, ended.state_name, attempt)
            await self.launcher.bury([ended])
            if watch.failures > self.config.supervise.restarts_max:
                return await self._give_up(watch)
            watch.not_before = now + min(2.0 ** (watch.failures - 1), _BACKOFF_MAX_S)
        launched = await self.launcher.launch(watch.member, attempt)
        if launched is not None:
            watch.launched, watch.launched_at, watch.seen_active = launched, now, True
        return None

    async def _give_up(self, watch: _Watch) -> Stop | None:
        """A member that cannot live fails the run; a rollout worker only when it was the last of its kind."""
        watch.abandoned = True
        said = f", the last time with: {watch.last_words}" if watch.last_words else ""
        reason = (
            f"{watch.member.id} ended {watch.failures} times in a row without finishing{said}; its flow run's log says more"
        )
        log.error(reason)
        if watch.member.kind == "rollout" and any(
            other.member.kind == "rollout" and not other.abandoned for other in self.watches.values()
        ):
            return None
        return await self._stop("failed", reason)

    async def _stop(self, state: str, reason: str) -> Stop:
        stop = Stop(state=state, reason=reason, at_s=time.time())  # type: ignore[arg-type]  # one of the three literals
        return await asyncio.to_thread(runs.request_stop, self.run, stop)

    async def _wind_down(self) -> None:
        """Members see `stop.json` and leave; who has not begun, or does not leave within the limit, is cancelled."""
        found = await self.launcher.newest() or {}
        for launched in found.values():
            if launched.phase is Phase.PENDING:
                await self.launcher.cancel(launched)
        if not await self._all_left(self.leave_within_s):
            for member, launched in (await self.launcher.newest() or {}).items():
                if launched.phase is not Phase.ENDED:
                    log.warning("cancelling %s, which did not leave by itself", member)
                    await self.launcher.cancel(launched)
            await self._all_left(_KILL_TIMEOUT_S)
        await self.launcher.bury(list(found.values()))

    async def _all_left(self, limit_s: float) -> bool:
        """Whether every member's flow run has ended, waited for up to `limit_s`."""
        deadline = self.clock() + limit_s
        while True:
            newest = await self.launcher.newest()
            if newest is not None and all(found.phase is Phase.ENDED for found in newest.values()):
                return True
            if self.clock() >= deadline:
                return False
            await asyncio.sleep(self.config.supervise.poll_interval_s / 4)


def start(store: ObjectStore, run_id: str, config: RunConfig, deployment: str) -> ObjectStore:
    """Open the run, or create it. A run that was stopped before is taken up again; a completed one is refused.

    Raises:
        ConfigError: the run exists with another configuration, or is completed.
    """
    run = runs.create_run(store, run_id, config.model_dump(mode="json"), deployment=deployment)
    stop = runs.read_stop(run)
    if stop is not None and stop.state == "completed":
        raise ConfigError(f"run {run_id} is completed; choose another run id")
    if stop is not None:
        log.info("taking up run %s, which was %s", run_id, stop.state)
        runs.clear_stop(run)
    return run
