"""The command that shows a recurring training: its nights, as a table or a page."""

from pathlib import Path
from typing import Annotated

import typer

from deployments.cli.terminal import AsJson, say, show, store, warn, write_text


def nights(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Name of a recurring training; default: all of them."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the page of NAME: the nights, the gate's figures, who was champion when.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the nights of recurring trainings, oldest first.

    A night trains from the champion on new data; the gate promotes or rejects what it made. The
    deployment astraflow/nightly starts one at each of its scheduled times.

    Example:  astraflow nights tiny --out nights.html
    """
    from deployments.cli import tables
    from storage.errors import ConfigError
    from storage.run import nights as stored_nights
    from tasks.recurring import history

    opened = store()
    names = [name] if name is not None else stored_nights.names(opened)
    listed = [history.read(opened, each) for each in names]
    if out is not None:
        if name is None:
            raise ConfigError("--out writes the page of one recurring training; give its NAME")
        from tasks.reports import nights_page

        write_text(out, nights_page.render(listed[0]))
        say(str(out))
        return
    if as_json:
        show(tables.nights_json(listed), as_json)
    elif any(each.nights for each in listed):
        show(tables.nights_table(listed), as_json)
    else:
        say(
            f"no night yet in {opened.address}; `prefect deployment run astraflow/nightly` starts "
            "one"
        )
    for each in listed:
        for where, why in each.unreadable.items():
            warn(f"{each.name}, {where}: {why}")
