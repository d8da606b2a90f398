"""The logs of a run, as a Prefect server has them, in a terminal."""

import datetime
import io
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import PREFECT_API_URL
from prefect.states import Completed, Running
from prefect.testing.utilities import prefect_test_harness

from deployments.cli import run_log_printer
from deployments.cli.output.plain_console import PlainConsole
from deployments.cli.run_log_printer import RunLogPrinter
from deployments.registration import run_logs
from storage.errors import ConfigError
from tasks.services.prefect_settings import RequestLimits
from tests.support.patience import PATIENCE_S

NOON = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)
INFO, WARNING, ERROR = 20, 30, 40


@flow(name="a-service")
def service() -> None:
    """Never called."""


@pytest.fixture(scope="module")
def client() -> Iterator[SyncPrefectClient]:
    with (
        prefect_test_harness(server_startup_timeout=int(PATIENCE_S)),
        get_client(sync_client=True) as opened,
    ):
        yield opened


class Run:
    """A run's flow runs at a real server, and what is printed of them."""

    def __init__(self, client: SyncPrefectClient) -> None:
        self.client = client
        self.id = f"run-{uuid4().hex[:6]}"
        self.out = io.StringIO()
        self.warned: list[str] = []
        self.supervisor = self.flow_run(self.id)

    def flow_run(self, name: str, member: str = "", ended: bool = False) -> UUID:
        tags = ["astraflow", f"run:{self.id}", *([f"member:{member}"] if member else [])]
        state: Any = Completed() if ended else Running()
        return self.client.create_flow_run(service, name=name, tags=tags, state=state).id

    def end(self, flow_run: UUID) -> None:
        self.client.set_flow_run_state(flow_run, Completed(), force=True)

    def log(self, flow_run: UUID, seconds: float, message: str, level: int = INFO) -> None:
        at = NOON + datetime.timedelta(seconds=seconds)
        self.log_at(flow_run, at.isoformat(), message, level)

    def log_at(self, flow_run: UUID, at: str, message: str, level: int = INFO) -> None:
        record = {
            "name": "trainer",
            "level": level,
            "message": message,
            "timestamp": at,
            "flow_run_id": str(flow_run),
        }
        self.client._client.post("/logs/", json=[record]).raise_for_status()

    def printer(self, member: str | None = None) -> RunLogPrinter:
        return RunLogPrinter(
            api_url=PREFECT_API_URL.value(),
            run_id=self.id,
            member=member,
            console=PlainConsole(file=self.out, width=400),
            warn=self.warned.append,
            limits=RequestLimits(timeout_s=PATIENCE_S, retries=0),
        )

    @property
    def lines(self) -> list[str]:
        """What was printed, without dates, which are in the local time zone."""
        return [line[21:].rstrip() for line in self.out.getvalue().splitlines()]


@pytest.fixture
def run(client: SyncPrefectClient) -> Run:
    return Run(client)


@pytest.fixture
def trainer(run: Run) -> UUID:
    return run.flow_run("trainer-solver · r", "trainer-solver")


def test_records_of_all_flow_runs_are_merged_by_time_with_their_members(
    run: Run, trainer: UUID
) -> None:
    again = run.flow_run("trainer-solver · r", "trainer-solver")
    run.log(again, 3, "third")
    run.log(run.supervisor, 2, "second", WARNING)
    run.log(trainer, 1, "first")
    run.log(Run(run.client).supervisor, 1, "of another run")
    run.printer().print_last(10)
    assert run.lines == [
        "trainer-solver  first",
        "supervisor      WARNING second",
        "trainer-solver  third",
    ]
    assert run.out.getvalue().startswith(f"{NOON.astimezone():%Y-%m-%d %H:%M:}01  trainer-solver")


def test_the_last_records_are_printed_over_several_pages(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_logs, "PAGE", 2)
    for number in range(8):
        run.log(run.supervisor, number, f"line {number}")
    run.printer().print_last(5)
    assert run.lines == [f"supervisor  line {number}" for number in (3, 4, 5, 6, 7)]


def test_one_member_is_selected(run: Run, trainer: UUID) -> None:
    run.log(trainer, 1, "of the trainer")
    run.log(run.supervisor, 2, "of the supervisor")
    run.printer("trainer-solver").print_last(10)
    assert run.lines == ["trainer-solver  of the trainer"]
    run.out.truncate(0), run.out.seek(0)
    run.printer("supervisor").print_last(10)
    assert run.lines == ["supervisor      of the supervisor"]


def test_an_unknown_member_is_an_error_that_names_the_others(run: Run, trainer: UUID) -> None:
    with pytest.raises(ConfigError, match="no logs of a member 'x'; it has supervisor, trainer-so"):
        run.printer("x").print_last(10)


def test_an_unknown_run_is_an_error_with_a_remedy(run: Run) -> None:
    run.id = "nobody"
    with pytest.raises(ConfigError, match="has no flow run of nobody; name a run of `astraflow"):
        run.printer().print_last(10)


def test_a_server_that_does_not_respond_is_named(run: Run) -> None:
    printer = run.printer()
    printer.api_url = "http://127.0.0.1:1/api"
    with pytest.raises(ConfigError, match=r"Prefect server at http://127.0.0.1:1/api does not"):
        printer.print_last(10)


def test_a_part_of_a_member_is_printed_as_the_member(run: Run, trainer: UUID) -> None:
    """The windows of the dataflow are child flow runs, without its tags."""
    parent = run.flow_run("dataflow · r", "dataflow")
    created = run.client._client.post(
        "/task_runs/",
        json={"task_key": "window", "dynamic_key": "0", "flow_run_id": str(parent)},
    )
    created.raise_for_status()
    child = run.client.create_flow_run(
        service, parameters={"member": "dataflow"}, parent_task_run_id=UUID(created.json()["id"])
    )
    run.log(child.id, 1, "of a window")
    run.printer("dataflow").print_last(10)
    assert run.lines == ["dataflow        of a window"]


def test_text_of_a_record_neither_controls_the_terminal_nor_looks_like_a_record(run: Run) -> None:
    run.log(run.supervisor, 1, "[bold]a\x1b[2J\x07\u202eb\n2026-01-01 12:00:00  supervisor  forged")
    run.printer().print_last(10)
    first, second = run.out.getvalue().splitlines()
    assert first.endswith("supervisor  [bold]a[2Jb")
    assert second.startswith(" " * 33 + "2026-01-01")


def test_a_long_record_is_cut(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log_printer, "LINES_MAX", 2)
    monkeypatch.setattr(run_log_printer, "LINE_MAX", 3)
    run.log(run.supervisor, 1, "abcdef\nx\ny\nz")
    run.printer().print_last(10)
    assert [line.strip() for line in run.lines] == ["supervisor  abc", "x", "and 2 more lines"]


def _in_turn(*acts: Callable[[], None]) -> Callable[[float], None]:
    """Between two polls, the next of these things happens; then nothing more."""
    left = list(acts)

    def pause(seconds: float) -> None:
        if left:
            left.pop(0)()

    return pause


def test_following_prints_each_record_once_until_every_flow_run_has_ended(
    run: Run, trainer: UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.log(run.supervisor, 60, "before")

    def late_and_new() -> None:
        run.log(run.supervisor, 50, "late")
        run.log(trainer, 61, "new")

    def of_a_new_attempt() -> None:
        run.log(run.flow_run("again", "trainer-solver", ended=True), 62, "another attempt")
        run.end(trainer)

    def last() -> None:
        run.log(run.supervisor, 63, "last")
        run.end(run.supervisor)

    monkeypatch.setattr(run_log_printer, "FIND_S", 0.0)
    printer = run.printer()
    printer.pause = _in_turn(late_and_new, of_a_new_attempt, last)
    printer.print_last(10)
    printer.follow()
    assert [line[16:] for line in run.lines] == ["before", "late", "new", "another attempt", "last"]


def test_following_shows_all_of_many_records_of_the_same_moment(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_logs, "PAGE", 2)
    monkeypatch.setattr(run_logs, "RECORDS_MAX", 2)
    run.log(run.supervisor, 0, "line 0")
    printer = run.printer()
    printer.pause = lambda seconds: None
    printer.print_last(1)
    for number in range(1, 7):
        run.log(run.supervisor, number / 10, f"line {number}")
    run.end(run.supervisor)
    printer._find()
    printer.follow()
    assert run.lines == [f"supervisor  line {number}" for number in range(7)]


def test_following_begins_with_the_last_records(run: Run) -> None:
    for number in range(4):
        run.log(run.supervisor, number, f"line {number}")
    printer = run.printer()
    printer.print_last(2)
    run.log(run.supervisor, 2.5, "late")
    run.end(run.supervisor)
    printer._find()
    printer.follow()
    assert run.lines == [f"supervisor  {text}" for text in ("line 2", "line 3", "late")]


@pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati", "America/Los_Angeles"])
@pytest.mark.parametrize(
    "at", ["0001-01-01T00:00:00Z", "9998-01-01T00:00:00Z", "9999-12-31T23:59:59Z"]
)
def test_a_record_with_a_wrong_time_hides_no_other(
    run: Run, monkeypatch: pytest.MonkeyPatch, at: str, zone: str
) -> None:
    def log_now(message: str) -> None:
        run.log_at(run.supervisor, datetime.datetime.now(datetime.UTC).isoformat(), message)

    def new() -> None:
        log_now("new")
        run.end(run.supervisor)

    log_now("before")
    run.log_at(run.supervisor, at, "wrong")
    printer = run.printer()
    printer.pause = _in_turn(new)
    with monkeypatch.context() as context:
        context.setenv("TZ", zone)
        time.tzset()
        printer.print_last(10)
        printer.follow()
    time.tzset()
    assert sorted(line[12:] for line in run.lines) == ["before", "new", "wrong"]


def test_a_server_that_is_away_at_first_is_asked_again_and_an_unknown_run_is_not(run: Run) -> None:
    run.log(run.supervisor, 1, "the first line")
    printer = run.printer()
    here, printer.api_url = printer.api_url, "http://127.0.0.1:1/api"

    def back() -> None:
        printer.api_url = here

    printer.pause = _in_turn(lambda: None, back)
    printer.print_last(10, until_available=True)
    assert run.lines == ["supervisor  the first line"]
    (warning,) = run.warned
    assert "does not respond" in warning
    run.id = "nobody"
    with pytest.raises(ConfigError, match="has no flow run of nobody"):
        run.printer().print_last(10, until_available=True)


def test_a_server_that_is_away_for_a_while_is_asked_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    printer = run.printer()
    printer.print_last(10)
    here = printer.api_url

    def away() -> None:
        printer.api_url = "http://127.0.0.1:1/api"

    def back() -> None:
        run.log(run.supervisor, 1, "meanwhile")
        printer.api_url = here
        run.end(run.supervisor)

    monkeypatch.setattr(run_log_printer, "FIND_S", 0.0)
    printer.pause = _in_turn(away, lambda: None, back)
    printer.follow()
    assert run.lines == ["supervisor  meanwhile"]
    (warning,) = run.warned
    assert "does not respond" in warning
    assert warning.endswith("; asking again every 2 s")
