"""What the commands share: the arguments for a run, its store, and functions that print."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import uuid4

import typer

from deployments.cli import run_id_completion
from deployments.paths import Home, home
from storage.errors import ConfigError
from tasks.terminal_text import one_line

if TYPE_CHECKING:
    from deployments.cli.output.plain_console import PlainConsole

EXIT_FAILED = 1
PIPED_WIDTH = 400

RunId = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="Run id; default: the newest run.",
        autocompletion=run_id_completion.suggest,
    ),
]
NamedRun = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Run id.", autocompletion=run_id_completion.suggest),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON (docs/schemas.md).")]


def local_path(text: str) -> Path:
    """Return the path of a file or folder, an option's value; an address is refused.

    It is not repeated: it may have a credential in it. `Path` would join the slashes of an address,
    after which it could not be told from a path into a folder `s3:`.
    """
    if address := re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        raise typer.BadParameter(
            f"what begins with {address[0]} is an address; name a file or folder of this machine"
        )
    return Path(text)


def store() -> Any:
    """Open the store: that of ASTRAFLOW_STORE, else the running stack's, else the home's."""
    from deployments.stack import environment, plan, state

    folder: Home = home()
    opened = environment.open_store(folder, plan.if_running(state.load(folder)))
    os.environ["ASTRAFLOW_STORE"] = opened.address
    return opened


def policies_of(run: str, policy: str | None) -> tuple[Any, list[str]]:
    """Return the run and its policies, or only the named one."""
    from storage.run import runs as stored_runs
    from tasks.recipes.stored_config import read_config

    stored = stored_runs.open_run(store(), run)
    policies = list(read_config(stored).policies)
    if policy is not None and policy not in policies:
        raise ConfigError(f"{run} has no policy {policy!r}; it has {', '.join(policies)}")
    return stored, policies if policy is None else [policy]


def run_or_newest(run: str | None) -> str:
    """Return the run id of the argument, else that of the newest run."""
    from storage.run import runs as stored_runs

    if run is not None:
        return run
    listed = stored_runs.read_all(store())
    for run_id, reason in listed.unreadable.items():
        warn(f"the run {run_id} is skipped, because it cannot be read: {reason}")
    if not listed.ids:
        raise ConfigError(f"{store().address} has no run yet; start one with `astraflow run`")
    return listed.ids[-1]


def show(content: Any, as_json: bool) -> None:
    """Print a table, or plain data as JSON: numbers that are not finite are null."""
    from pydantic_core import to_jsonable_python

    if as_json:
        finite = to_jsonable_python(content, inf_nan_mode="null")
        typer.echo(json.dumps(finite, indent=2, allow_nan=False))
        return
    console().print(content)


def console() -> "PlainConsole":
    """Return the console of the standard output."""
    from deployments.cli.output.plain_console import PlainConsole

    created = PlainConsole()
    if not created.is_terminal and "COLUMNS" not in os.environ:
        created.width = PIPED_WIDTH  # a program or a file does not need lines that fit a terminal
    return created


def say(message: str) -> None:
    """Print a message, which may contain stored text, as one line."""
    typer.echo(one_line(message))


def warn(message: str) -> None:
    """Print a warning, which may contain stored text, as one line to stderr."""
    typer.secho(one_line(message), fg="yellow", err=True)


def write_text(file: Path, text: str) -> None:
    """Write a file that the user named, in UTF-8 with every locale.

    A file is replaced as a whole, if its folder allows that: a full disk leaves an earlier one as
    it was. Devices and pipes are written directly; a pipe without a reader is an error at once.

    Raises ConfigError when it cannot be written.
    """
    from storage.written_files import TEMPORARY_PREFIX

    def open_at_once(path: str, flags: int) -> int:
        descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
        os.set_blocking(descriptor, True)
        return descriptor

    try:
        place = Path(os.path.realpath(file))
        # The real path of an open file that has no name any more, as /dev/stdout may be, is absent.
        if file.exists() and not (place.is_file() and os.access(place.parent, os.W_OK)):
            with open(file, "w", encoding="utf-8", opener=open_at_once) as opened:
                opened.write(text)
            return
        temporary = place.with_name(f"{TEMPORARY_PREFIX}{uuid4().hex}")
        try:
            temporary.write_text(text, encoding="utf-8")
            if place.exists():
                shutil.copymode(place, temporary)
            temporary.replace(place)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a name with NUL in it
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            f"{file} cannot be written ({reason}); name a file in a writable folder"
        ) from None
