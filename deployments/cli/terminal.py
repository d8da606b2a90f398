"""What the commands share: the store and the run they speak of, and how they print."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.paths import Home, home
from storage.errors import ConfigError
from tasks.terminal_text import plain

if TYPE_CHECKING:
    from deployments.cli.plain_console import PlainConsole

EXIT_FAILED = 1
PIPED_WIDTH = 400

RunId = Annotated[
    str | None, typer.Argument(metavar="[RUN]", help="Run id; the newest run when left out.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the documented JSON form.")]


def store() -> Any:
    """The store that `run` would use: ASTRAFLOW_STORE, else the living stack's, else the home's own
    folder.
    """
    from deployments.stack import environment, plan, state

    here: Home = home()
    found = environment.open_store(here, plan.living(state.load(here)))
    os.environ["ASTRAFLOW_STORE"] = found.address
    return found


def policies_of(run: str, policy: str | None) -> tuple[Any, list[str]]:
    """The run, and the policy that is named or all of its policies."""
    from storage.run import runs as stored_runs
    from tasks.recipes.stored_config import read_config

    stored = stored_runs.open_run(store(), run)
    known = list(read_config(stored).policies)
    if policy is not None and policy not in known:
        raise ConfigError(f"{run} has no policy {policy!r}; it has {', '.join(known)}")
    return stored, known if policy is None else [policy]


def named(run: str | None) -> str:
    """The run that a person names, else the newest."""
    from storage.run import runs as stored_runs

    if run is not None:
        return run
    seen = stored_runs.read_all(store())
    for run_id, why in seen.unreadable.items():
        warn(f"the run {run_id} is left out, because it cannot be read: {why}")
    known = seen.ids
    if not known:
        raise ConfigError(f"{store().address} holds no run yet; start one with `astraflow run`")
    return known[-1]


def show(what: Any, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(what, indent=2))
        return
    console().print(what)


def console() -> "PlainConsole":
    from deployments.cli.plain_console import PlainConsole

    found = PlainConsole()
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found.width = PIPED_WIDTH  # a program reads it, or a file: nothing to fit into
    return found


def say(words: str) -> None:
    """Print for a person; what came from a store may be among the words."""
    typer.echo(plain(words))


def warn(words: str) -> None:
    """Say what is not as it should be, while the command goes on."""
    typer.secho(plain(words), fg="yellow", err=True)


def write_text(file: Path, text: str) -> None:
    """Write a file that a person asked for, in UTF-8 whatever the locale; ConfigError where that
    cannot be done. A pipe that nobody reads is not waited for.
    """

    def opened(path: str, flags: int) -> int:
        descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
        os.set_blocking(descriptor, True)
        return descriptor

    try:
        with open(file, "w", encoding="utf-8", opener=opened) as written:
            written.write(text)
    except (OSError, ValueError) as error:  # ValueError: a name with NUL in it
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            f"{file} cannot be written ({why}); name a file in a folder that can hold it"
        ) from None
