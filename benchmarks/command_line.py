"""What the benchmarks' command lines have in common: their name, the module's own words as help,
one example.
"""

import argparse


def parser(name: str, words: str | None, example: str) -> argparse.ArgumentParser:
    """Of `python -m benchmarks.NAME`. `words` is the module's docstring, printed as it stands;
    `example` follows the name.
    """
    command = f"python -m benchmarks.{name}"
    return argparse.ArgumentParser(
        prog=command,
        description=words,
        epilog=f"example: {command} {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
