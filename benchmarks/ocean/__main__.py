"""Measure the time from publishing a version to serving it across an emulated ocean.

    astra-home                                            astra-far
    trainer ─▶ S3 server ═══════ 300 ms, 4 Gbit/s ═══════▶ workers
                                                     ════▶ S3 server of the mirror ─▶ workers

The time starts when the trainer has the new tensors in memory and ends when the last worker has the
version in memory, with all digests verified. Its stages, of the slowest worker of the median step:

    publish   encode, upload, commit the manifest
    mirror    until the region's mirror has the version too (with a mirror only)
    wait      until the start of the poll that returns it: the rest of the earlier poll, and the
              pause of --interval-s, as in a rollout worker
    probe     that poll, from the time at which the version exists
    read      fetch the manifest and the files, apply, verify

`delta` is the changes of a step, `anchor` the whole model, `plain` the format of AstraFlow's paper:
6 bytes a change in two objects, by the same client. The first versions of each format are not
measured: they load compiled loops, open connections and allocate memory. The client closes a
connection after 12 s without a request; a worker's polls keep some of its connections open, and
--pause-s shows the effect of longer steps (`new`). The steps are synthetic
(benchmarks/weight_steps.py) and alternate between two states of a model. The S3 servers are
benchmarks/ocean/folder_s3.py.

Requires Linux, root and a way to delay packets: netem in the kernel, or a script (--wan) that makes
the two namespaces. Servers, workers and the emulated link share this machine: if `busy` is near
100 %, the result shows the machine's limit, not the link's.
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
            report = measure(settings)
    except LinkError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    print(json.dumps(report, indent=2) if settings.json else table(report))


@contextmanager
def _terminable() -> Iterator[None]:
    """Convert SIGTERM to an exception, so that processes and namespaces are removed."""

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
        help="share of the weights that a step changes (default: 0.01)",
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
        help="whether the region has a mirror (default: both)",
    )
    parser.add_argument(
        "--formats", type=_formats, default=",".join(FORMATS), help=f"default: {','.join(FORMATS)}"
    )
    parser.add_argument(
        "--rtt-ms", type=_positive, default=300.0, help="round trip of the ocean (default: 300)"
    )
    parser.add_argument(
        "--gbps", type=_positive, default=4.0, help="bandwidth in each direction (default: 4)"
    )
    parser.add_argument(
        "--interval-s",
        type=_positive,
        default=0.2,
        help="pause between a worker's polls (default: 0.2)",
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
        help="pause before each version (default: 0)",
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument(
        "--wan",
        type=Path,
        default=Path("../shared/tools/wan/wan.sh"),
        metavar="PATH",
        help="script that makes the namespaces where the kernel has no netem: "
        "`up ONEWAY_MS GBPS QUEUE_MB`, `down` (default: ../shared/tools/wan/wan.sh)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    settings = parser.parse_args(arguments)
    if not settings.changed < 1:
        parser.error(f"--changed {settings.changed} is not below 1")
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
        raise argparse.ArgumentTypeError(f"{text} contains a number below 1")
    return counts


def _formats(text: str) -> list[str]:
    formats = text.split(",")
    if unknown := [name for name in formats if name not in FORMATS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is not one of {', '.join(FORMATS)}")
    return formats


if __name__ == "__main__":
    main()
