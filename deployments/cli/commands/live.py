"""The commands that show a run while it goes on.

Each command reads its arguments, calls one module and prints the result. Modules that are slow to
import are imported inside the command that needs them.
"""

from typing import Annotated

import typer

from deployments.cli.output.terminal import (
    EXIT_FAILED,
    RunId,
    console,
    run_or_newest,
    say,
    store,
    warn,
)
from deployments.paths import home


def attach(run: RunId = None) -> None:
    """Show the live view of a run, however it was started.

    Ctrl-C leaves the run going. Of a run that is over, the last picture is shown. Exit code 1 for a
    run that failed, was cancelled or has lost its supervisor.

    Example:  astraflow attach tiny-20260101-120000-ab12
    """
    from deployments.cli import run_attachment

    if not run_attachment.attach(home(), store(), run_or_newest(run), say):
        raise typer.Exit(EXIT_FAILED)


def logs(
    run: RunId = None,
    member: Annotated[
        str | None,
        typer.Option(help="Only this member, such as trainer-solver, or supervisor; default: all."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines until the run ends.")
    ] = False,
    tail: Annotated[
        int, typer.Option(min=1, max=1_000_000, metavar="N", help="Begin with the last N records.")
    ] = 100,
) -> None:
    """Show the logs of a run's services, which Prefect has, in the order of time.

    Those of every attempt, wherever it ran. The lines have local time.

    Example:  astraflow logs tiny-20260101-120000-ab12 --member trainer-solver --follow
    """
    from deployments.cli.run_log_printer import RunLogPrinter
    from deployments.stack import up_down

    server = up_down.adopt_server(home())
    printer = RunLogPrinter(
        api_url=server,
        run_id=run_or_newest(run),
        member=member,
        console=console(),
        warn=warn,
    )
    printer.print_last(tail, until_available=follow)
    if follow:
        printer.follow()
