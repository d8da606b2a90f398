"""A week of recurring training in minutes, on a local stack of its own.

Seven nights of `astraflow/nightly` on the tiny task, one after the other, each on the problems of
the day before: a night with poisoned data, which the gate must reject; one that is killed in the
middle and started again; one that a person rolls back; one without data.

Printed: how each night ended, and the promotion log. Written: the page of the week, whose figures
MLflow shows, too, in the run `week nights`.
"""

import argparse
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import command_line
from benchmarks.week import days
from benchmarks.week.days import Day
from deployments.paths import Home
from deployments.registration import flow_runs
from deployments.stack import environment, up_down
from deployments.stack.state import Stack
from storage import layout
from storage.errors import AstraFlowError
from storage.run import runs
from storage.store import object_store
from storage.store.object_store import ObjectStore
from storage.verify.verify import verify
from storage.weights import manifests
from tasks.promotion import promotion
from tasks.recipes.run_terms import run_terms
from tasks.recurring import history
from tasks.reports import nights_page
from tasks.supervision.flow_processes import MARK

NAME, DEPLOYMENT = "week", "astraflow/nightly"
RECIPE = Path(__file__).with_name("recipe.yaml")
POLL_S = 1.0
STALL_LIMIT_S = 600.0
"""A night whose store and flow run do not change for this time has failed."""
KILLED_AT = 3
"""Version of the first policy at which a night is killed."""


@dataclass(frozen=True, kw_only=True)
class NightResult:
    """How one night went."""

    day: str
    night: str
    event: str
    end: str
    seconds: float
    champion: float | None
    """Accuracy of the champion before the decision."""
    candidate: float | None
    gain: float | None
    decision: int | None


def play(home: Home, folder: Path, rows: int, say: Any) -> list[NightResult]:
    """Play the week on a new stack; the stack is stopped at the end."""
    home.create()
    results = []
    with _stack(home, say) as stack:
        store = object_store.open_store(home.store.as_uri())
        for index, day in enumerate(days.week(rows)):
            days.write(folder, index, day)
            start_s = time.monotonic()
            _night(store, stack, folder, days.night_of(index), day, say)
            results.append(_result(store, days.night_of(index), day, time.monotonic() - start_s))
            say(f"{results[-1].day}: {results[-1].end}, {results[-1].seconds:.0f} s")
            if day.rolls_back:
                settled = promotion.roll_back(store, NAME, "benchmarks.week", "by hand")
                say(f"rolled back: decision {settled.decision.number}")
        _check(store)
        (folder / "week.html").write_text(nights_page.render(history.read(store, NAME)))
    return results


@contextmanager
def _stack(home: Home, say: Any) -> Iterator[Stack]:
    try:
        stack = up_down.up(home, say)
        environment.adopt(up_down.settings(home, stack))
        yield stack
    finally:
        up_down.down(home, lambda words: None)


def _night(store: ObjectStore, stack: Stack, folder: Path, night: str, day: Day, say: Any) -> None:
    """Run one night to its end, with a kill in between where the day has one."""
    started = _start(stack, folder, night)
    if day.is_killed:
        run = store.sub(layout.run_prefix(f"{NAME}-{night}"))
        _wait(store, stack, started, lambda: (manifests.latest(run, "solver") or 0) >= KILLED_AT)
        say(f"{day.name}: the process of the night is killed")
        _kill(started)
        _wait(store, stack, started, lambda: False)
        started = _start(stack, folder, night)
    _wait(store, stack, started, lambda: False)


def _start(stack: Stack, folder: Path, night: str) -> str:
    parameters: Mapping[str, Any] = {
        "recipe": str(RECIPE),
        "night_id": night,
        "catch_up": True,
        "overrides": {"data.prompts.window.files": [str(folder / "*.jsonl")]},
    }
    started = flow_runs.start(stack.prefect_url, DEPLOYMENT, parameters, f"{NAME} {night}", [])
    return started.id


def _wait(store: ObjectStore, stack: Stack, flow_run_id: str, happened: Any) -> None:
    """Wait until the flow run ends, or `happened`; AstraFlowError when nothing moves any more."""
    seen, moved_s = -1, time.monotonic()
    while not happened():
        state = flow_runs.read(stack.prefect_url, flow_run_id)
        if state.final:
            return
        if (objects := len(store.list())) != seen:
            seen, moved_s = objects, time.monotonic()
        if time.monotonic() - moved_s > STALL_LIMIT_S:
            raise AstraFlowError(f"nothing was stored for {STALL_LIMIT_S:g} s; {state.message}")
        time.sleep(POLL_S)


def _kill(flow_run_id: str) -> None:
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == flow_run_id:
                process.send_signal(signal.SIGKILL)
        except (psutil.Error, OSError):
            continue


def _result(store: ObjectStore, night: str, day: Day, seconds: float) -> NightResult:
    row = next(each for each in history.read(store, NAME).nights if each.night == night)
    gain = row.gain_row
    return NightResult(
        day=day.name,
        night=night,
        event=day.event,
        end=row.state,
        seconds=seconds,
        champion=gain.champion if gain else None,
        candidate=gain.candidate if gain else None,
        gain=gain.gain if gain else None,
        decision=row.decision.number if row.decision else None,
    )


def _check(store: ObjectStore) -> None:
    """Verify the run of every night; AstraFlowError for one with violations."""
    for row in history.read(store, NAME).nights:
        if row.plan is None or not store.exists(
            f"{layout.run_prefix(row.plan.run_id)}/{layout.RUN}"
        ):
            continue
        run = runs.open_run(store, row.plan.run_id)
        verdict = verify(run, run_terms(run), lambda what, share: None)
        if not verdict.ok:
            raise AstraFlowError(f"{row.plan.run_id}: {verdict.violations[0]}")


def show(results: list[NightResult]) -> None:
    """Print the nights as a table."""
    print(f"\n{'night':12}{'end':>10}{'champion':>10}{'candidate':>11}{'gain':>7}{'s':>6}  event")
    for each in results:
        numbers = [
            "" if value is None else f"{value:.1%}"
            for value in (each.champion, each.candidate, each.gain)
        ]
        print(
            f"{each.day:12}{each.end:>10}{numbers[0]:>10}{numbers[1]:>11}{numbers[2]:>7}"
            f"{each.seconds:6.0f}  {each.event}"
        )


def main() -> None:
    parser = command_line.parser("week", __doc__, "--folder /tmp/week --json")
    parser.add_argument("--rows", type=int, default=400, help="problems a day (default: 400)")
    parser.add_argument(
        "--folder",
        metavar="DIR",
        help="folder of the problems, the stack's home and week.html, kept (default: a temporary "
        "folder)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    arguments = parser.parse_args()
    if arguments.folder is None:
        with tempfile.TemporaryDirectory(prefix="astraflow-week-") as folder:
            _run(Path(folder), arguments)
    else:
        _run(Path(arguments.folder).resolve(), arguments)


def _run(folder: Path, arguments: argparse.Namespace) -> None:
    problems = folder / "problems"
    problems.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    results = play(
        Home(folder / "home"), problems, arguments.rows, lambda words: print(words, flush=True)
    )
    if arguments.json:
        print(json.dumps({"load_before": load, "nights": [asdict(each) for each in results]}))
    else:
        show(results)
        print(f"\n{problems / 'week.html'} shows the week")


if __name__ == "__main__":
    main()
