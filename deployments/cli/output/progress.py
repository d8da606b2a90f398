"""The progress of long work, on the standard error."""

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
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from deployments.cli.output.plain_console import PlainConsole

if TYPE_CHECKING:
    from tasks.base_models.folders import Progress as OnStage
    from tasks.promotion.paired_play import OnProgress, PlayProgress


@contextmanager
def shown_contest() -> Iterator["OnProgress"]:
    """Give the block a function that shows the progress of a contest, a line for each data set and
    team.
    """
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


@contextmanager
def shown_stages() -> Iterator["OnStage"]:
    """Give the block a function that shows the present stage, with its finished share."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=PlainConsole(sys.stderr)) as progress:
        line = progress.add_task("checking", total=1.0)

        def update(stage: str, share: float) -> None:
            progress.update(line, description=stage, completed=share)

        yield update
