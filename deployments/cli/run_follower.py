"""Follows one run from a terminal until it has ended: gathers what is shown, asks on Ctrl-C, and
prints the end.

The run does not depend on this process. The view of the training comes from the store, and the
state of the supervisor's flow run from Prefect.
"""

import math
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import get_args

import psutil
from rich.console import Console
from rich.live import Live

from deployments.cli.output import live_view
from deployments.cli.output.live_view import View
from deployments.paths import Home
from deployments.registration import flow_runs
from deployments.registration.flow_runs import FlowRun
from deployments.stack import environment, up_down
from storage import layout
from storage.coordination import heartbeats
from storage.errors import AstraFlowError, ConfigError, TransientError
from storage.records.control import RunEnd, Stop
from storage.records.progress import BaseModelProgress
from storage.run import runs
from storage.store.object_store import ObjectStore
from tasks.monitoring.status import Status, status
from tasks.services.prefect_settings import POLL
from tasks.supervision.flow_processes import FlowProcesses

POLL_S = 1.0
LINE_INTERVAL_S = 5.0
"""Between two lines where there is no terminal to draw on."""
FLOW_POLL_S = 3.0
FINISH_TIMEOUT_S = 180.0
"""A supervisor without a sign of life for this time after the run's end is not waited for. The CPU
time of a process on this machine is one, here and below: it is slow, not dead.
"""
AWAY_LIMIT_S = 60.0
"""A supervisor without a heartbeat is dead if Prefect does not answer for this time either; one of
the two alone may be slow. One whose process is on this machine is not dead.
"""
SUCCESSOR_ANSWERS = 30
"""Answers of Prefect's server, FLOW_POLL_S apart or more, within which an automation starts a dead
supervisor again. A server that is slow or away answers later; the wait then takes longer.
"""
CRASHED = "Crashed"
"""Prefect's state of a supervisor whose process was killed."""
ENDED = get_args(RunEnd)


@dataclass(frozen=True, kw_only=True)
class Followed:
    """A run, and the addresses of its supervisor's flow run."""

    store: ObjectStore
    run_id: str
    api_url: str
    flow_run_id: str
    """Empty while it is not known."""
    links: dict[str, str]
    home: Home
    previous_stop: Stop | None = None
    """The stop of an earlier start of the run; until the new supervisor deletes it, this start has
    not begun.
    """
    elapsed_s: float = 0.0
    """Age of the run when the following begins."""


def _read_flow(followed: Followed, flow_run_id: str) -> FlowRun:
    """Return the supervisor's flow run; the one that was started in its place, if it crashed."""
    if not followed.api_url:
        raise ConfigError("no Prefect server is known")
    flow = flow_runs.read(followed.api_url, flow_run_id, POLL) if flow_run_id else None
    if flow is not None and flow.state != CRASHED:
        return flow
    newest = flow_runs.newest_supervisor(followed.api_url, followed.run_id, POLL)
    if newest is not None and (flow is None or newest.created_s > flow.created_s):
        return newest
    if flow is None:
        raise ConfigError(f"Prefect has no flow run of {followed.run_id}")
    return flow


class Follower:
    """Polls a run until it has ended. `ask` asks the person a question; without it, Ctrl-C leaves
    the run. `read_flow` reads a flow run from Prefect.
    """

    def __init__(
        self,
        followed: Followed,
        console: Console,
        ask: Callable[[str], str] | None = input,
        read_flow: Callable[[Followed, str], FlowRun] = _read_flow,
    ) -> None:
        self.followed = followed
        self.console = console
        self.ask = ask
        self.read_flow = read_flow
        self.started = time.monotonic() - followed.elapsed_s
        self.flow = FlowRun(followed.flow_run_id, "", False, "")
        self.flow_seen = -math.inf
        self.prefect_unreachable = False
        self.ended_at: float | None = None
        self.lost_at: float | None = None
        self.lives_here = False
        self.processes = FlowProcesses()
        self.crashed_answers = 0
        """Answers in a row that the supervisor crashed, and that no other one was started."""
        self.asked = False
        self.seen: Status | None = None
        """The newest status that was read."""

    def follow(self) -> Status | None:
        """Follow the run to its end; returns its last status, None when the person left it running.

        Raises:
            AstraFlowError: the supervisor died; the message has the end of its log.
        """
        while True:
            try:
                return self._until_over()
            except KeyboardInterrupt:
                if self._shall_leave():
                    return None

    def _until_over(self) -> Status:
        if not self.console.is_terminal:
            return self._loop(_lines(self.console))
        with Live(console=self.console, auto_refresh=False, transient=False) as picture:
            return self._loop(lambda view: picture.update(live_view.picture(view), refresh=True))

    def _loop(self, show: Callable[[View], None]) -> Status:
        while True:
            view = self._look()
            show(view)
            if self._is_over(view.status):
                return self._last(view.status)
            time.sleep(POLL_S)

    def _look(self) -> View:
        run_id, store = self.followed.run_id, self.followed.store
        if time.monotonic() - self.flow_seen > FLOW_POLL_S:
            self._ask_prefect()
        run = store.sub(layout.run_prefix(run_id))
        base_model, note = None, ""
        seen = None
        try:
            if self._has_begun(run):
                seen = status(store, run_id)
                self.lives_here = seen.state == "interrupted" and supervisor_lives_here(run)
                base_model, note = _base_model(run)
                if seen.state in ENDED:
                    note = "" if seen.supervisor_has_ended else "waiting for its supervisor to end"
                self.seen = seen
        except TransientError as error:
            note = f"the store does not answer: {error}"
        return View(
            run_id=run_id,
            elapsed_s=time.monotonic() - self.started,
            flow_state=self.flow.state,
            status=seen,
            base_model=base_model,
            note=note,
            links=self.followed.links,
        )

    def _ask_prefect(self) -> None:
        self.flow_seen = time.monotonic()
        try:
            self.flow = self.read_flow(self.followed, self.flow.id)
            self.prefect_unreachable = False
            self.crashed_answers = self.crashed_answers + 1 if self.flow.state == CRASHED else 0
        except ConfigError:  # for a while: the run goes on, and so does its picture
            self.prefect_unreachable = True

    def _is_over(self, seen: Status | None) -> bool:
        """Whether the supervisor has ended: its flow run is final or suspended and no other one was
        started in its place, or neither it nor Prefect answers, or, after the run's end, its last
        heartbeat says so while Prefect does not answer, or it has shown no sign of life since.
        """
        now = time.monotonic()
        lost = self.prefect_unreachable and seen is not None and seen.state == "interrupted"
        if not lost:
            self.lost_at = None
        elif self.lost_at is None or self.lives_here or self._works(AWAY_LIMIT_S):
            self.lost_at = now
        is_suspended = self.flow.is_suspended and seen is not None and seen.state == "suspended"
        if is_suspended and seen is not None and seen.closing is None:
            return True
        is_given_up = self.flow.state != CRASHED or self.crashed_answers >= SUCCESSOR_ANSWERS
        if (self.flow.final and is_given_up) or (
            self.lost_at is not None and now - self.lost_at >= AWAY_LIMIT_S
        ):
            return True
        if seen is None or seen.state not in ENDED:
            return False
        if self.prefect_unreachable and seen.supervisor_has_ended:
            return True
        if self.ended_at is None or seen.closing is not None or self._works(FINISH_TIMEOUT_S):
            self.ended_at = now
        return now - self.ended_at > FINISH_TIMEOUT_S

    def _works(self, limit_s: float) -> bool:
        """Whether the supervisor's process runs on this machine, and used CPU time lately."""
        idle_s = self.processes.idle_s(self.flow.id)
        return idle_s is not None and idle_s < limit_s

    def _has_begun(self, run: ObjectStore) -> bool:
        """Whether the store shows this start of the run, and not only an earlier one that ended."""
        return run.exists(layout.RUN) and (
            self.followed.previous_stop is None
            or runs.read_stop(run) != self.followed.previous_stop
        )

    def _last(self, seen: Status | None) -> Status:
        """Return the run's last status; AstraFlowError with the end of the supervisor's log when
        only the supervisor has ended.
        """
        if seen is not None and seen.state in ENDED:
            return seen
        run_id, flow = self.followed.run_id, self.flow
        if flow.state == "Failed" and flow.message:
            raise AstraFlowError(f"{run_id}: {flow.message}")
        if seen is None:
            what = "never began" if self.followed.previous_stop is None else "was not resumed"
            raise AstraFlowError(
                f"the run {run_id} {what}: its flow run ended as {flow.state}. "
                f"{last_words(self.followed, self.flow.id)}"
            )
        alone = (
            f", and none was started in its place while Prefect answered {SUCCESSOR_ANSWERS} times"
            if self.crashed_answers >= SUCCESSOR_ANSWERS
            else ""
        )
        raise AstraFlowError(
            f"the supervisor of {run_id} ended before the run did{alone}; start the run again with "
            f"`--run-id {run_id}` to go on. "
            f"{last_words(self.followed, self.flow.id)}"
        )

    def _shall_leave(self) -> bool:
        """Ask once whether to leave a run going that has not ended; another Ctrl-C leaves it."""
        has_ended = self.seen is not None and self.seen.state in ENDED
        if self.ask is None or not self.console.is_terminal or self.asked or has_ended:
            return True
        self.asked = True
        try:
            answer = self.ask("\nLeave the run going, or cancel it? [L/c] ").strip().lower()
        except (KeyboardInterrupt, EOFError):
            return True
        if not answer.startswith("c"):
            return True
        self.console.print("cancelling …")
        self._cancel()
        return False

    def _cancel(self) -> None:
        store, run_id = self.followed.store, self.followed.run_id
        run = store.sub(layout.run_prefix(run_id))
        if self._has_begun(run):
            cancel(run)
        else:
            flow_runs.cancel(self.followed.api_url, self.flow.id)


def supervisor_lives_here(run: ObjectStore) -> bool:
    """Whether the process that wrote the supervisor's heartbeat is on this machine and has not
    ended. One that was started after the heartbeat has got its process id since.
    """
    for beat in heartbeats.read_all(run).beats:
        if beat.kind == "supervisor" and not beat.has_ended and beat.host == socket.gethostname():
            with suppress(psutil.Error, OSError):
                process = psutil.Process(beat.pid)
                is_zombie = process.status() == psutil.STATUS_ZOMBIE
                return not is_zombie and process.create_time() <= beat.beat_s
    return False


def cancel(run: ObjectStore) -> Stop:
    """Request the end of a run, also of a suspended one; returns the stored stop, which may be an
    earlier one.
    """
    stop = Stop("cancelled", "cancelled from the command line", time.time())
    return runs.replace_suspension(run, stop)


def suspend(run: ObjectStore) -> Stop:
    """Request the suspension of a run; returns the stored stop, which may be an earlier one."""
    return runs.request_stop(run, Stop("suspended", "suspended from the command line", time.time()))


def cancel_before_it_began(home: Home, run_id: str, previous_stop: Stop | None = None) -> bool:
    """Cancel a start of the run whose supervisor has not created the run yet, or not deleted the
    stop `previous_stop` of an earlier start; returns whether Prefect has one.
    """
    up = up_down.reachable(home)
    server = environment.given("PREFECT_API_URL") or (up.prefect_url if up else None)
    if server is None:
        return False
    since_s = previous_stop.at_s if previous_stop else 0.0
    cancelled, _ = flow_runs.cancel_all(
        *(server, f"run:{run_id}"),
        processes_alive=True,
        among=lambda flow_run: flow_run.name == run_id and flow_run.created.timestamp() > since_s,
    )
    return cancelled > 0


def last_words(followed: Followed, flow_run_id: str) -> str:
    """Return the end of the log of a supervisor's flow run, and where the whole log is."""
    if not flow_run_id:
        return "Its log is in Prefect, where its flow run was not found."
    try:
        messages = flow_runs.logs(followed.api_url, flow_run_id)
    except ConfigError as error:
        messages = [str(error)]
    file = followed.home.flow_logs / f"{flow_run_id}.log"
    where = str(file) if file.exists() else followed.links.get("Prefect", "")
    lines = [line for message in messages for line in message.splitlines() if line.strip()]
    return f"The end of its log {where}:\n" + "\n".join(lines[-12:])


def _base_model(run: ObjectStore) -> tuple[float | None, str]:
    """Return the completed share of the base models and the note of their service."""
    for beat in heartbeats.readable(run):
        if isinstance(beat.progress, BaseModelProgress) and not beat.has_ended:
            return beat.progress.base_model, beat.note
    return None, ""


def _lines(console: Console) -> Callable[[View], None]:
    """Return a function that prints the addresses once, then a line every LINE_INTERVAL_S and
    whenever the state or the closing step changes. After the run's end no line is repeated.
    """
    shown_at, shown_state, shown_words = -math.inf, ("", ""), ""

    def show(view: View) -> None:
        nonlocal shown_at, shown_state, shown_words
        if shown_at < 0:
            for name, address in view.links.items():
                console.print(f"{name:<8} {address}", highlight=False, soft_wrap=True)
        closing = view.status.closing.step if view.status and view.status.closing else ""
        state = (view.status.state if view.status else view.flow_state, closing)
        words = live_view.line_words(view)
        is_due = time.monotonic() - shown_at >= LINE_INTERVAL_S or state != shown_state
        if is_due and not (words == shown_words and state[0] in ENDED):
            shown_at, shown_state, shown_words = time.monotonic(), state, words
            console.print(live_view.line(view), highlight=False, soft_wrap=True)

    return show
