"""From publishing to serving over an emulated ocean: seconds until every worker of a region holds a
new version, verified.

    astra-home: trainer ─▶ S3 server ═══ 300 ms, 4 Gbit/s ═══▶ astra-far: workers, or S3 server of the mirror ─▶ workers

The clock starts when the trainer has the new tensors in hand and ends when the last worker holds
the version in memory with every digest checked. In between, of the slowest worker of the median
step:

    publish   encode, upload, commit the manifest
    mirror    until the region's mirror shows the version too (with a mirror only)
    wait      until the look that finds it begins: the rest of a look in vain, and the pause of --interval-s after it, as in a
              rollout worker's refresher
    probe     that look, from the moment that the version is there
    read      fetch the manifest and the files, apply, check

`delta` is a step's changes, `anchor` the whole model, which is all there is without deltas; `plain`
is what AstraFlow's paper sends, 6 bytes a change as two plain objects, by the same client. The
first versions of each format in each setting are not measured: compiled loops are loaded,
connections stand, memory is there to be reused. The client closes a connection that was idle for 12
s; a worker's looks go over its connections in turn and keep some of them open, and --pause-s shows
what a longer step leaves (`new`). The steps are made up (benchmarks/weight_steps.py), back and
forth between two states of a model. The S3 servers are benchmarks/ocean/folder_s3.py.

Needs Linux, root and a way to delay packets: netem in the kernel, or a script (--wan) that makes
the two namespaces. Servers, workers and the emulated link share this machine: where `busy` nears
100 %, the machine is measured and not the ocean.
"""

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks import command_line
from benchmarks.ocean.figures import table
from benchmarks.ocean.link import LinkError
from benchmarks.ocean.measurement import MIRRORS, measure

FORMATS = ("delta", "anchor", "plain")


def main() -> None:
    settings = parse(sys.argv[1:])
    try:
        with _terminable():
            found = measure(settings)
    except LinkError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    print(json.dumps(found, indent=2) if settings.json else table(found))


@contextmanager
def _terminable() -> Iterator[None]:
    """A termination unwinds like Ctrl-C, so that processes and namespaces go."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.parser("ocean", __doc__, "--model-gb 0.1 --workers 1 --formats delta")
    parser.add_argument(
        "--model-gb", type=_positive, default=1.0, help="size of the model in bf16 (default: 1.0)"
    )
    parser.add_argument(
        "--changed",
        type=_positive,
        default=0.01,
        help="share of its weights that a step changes (default: 0.01)",
    )
    parser.add_argument(
        "--workers",
        type=_counts,
        default="1,4",
        help="numbers of workers in the region (default: 1,4)",
    )
    parser.add_argument(
        "--mirror",
        choices=MIRRORS,
        default="both",
        help="whether the region has one (default: both)",
    )
    parser.add_argument(
        "--formats", type=_formats, default=",".join(FORMATS), help=f"default: {','.join(FORMATS)}"
    )
    parser.add_argument(
        "--rtt-ms", type=_positive, default=300.0, help="round trip of the ocean (default: 300)"
    )
    parser.add_argument(
        "--gbps", type=_positive, default=4.0, help="its width, each way (default: 4)"
    )
    parser.add_argument(
        "--interval-s",
        type=_positive,
        default=0.2,
        help="pause between a worker's looks (default: 0.2)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=3,
        help="versions measured in each case; their median counts (default: 3)",
    )
    parser.add_argument(
        "--pause-s",
        type=float,
        default=0.0,
        help="time without a version before each one (default: 0)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: 0)")
    parser.add_argument(
        "--wan", type=Path, default=Path("../shared/tools/wan/wan.sh"), metavar="PATH",
        help="script that makes the namespaces where the kernel has no netem: `up ONEWAY_MS GBPS QUEUE_MB`, `down` "
        "(default: ../shared/tools/wan/wan.sh)",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    settings = parser.parse_args(arguments)
    if not settings.changed < 1:
        parser.error(f"--changed {settings.changed} is no share below 1")
    if settings.steps < 1:
        parser.error("--steps must be at least 1")
    return settings


def _positive(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text} holds a number below 1")
    return counts


def _formats(text: str) -> list[str]:
    formats = text.split(",")
    if unknown := [name for name in formats if name not in FORMATS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(FORMATS)}")
    return formats


if __name__ == "__main__":
    main()
