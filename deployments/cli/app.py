"""The command line `astraflow`: its commands, and how their errors are printed."""

import functools
import importlib.metadata
import io
import logging
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from typer.core import TyperGroup

from deployments.cli.commands.comparison import compare
from deployments.cli.commands.episodes import episodes
from deployments.cli.commands.live import attach, logs
from deployments.cli.commands.promotion import nights, promote, promotions, rollback
from deployments.cli.commands.runs import export, gc, report, runs, status, tag, verify, weights
from deployments.cli.commands.stack import continue_, deploy, doctor, down, run, up, worker
from deployments.cli.commands.suspension import cancel, resume, suspend
from deployments.cli.output.terminal import EXIT_FAILED
from deployments.paths import home
from storage.errors import AstraFlowError, ConfigError
from storage.store.addresses import text_without_credentials
from tasks.terminal_text import one_line, plain

P = ParamSpec("P")
T = TypeVar("T")

EXIT_CONFIG = 2
"""Exit code of errors that the user can correct."""
WORD_SHOWN = 100
"""Characters that are printed of a word that is longer than any path."""
USAGE_SHOWN = 300
"""Characters that are printed of an error in the arguments, which repeats them."""
_NO_TEXT = re.compile(r"[\ud800-\udfff]")
"""Python's form of a byte that is not UTF-8."""
_ENDLESS = re.compile(r"\S{1000,}")
COMMANDS: tuple[Callable[..., None], ...] = (
    *(up, down, deploy, worker, run, continue_, suspend, resume, cancel),
    *(status, attach, logs, runs, verify, report, episodes, compare, export, weights, tag, gc),
    *(promote, rollback, promotions, nights),
    doctor,
)
"""In the order of `--help`."""


class _Commands(TyperGroup):
    """The commands; prints every error, those of typer included, with `_print_error`."""

    def main(self, *args: Any, standalone_mode: bool = True, **kwargs: Any) -> Any:
        """Run a command and exit. `--help` may fail, too: when the output cannot be written."""
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except OSError as error:
            _print_error(_message(error))
            code = EXIT_FAILED
        except Exception as error:  # no public base class; any other is raised again
            usage = _usage_message(error)
            if usage is None:
                raise
            _print_error(*usage)
            code = EXIT_CONFIG
        if standalone_mode:
            raise SystemExit(code)
        return code


app = typer.Typer(
    cls=_Commands,
    help="Reinforcement learning of LLM agents across regions. Start with `astraflow run`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_debug = False


class _PlainFormatter(logging.Formatter):
    """Formats warnings of other modules, which may quote stored text."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of plain text, a traceback as several."""
        text = super().format(record)
        return plain(text) if record.exc_info else one_line(text)


def _with_errors_printed(function: Callable[P, T]) -> Callable[P, T]:
    """Return the command with its errors as a printed message and an exit code."""

    @functools.wraps(function)
    def command(*args: P.args, **kwargs: P.kwargs) -> T:
        from deployments.stack import environment

        try:
            _refuse_what_is_no_text(kwargs)
            environment.prepare(home())
            return function(*args, **kwargs)
        except (typer.Exit, typer.Abort, KeyboardInterrupt, BrokenPipeError):
            raise  # typer ends without a message when the output's reader has ended: `| head -1`
        except Exception as error:  # the outermost handler: any error is one line, not a traceback
            if _debug:
                traceback.print_exc()
            _print_error(_message(error))
            raise typer.Exit(
                EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
            ) from None

    return command


def _refuse_what_is_no_text(arguments: Mapping[str, object]) -> None:
    """Refuse a word with bytes that are not UTF-8, which no server takes; paths may have them.

    The word may be a secret, and is not repeated.
    """
    for name, given in arguments.items():
        for word in given if isinstance(given, list) else [given]:
            if isinstance(word, str) and _NO_TEXT.search(word):
                raise ConfigError(
                    f"an argument ({name}) is not UTF-8, as names and settings have to be"
                )


def _print_error(message: str, advice: str = "") -> None:
    """Print an error as plain text without credentials; very long words are shortened.

    A message with `advice` is one about wrong arguments, of which USAGE_SHOWN characters are shown.
    """
    shown = text_without_credentials(plain(message))
    shown = _ENDLESS.sub(lambda word: f"{word[0][:WORD_SHOWN]}…", shown)
    if advice and len(shown) > USAGE_SHOWN:
        shown = f"{shown[:USAGE_SHOWN]}…"
    if shown:
        typer.secho(f"{shown}{advice}", fg="red", err=True)


def _message(error: Exception) -> str:
    if isinstance(error, AstraFlowError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'the output, or another open file'}: {error.strerror}"
    return f"unexpected {type(error).__name__}: {error} (`astraflow --debug …` shows where)"


def _usage_message(error: Exception) -> tuple[str, str] | None:
    """Return the message for wrong arguments and the advice; None for another error.

    Their base class has no public name in every supported release of typer.
    """
    if isinstance(error, typer.Abort):
        return "aborted", ""
    if not isinstance(error, typer.BadParameter.__mro__[2]):
        return None
    message: str = error.format_message()  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "astraflow"
    # the message is empty for a call without arguments, which has printed the help
    return message.rstrip("."), f"; see `{path} --help`"


def _print_version(wanted: bool) -> None:
    """Print the release and exit; it is that of the installed package."""
    if wanted:
        typer.echo(f"astraflow {importlib.metadata.version('astraflow')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the release and exit."
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    global _debug
    _debug = debug
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # `?` for what an ASCII terminal cannot show
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_PlainFormatter())


for function in COMMANDS:
    app.command(function.__name__.rstrip("_"))(_with_errors_printed(function))

if __name__ == "__main__":
    app()
