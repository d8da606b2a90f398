"""What a supervisor process remembers of one member between two polls."""

from dataclasses import dataclass

from storage.records.control import Heartbeat
from tasks.supervision.launcher import Launched
from tasks.supervision.members import Decision, FlowRunPhase, Member, Seen, decide


@dataclass(kw_only=True)
class MemberWatch:
    """Times are those of the supervisor's clock, which stops while the store does not answer."""

    member: Member
    launched: Launched | None = None
    """Its newest flow run."""
    launched_at: float = 0.0
    taken_at: float = 0.0
    """When a worker took it; until then, when it was last seen without a worker."""
    beat: tuple[int, int] | None = None
    """(attempt, beats) of the newest attempt's last heartbeat."""
    beat_at: float = 0.0
    """When that heartbeat was first seen."""
    state: str = ""
    """State in that heartbeat."""
    note: str = ""
    """Note in that heartbeat."""
    done: bool = False
    done_at: float = 0.0
    failures: int = 0
    """Attempts in a row that ended soon after their launch."""
    counted: int = -1
    """The attempt whose end was last counted."""
    not_before: float = 0.0
    """No attempt is launched before this time."""
    abandoned: bool = False
    """No further attempt is launched."""
    seen_active: bool = False
    """This supervisor saw a flow run of it that had not ended; before that, what ended may have
    been cancelled long ago.
    """
    logged_slow: str = ""
    """The flow run that was last logged as slow."""
    logged_retired: str = ""
    """The flow run that was last logged as cancelled after its work."""

    @property
    def attempt(self) -> int:
        """The newest attempt in Prefect or the store; -1 before the first."""
        return max(
            self.launched.attempt if self.launched else -1, self.beat[0] if self.beat else -1
        )

    @property
    def has_beaten(self) -> bool:
        """Whether the newest attempt has written a heartbeat."""
        return (
            self.beat is not None
            and self.launched is not None
            and self.beat[0] == self.launched.attempt
        )

    @property
    def phase(self) -> FlowRunPhase:
        return self.launched.phase if self.launched else FlowRunPhase.NONE

    @property
    def is_over(self) -> bool:
        """Whether nothing more is expected of the member."""
        return self.done or self.abandoned

    def observe_heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Note a heartbeat, unless it is the last one or one of an older attempt that lives on."""
        if beat.attempt >= self.attempt and (beat.attempt, beat.beats) != self.beat:
            self.beat, self.beat_at = (beat.attempt, beat.beats), now
            self.state, self.note = beat.state, beat.note

    def observe_flow_run(self, newest: Launched, now: float) -> None:
        """Note the member's newest flow run, whichever supervisor launched it."""
        if self.launched is None:
            self.launched_at = now
        if self.launched is None or newest.phase is FlowRunPhase.SCHEDULED:
            self.taken_at = now
        self.launched = newest
        self.seen_active = self.seen_active or newest.phase is not FlowRunPhase.ENDED

    def begin_attempt(self, launched: Launched, now: float) -> None:
        self.launched, self.launched_at, self.taken_at = launched, now, now
        self.seen_active = True

    def decide(self, now: float, works: bool, limits: "SilenceLimits") -> Decision:
        """Decide about the member; `works`: its process was found here and used CPU time lately."""
        seen = Seen(
            done=self.done,
            phase=self.phase,
            since_launch_s=now - self.taken_at,
            silent_s=now - self.beat_at if self.has_beaten else None,
            since_done_s=now - self.done_at,
            works=works,
            failures=self.failures,
        )
        return decide(
            seen,
            launch_timeout_s=limits.launch_s,
            heartbeat_limit_s=limits.heartbeat_s,
            stop_timeout_s=limits.stop_s,
        )

    def silence(self, limits: "SilenceLimits") -> tuple[float, float]:
        """(since when the member is silent, how many seconds it may be), for its present phase."""
        if self.done:
            return self.done_at, limits.stop_s
        if self.has_beaten:
            return self.beat_at, limits.heartbeat_s
        return self.taken_at, limits.launch_s


@dataclass(frozen=True, kw_only=True)
class SilenceLimits:
    """Seconds without a sign of life, for a process that is not seen to work."""

    launch_s: float
    """From the launch to the first heartbeat."""
    heartbeat_s: float
    """Between two heartbeats."""
    stop_s: float
    """From the end of its work to the end of its flow run."""
