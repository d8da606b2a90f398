"""Printing of a run's logs, which Prefect has: the last lines, then new ones as they arrive."""

import datetime
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from rich.console import Console
from rich.text import Text

from deployments.registration import run_logs
from deployments.registration.client import UnavailableError
from deployments.registration.run_logs import Members
from storage.errors import ConfigError
from tasks.services.prefect_settings import POLL, RequestLimits
from tasks.terminal_text import plain

POLL_S = 2.0
"""Processes send their records every two seconds."""
FIND_S = 10.0
"""Between two looks for flow runs that were started since."""
LATE = datetime.timedelta(seconds=30)
"""A record may arrive this much later than a younger one of another process; clocks differ."""
EARLIEST = datetime.datetime(1970, 1, 2, tzinfo=datetime.UTC)
LATEST = datetime.datetime(9999, 12, 30, tzinfo=datetime.UTC)
"""Times that exist in every time zone. A record's time before or after is shown as one of them."""
LINES_MAX = 200
"""Lines of one record."""
LINE_MAX = 4000
"""Characters of one line."""
STYLES = ((logging.ERROR, "red"), (logging.WARNING, "yellow"), (logging.INFO, ""))


@dataclass(kw_only=True)
class RunLogPrinter:
    """Prints the logs of one run. `warn` prints a sentence to the standard error."""

    api_url: str
    run_id: str
    member: str | None
    """None: all of them."""
    console: Console
    warn: Callable[[str], None]
    pause: Callable[[float], None] = time.sleep
    limits: RequestLimits = POLL
    """Of a poll for new records."""
    _members: Members = field(init=False)
    _found_at_s: float = field(default=0.0, init=False)
    _printed: dict[UUID, datetime.datetime] = field(default_factory=dict, init=False)
    """Records that a poll may return again."""
    _newest: datetime.datetime | None = field(default=None, init=False)
    _begin: datetime.datetime | None = field(default=None, init=False)
    """Time of the first record that was printed: the first poll returns earlier ones, too."""

    def print_last(self, num_lines: int, until_available: bool = False) -> None:
        """Print the newest records. With `until_available`, a server that does not respond is asked
        again.

        Raises:
            ConfigError: the server does not respond, or has no such run or member.
        """
        if until_available:
            self._repeat(lambda: self._print_last(num_lines), UnavailableError)
        else:
            self._print_last(num_lines)

    def follow(self) -> None:
        """Print new records until every flow run of the run has ended. A server that does not
        respond is asked again.
        """
        self._repeat(self._print_new, ConfigError)

    def _repeat(self, is_done: Callable[[], bool], error_kind: type[ConfigError]) -> None:
        """Call `is_done` every POLL_S until it returns true; warn of an error, once in a row."""
        away = False
        while True:
            try:
                if is_done():
                    return
                away = False
            except error_kind as error:
                if not away:
                    self.warn(f"{error}; asking again every {POLL_S:.0f} s")
                away = True
            self.pause(POLL_S)

    def _print_last(self, num_lines: int) -> bool:
        self._find()
        records = run_logs.newest(self.api_url, self._flow_runs(), num_lines)
        self._print(records)
        self._begin = records[0].timestamp if records else None
        return True

    def _print_new(self) -> bool:
        """Print the records since the last poll; return whether they are the last ones."""
        all_ended = self._members.all_ended  # the last records are read after it
        at = None if self._newest is None else self._newest - LATE
        records = run_logs.since(self.api_url, self._flow_runs(), at, self._printed, self.limits)
        self._print(records, self._begin)
        self._begin = None
        if all_ended and len(records) < run_logs.RECORDS_MAX:
            return True
        if time.monotonic() - self._found_at_s >= FIND_S:
            self._find()
        return False

    def _find(self) -> None:
        members = run_logs.find(self.api_url, self.run_id)
        names = set(members.of_flow_run.values())
        if self.member is not None and self.member not in names:
            raise ConfigError(
                f"{self.run_id} has no logs of a member {self.member!r}; it has "
                f"{', '.join(sorted(names))}"
            )
        self._members, self._found_at_s = members, time.monotonic()

    def _flow_runs(self) -> list[UUID]:
        return [
            flow_run
            for flow_run, member in self._members.of_flow_run.items()
            if self.member in (None, member)
        ]

    def _print(self, records: list[Any], begin: datetime.datetime | None = None) -> None:
        """Print records; those from before `begin` count as printed."""
        for record in records:
            if begin is None or record.timestamp >= begin:
                for line in self._lines(record):
                    self.console.print(line, soft_wrap=True)
            self._printed[record.id] = record.timestamp
            # a record of the future, of a wrong clock, would hide all others until then
            at = min(max(record.timestamp, EARLIEST), datetime.datetime.now(datetime.UTC))
            self._newest = max(self._newest or at, at)
        if self._newest is not None:
            oldest = self._newest - LATE
            self._printed = {id: at for id, at in self._printed.items() if at >= oldest}

    def _lines(self, record: Any) -> Iterator[Text]:
        """Write a record: time, member and message; further lines of it are indented, so that none
        looks like a record.
        """
        members = self._members.of_flow_run
        width = max(map(len, members.values()))
        member = members.get(record.flow_run_id, run_logs.SUPERVISOR)
        level = logging.getLevelName(record.level) if record.level >= logging.WARNING else ""
        at = min(max(record.timestamp, EARLIEST), LATEST).astimezone()
        head = f"{at:%Y-%m-%d %H:%M:%S}  {member:<{width}}  "
        style = next((style for least, style in STYLES if record.level >= least), "dim")
        lines = plain(record.message).splitlines() or [""]
        for number, line in enumerate(lines[:LINES_MAX]):
            start = Text(head if number == 0 else " " * len(head), style="dim")
            words = f"{level} {line}" if level and number == 0 else line
            yield start.append(words[:LINE_MAX], style=style or "default")
        if len(lines) > LINES_MAX:
            yield Text(f"{' ' * len(head)}and {len(lines) - LINES_MAX} more lines", style="dim")
