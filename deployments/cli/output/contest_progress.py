"""The progress of a contest: one line for each data set and team, on the standard error."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from deployments.cli.output.plain_console import PlainConsole

if TYPE_CHECKING:
    from tasks.promotion.paired_play import OnProgress, PlayProgress


@contextmanager
def shown_progress() -> Iterator["OnProgress"]:
    """Give the block a function that shows the progress it is called with."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    lines: dict[tuple[str, str], TaskID] = {}
    with Progress(*columns, console=PlainConsole(sys.stderr)) as progress:

        def update(played: "PlayProgress") -> None:
            line = (played.dataset, played.side)
            if line not in lines:
                lines[line] = progress.add_task(f"{played.dataset}: {played.side}", total=None)
            progress.update(lines[line], completed=played.episodes, total=played.episodes_all)

        yield update
