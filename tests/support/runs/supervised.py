"""A supervised run for tests: a hand-written launcher, a store that can be unreachable, and a
manual clock.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.errors import ConfigError, TransientError
from storage.records.control import Stop
from storage.run import runs
from storage.store.backend import Backend
from storage.store.object_store import ObjectStore
from tasks.recipes import loader
from tasks.recipes.run_config import RunConfig
from tasks.supervision import supervisor
from tasks.supervision.flow_processes import FlowProcesses
from tasks.supervision.launcher import Launched
from tasks.supervision.members import FlowRunPhase, Member
from tests.support.runs import builders


class ScriptedLauncher:
    """Flow runs as a dict that the test changes."""

    def __init__(self) -> None:
        self.runs: dict[str, Launched] = {}
        self.launched: list[tuple[str, int]] = []
        self.cancelled: list[str] = []
        self.crashed: list[str] = []
        self.buried: list[str] = []
        self.away = False
        self.refuses = False
        self.lacks: tuple[str, ...] = ()
        self.words: dict[str, list[str]] = {}
        """Flow run → the last lines of its log."""

    async def launch(self, member: Member, attempt: int) -> Launched | None:
        if member.deployment in self.lacks:
            raise ConfigError(f"no deployment {member.deployment!r}")
        if self.away or self.refuses:
            return None
        self.launched.append((member.id, attempt))
        self.runs[member.id] = Launched(
            attempt, FlowRunPhase.SCHEDULED, f"{member.id}-{attempt}", "Scheduled"
        )
        return self.runs[member.id]

    async def newest(self) -> Mapping[str, Launched] | None:
        return None if self.away else dict(self.runs)

    async def declare_crashed(self, launched: Launched, reason: str) -> None:
        self.crashed.append(launched.flow_run_id)

    async def cancel(self, launched: Launched) -> None:
        self.cancelled.append(launched.flow_run_id)
        for member, found in self.runs.items():
            if found == launched and found.phase is not FlowRunPhase.RUNNING:
                self.set(member, FlowRunPhase.ENDED)

    async def bury(self, ended: Sequence[Launched]) -> None:
        self.buried += [launched.flow_run_id for launched in ended]

    async def last_words(self, ended: Launched) -> Sequence[str]:
        return self.words.get(ended.flow_run_id, [])

    def set(self, member: str, phase: FlowRunPhase, message: str = "") -> None:
        self.runs[member] = replace(
            self.runs[member], phase=phase, state_name=phase.value, message=message
        )


class Interrupted:
    """A backend that can be unreachable completely or for the writers of new objects."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.away = False
        self.read_only = False
        self.refusals = 0
        self.noticed, self.lasted = threading.Event(), threading.Event()
        """Set by the first call that an outage fails, and after several looks' worth of them."""

    def __getattr__(self, verb: str) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            if self.away or (self.read_only and verb == "create"):
                self.refusals += 1
                self.noticed.set()
                if self.refusals >= 6:
                    self.lasted.set()
                raise TransientError("the store is away")
            return getattr(self.backend, verb)(*arguments)

        return call


class World:
    """One supervised run with a launcher that the test changes, and a manual clock."""

    def __init__(self, store: ObjectStore, **changes: object) -> None:
        self.overrides = {
            "steps": 1,
            "supervise.restarts_max": 2,
            "supervise.stop_timeout_s": 0.01,
            "supervise.poll_interval_s": 0.01,
            **changes,
        }
        self.config: RunConfig = loader.load("multi_policy_tiny", self.overrides)
        self.run = supervisor.start(store, "run", self.config, "")
        self.backend = Interrupted(self.run.backend)
        self.now_s = 1000.0
        self.wall_s = runs.read_run(self.run).created_s
        """The wall clock, which a test may set."""
        self.launcher = ScriptedLauncher()
        self.cpu_s: dict[str, float] = {}
        """Flow run → CPU time of its process on this machine."""
        self.terminated: list[str] = []
        """Flow runs whose process got SIGTERM."""
        self.supervisor = self.restarted()

    def restarted(self, **changes: object) -> supervisor.Supervisor:
        """A new supervisor; `changes` replace settings of its recipe."""
        if changes:
            self.config = loader.load("multi_policy_tiny", {**self.overrides, **changes})
            supervisor.start(runs.store_of(self.run), "run", self.config, "")
        heartbeat = HeartbeatWriter(self.run, "supervisor", "supervisor", 0, 60.0)
        run = replace(self.run, backend=self.backend, patience_s=0.01)  # type: ignore[arg-type]  # it passes every verb on
        clock = lambda: self.now_s  # noqa: E731 - two objects share it
        processes = FlowProcesses(self.cpu_s.get, clock, lambda: 1.0, self.terminated.append)
        return supervisor.Supervisor(
            run=run,
            config=self.config,
            heartbeat=heartbeat,
            launcher=self.launcher,
            clock=clock,
            wall_clock=lambda: self.wall_s,
            processes=processes,
        )

    def look(self, rounds: int = 1, seconds: float = 1.0) -> Stop | None:
        stop = None
        for _ in range(rounds):
            self.now_s += seconds
            self.wall_s += seconds
            stop = asyncio.run(self.supervisor.poll())
        return stop

    def run_all(self) -> None:
        for member in self.launcher.runs:
            self.launcher.set(member, FlowRunPhase.RUNNING)

    def beat(self, beats: int, *members: str, attempt: int = 0) -> None:
        for member in members or self.launcher.runs:
            kind = self.supervisor.watches[member].member.kind
            beat = builders.heartbeat(kind, member, attempt=attempt, beats=beats)
            builders.put_heartbeat(self.run, beat)
