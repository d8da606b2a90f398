"""Ingest long sequences inline, in threads, and in one and two worker processes.

Shards of synthetic sequences are in a local store. Each mode ingests all of them with the
dataflow's own code (`tasks/services/parallel_ingest.py`): read, filter, advantages. Two filters are
measured:

    zero_advantage   the default, vectorized: a few milliseconds per shard
    ngrams           a filter of a user in plain Python: the share of repeated 8-grams per sequence

Seconds are wall-clock, from the orders' numbers to their rows in the dataflow's process, of the
fastest repeat after a warm-up. `inline` has no Prefect task; it is the baseline. `scaling` of a
mode is its speed relative to `processes 1`.
"""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from prefect import flow
from prefect.testing.utilities import prefect_test_harness

from benchmarks import command_line
from data_ops.algorithms.policy_groups import PolicyGroup
from data_ops.config import ProcessRunner, TaskRunnerConfig, ThreadRunner
from storage.records.rollouts import NOT_SAMPLED, Episode, Group, Prompt, Shard
from storage.records.rollouts import Sequence as Sampled
from storage.run import runs, shards
from storage.store.object_store import ObjectStore, open_store
from tasks.recipes import loader
from tasks.services.parallel_ingest import ParallelIngest, ingest_orders
from tasks.services.task_runners import make_task_runner

NGRAM = 8
PROMPT_TOKENS, VOCAB = 128, 32_000
RUN = "intake"
STARTUP_S = 600
FILTERS: dict[str, Any] = {
    "zero_advantage": "zero_advantage",
    "ngrams": {"name": "benchmarks.intake:RepeatedNgrams"},
}
RUNNERS: dict[str, TaskRunnerConfig] = {
    "threads": ThreadRunner(),
    "processes 1": ProcessRunner(workers=1),
    "processes 2": ProcessRunner(workers=2),
}
BASE = "processes 1"
"""The mode to which `scaling` refers."""


class RepeatedNgrams:
    """Keeps a group unless most 8-grams of its sequences occur more than once."""

    def keep(self, group: PolicyGroup) -> bool:
        repeated = total = 0
        for row in group.rows:
            tokens = row.tokens.tolist()
            grams = [tuple(tokens[at : at + NGRAM]) for at in range(len(tokens) - NGRAM + 1)]
            total += len(grams)
            repeated += len(grams) - len(set(grams))
        return repeated <= total / 2


def _sequence(draw: np.random.Generator, length: int, reward: float) -> Sampled:
    sampled = np.arange(PROMPT_TOKENS + length) >= PROMPT_TOKENS
    size = len(sampled)
    return Sampled(
        tokens=draw.integers(0, VOCAB, size).astype(np.int32),
        loss_mask=sampled,
        logprobs=np.where(sampled, -draw.random(size), 0.0).astype(np.float32),
        owners=np.where(sampled, 0, NOT_SAMPLED).astype(np.int8),
        versions=np.where(sampled, 0, NOT_SAMPLED).astype(np.int32),
        policies=("solver",),
        reward=reward,
        starts_episode=True,
        name="answer",
    )


def write_shards(run: ObjectStore, count: int, groups: int, episodes: int, length: int) -> None:
    """Write `count` shards of `groups` × `episodes` sequences, each of `length` sampled tokens."""
    for number in range(count):
        draw = np.random.default_rng(number)
        played = tuple(
            Group(
                prompt=Prompt(f"{number}/{place}", {"question": "?", "answer": "1"}),
                episodes=tuple(
                    Episode(sequences=(_sequence(draw, length, float(n % 2)),), reward=float(n % 2))
                    for n in range(episodes)
                ),
            )
            for place in range(groups)
        )
        shards.create(
            run,
            Shard(
                order=number,
                attempt=0,
                worker="benchmark",
                region="here",
                groups=played,
                weights={"solver": {0: "0" * 32}},
                started_s=0.0,
                finished_s=1.0,
            ),
        )


@flow(name="intake")
def _timed(address: str, mode: str, count: int, repeats: int) -> float:
    with make_task_runner(RUNNERS[mode]) as started:
        ingest = ParallelIngest(open_store(address), RUN, count, started)
        ingest(range(count))
        return _fastest(lambda: ingest(range(count)), repeats)


def _fastest(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start_s)
    return min(seconds)


def measure(folder: Path, filter_name: str, sizes: Sequence[int], repeats: int) -> dict[str, float]:
    """Return mode → seconds for all shards; `sizes` are shards, groups, episodes, tokens."""
    store = open_store(str(folder / filter_name))
    overrides = {"data.filter": [FILTERS[filter_name]]}
    config = loader.load("multi_policy_tiny", overrides).model_dump(mode="json")
    count = sizes[0]
    write_shards(runs.create_run(store, RUN, config), *sizes)
    orders = list(range(count))
    ingest_orders(store.address, RUN, orders)
    seconds = {"inline": _fastest(lambda: ingest_orders(store.address, RUN, orders), repeats)}
    for mode in RUNNERS:
        seconds[mode] = _timed(store.address, mode, count, repeats)
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line.parser("intake", __doc__, "--shards 32 --tokens 8192")
    parser.add_argument("--shards", type=int, default=32)
    parser.add_argument("--groups", type=int, default=4, help="groups in a shard")
    parser.add_argument("--episodes", type=int, default=8, help="episodes in a group")
    parser.add_argument("--tokens", type=int, default=8192, help="sampled tokens per sequence")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    sizes = (options.shards, options.groups, options.episodes, options.tokens)
    tokens = options.shards * options.groups * options.episodes * options.tokens
    results: dict[str, dict[str, dict[str, float]]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="astraflow-intake-") as folder,
        prefect_test_harness(server_startup_timeout=STARTUP_S),
    ):
        for name in FILTERS:
            seconds = measure(Path(folder), name, sizes, options.repeats)
            results[name] = {
                mode: {
                    "seconds": value,
                    "tokens_per_s": tokens / value,
                    "scaling": seconds[BASE] / value,
                }
                for mode, value in seconds.items()
            }
    if options.json:
        print(json.dumps({"tokens": tokens, "results": results}))
        return
    print(f"{options.shards} shards, {tokens:,} sampled tokens")
    print(f"{'filter':<16}{'mode':<14}{'seconds':>9}{'M tokens/s':>12}{'scaling':>9}")
    for name, modes in results.items():
        for mode, row in modes.items():
            rate, scaling = row["tokens_per_s"] / 1e6, row["scaling"]
            print(f"{name:<16}{mode:<14}{row['seconds']:>9.3f}{rate:>12.2f}{scaling:>9.2f}")


if __name__ == "__main__":
    main()
