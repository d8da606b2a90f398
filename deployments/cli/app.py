"""The command line `astraflow`: its commands, and what becomes of their errors."""

import functools
import io
import logging
import re
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any, ParamSpec, TypeVar

import typer

from deployments.cli.run_commands import export, gc, report, runs, status, tag, verify, weights
from deployments.cli.stack_commands import cancel, deploy, doctor, down, run, up
from deployments.cli.terminal import EXIT_FAILED
from deployments.paths import home
from storage.errors import AstraFlowError, ConfigError
from tasks.terminal_text import plain

P = ParamSpec("P")
T = TypeVar("T")

EXIT_CONFIG = 2
"""What a person can mend by writing something else."""
WORD_SHOWN = 100
"""Characters that are shown of a word that is longer than any path: a name of 100,000 letters is
not repeated.
"""
_ENDLESS = re.compile(r"\S{1000,}")
COMMANDS: tuple[Callable[..., None], ...] = (
    *(up, down, deploy, run, cancel),
    *(status, runs, verify, report, export, weights, tag, gc),
    doctor,
)
"""In the order in which `--help` lists them."""


class _App(typer.Typer):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a command. Even `--help`, which is none of ours, may not be able to write."""
        try:
            return super().__call__(*args, **kwargs)
        except OSError as error:
            typer.secho(plain(_sentence(error)), fg="red", err=True)
            raise SystemExit(EXIT_FAILED) from None


app = _App(
    help="Reinforcement learning of LLM agents across regions. Start with `astraflow run`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_debug = False


class _PlainFormatter(logging.Formatter):
    """Warnings of the modules below, which may quote what is stored."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


def _reported(function: Callable[P, T]) -> Callable[P, T]:
    """The command, its errors one sentence and an exit code."""

    @functools.wraps(function)
    def reported(*args: P.args, **kwargs: P.kwargs) -> T:
        from deployments.stack import environment

        try:
            environment.prepare(home())
            return function(*args, **kwargs)
        except (typer.Exit, typer.Abort, KeyboardInterrupt, BrokenPipeError):
            raise  # typer ends quietly where the reader of a pipe has left, as after `| head -1`
        except Exception as error:  # the outermost edge: nothing above would tell the person
            if _debug:
                traceback.print_exc()
            typer.secho(plain(_sentence(error)), fg="red", err=True)
            raise typer.Exit(
                EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
            ) from None

    return reported


def _sentence(error: Exception) -> str:
    return _ENDLESS.sub(lambda word: f"{word[0][:WORD_SHOWN]}…", _words(error))


def _words(error: Exception) -> str:
    if isinstance(error, AstraFlowError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'the output, or another open file'}: {error.strerror}"
    return f"unexpected {type(error).__name__}: {error} (`astraflow --debug …` shows where)"


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    global _debug
    _debug = debug
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="replace"
            )  # an ASCII terminal shows ? for what it has no letter for
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_PlainFormatter())


for command in COMMANDS:
    app.command()(_reported(command))

if __name__ == "__main__":
    app()
