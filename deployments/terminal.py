"""What the commands share: the store and the run they speak of, and how they print."""

import json
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.home import Home, home
from storage.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

EXIT_FAILED = 1
PIPED_WIDTH = 400

RunId = Annotated[str | None, typer.Argument(metavar="[RUN]", help="Run id; the newest run when left out.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the documented JSON form.")]


def store() -> Any:
    """The store that `run` would use: ASTRAFLOW_STORE, else the living stack's, else the home's own folder."""
    from deployments import environment, plan, record

    here: Home = home()
    found = environment.open_store(here, plan.living(record.load(here)))
    os.environ["ASTRAFLOW_STORE"] = found.address
    return found


def policies_of(run: str, policy: str | None) -> tuple[Any, list[str]]:
    """The run, and the policy that is named or all of its policies."""
    from storage import runs as stored_runs
    from tasks.config import RunConfig

    stored = stored_runs.open_run(store(), run)
    known = list(RunConfig.model_validate(stored_runs.run_config(stored)).policies)
    if policy is not None and policy not in known:
        raise ConfigError(f"{run} has no policy {policy!r}; it has {', '.join(known)}")
    return stored, known if policy is None else [policy]


def named(run: str | None) -> str:
    """The run that a person names, else the newest."""
    from storage import runs as stored_runs

    if run is not None:
        return run
    known = stored_runs.list_runs(store())
    if not known:
        raise ConfigError(f"{store().address} holds no run yet; start one with `astraflow run`")
    return known[-1]


def show(what: Any, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(what, indent=2))
        return
    console().print(what)


def console() -> "Console":
    from rich.console import Console

    found = Console()
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found.width = PIPED_WIDTH  # a program reads it, or a file: nothing to fit into
    return found


def say(words: str) -> None:
    typer.echo(words)
