"""Argument parser of a benchmark: its command, the module's docstring as help, an example."""

import argparse


def parser(name: str, words: str | None, example: str) -> argparse.ArgumentParser:
    """Create the parser of `python -m benchmarks.{name}`.

    `words` is the module's docstring, printed unchanged; `example` are arguments.
    """
    command = f"python -m benchmarks.{name}"
    return argparse.ArgumentParser(
        prog=command,
        description=words,
        epilog=f"example: {command} {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
