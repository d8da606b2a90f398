"""`docs/format.md`: an independent reader and writer, written from the page only, reads a run, and
its objects can be read.

The stranger is `tests/support/stores/stranger.py`; here the page's tables are compared with what the writers
write, too.
"""

import hashlib
import inspect
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from storage import layout
from storage.coordination import leases, rounds
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.promotion import outcomes, promotions
from storage.records.control import BudgetKind, CountedLife, Round, Stop, Usage
from storage.records.machine_use import GpuUse, MachineUse
from storage.records.progress import TrainerProgress
from storage.records.rollouts import Prompt
from storage.run import (
    base_models,
    checkpoints,
    evaluation_samples,
    evaluations,
    quarantine,
    shards,
    usage,
)
from storage.run.checkpoints import CheckpointState
from storage.run.evaluation_samples import EvaluationSample
from storage.run.runs import read_stop, request_stop
from storage.store.object_store import ObjectStore, open_store
from storage.weights import manifests, reader
from tests.support.checkout import ROOT
from tests.support.runs import builders
from tests.support.runs.builders import tensors
from tests.support.runs.frozen_windows import frozen_window
from tests.support.runs.promotable import CONDITIONS, PLAYED, gate_decision
from tests.support.runs.true_run import MAX_STALENESS, POLICIES, STEPS, finished_run
from tests.support.runs.week_of_nights import write_week
from tests.support.stores.stranger import (
    OVERWRITTEN,
    WRITE_ID,
    ZEROS,
    Stranger,
    sealed,
    weights_digest,
)

DIGITS = "5d0c" * 16
PROMPT = Prompt("s3://bucket/feedback/1.jsonl/0", {"question": "1+1=?", "answer": "2"})
"""The row of the run's data window."""
PAGE = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store with one run that has an object of every kind."""
    folder = tmp_path_factory.mktemp("format")
    store = open_store(str(folder))
    windows = {"evaluation.prompts": frozen_window(store, "true", [PROMPT])}
    run = finished_run(store, windows=windows)
    lease = leases.take(run, 0, "rollout-us-east-0", "us-east", leases.LeaseWatch(20.0))
    assert lease is not None
    leases.renew(run, lease)
    checkpoints.save(run, "solver", 4, tensors(4), CheckpointState({"format": 1}, 72.0))
    base_models.save_model(store, "8c1f", tensors(0), {"config.json": b"{}"}, {"accuracy": 0.3})
    request_stop(run, Stop("completed", "every policy reached version 4", 1700000900.0))
    life = CountedLife(attempt=0, started_s=1.0, alive_s=2.5)
    used: dict[BudgetKind, float] = {"hours": 0.25, "tokens": 0.0, "cost": 3.5}
    usage.write(run, Usage(limits={"hours": 8.0}, used=used, members={"dataflow": life}))
    rounds.write_entry(run, rounds.open_next(run, "solver"), "node/1", b"")
    use = MachineUse(
        cpu_percent=1.0,
        memory_bytes=2.0,
        memory_total_bytes=3.0,
        gpus=(GpuUse(memory_bytes=1.0, memory_total_bytes=2.0),),
    )
    with HeartbeatWriter(
        run, "trainer", "trainer-solver", 0, 60.0, machine=lambda: use
    ) as heartbeat_writer:
        progress = TrainerProgress(step=4, tokens_per_s=9.5)
        heartbeat_writer.update(progress=progress, versions={"solver": 4})
    versions = {"verifier": 4, "solver": 4}
    kept = (builders.group(builders.episode(builders.sequence(version=4), final=1.0)),)
    evaluation_samples.create(run, EvaluationSample(versions=versions, groups=kept))
    right, team = np.array([1, np.nan], np.float32), np.array([1, 0], np.float32)
    evaluations.create(
        run,
        evaluations.Evaluation(
            versions=versions,
            dataset="held_out",
            workflow="actor_and_verify",
            rows=("a", "b"),
            first_attempt=right,
            final=team,
            created_s=1.0,
            seconds=2.0,
            num_kept=1,
        ),
    )
    run.put("shards/00000099.arrow", b"torn")
    quarantine.quarantine_object(
        run, "shards/00000099.arrow", "a shard file of 4 bytes is no readable Arrow file"
    )
    run.put(layout.REPORT, b"<html>")
    promotions.create(store, gate_decision(1))
    write_week(store)
    outcomes.create(store, "tiny-1.7b", PLAYED)
    return folder


@pytest.fixture
def stranger(root: Path) -> Stranger:
    return Stranger(root / "runs" / "true")


def test_an_independent_reader_reads_the_tokens_of_a_shard(stranger: Stranger) -> None:
    """Episode 1 of order 1's second prompt, as `true_run` scripts it: a correct attempt and its
    verdict.
    """
    header, rows = stranger.arrow("shards/00000001.arrow", "shard")
    order = stranger.json("orders/00000001.json")
    assert [group["prompt"] for group in header["groups"]] == order["prompts"]
    assert (header["order"], header["worker"], order["samples_per_prompt"]) == (
        1,
        "rollout-us-east-0",
        4,
    )
    assert len(rows["tokens"]) == 2 * 4 * 2
    assert len(rows["tokens"]) == sum(
        play["num_sequences"] for group in header["groups"] for play in group["episodes"]
    )
    attempt, verdict = 10, 11  # 8 rows of the first prompt, 2 of episode 0
    for row, at in ((attempt, (1, 1, 0)), (verdict, (1, 1, 1))):
        assert (rows["group"][row], rows["episode"][row], rows["sequence"][row]) == at
        assert header["policy_sets"][rows["policy_set"][row]] == ["solver", "verifier"]
        assert (rows["reward"][row], rows["temperature"][row], rows["finish_reason"][row]) == (
            1.0,
            1.0,
            "stop",
        )
    assert rows["tokens"][attempt] == [11, 12, 41, 51, 3]
    assert rows["owners"][attempt] == [-1, -1, 0, 0, 0]
    assert rows["loss_mask"][attempt] == [False, False, True, True, True]
    assert rows["logprobs"][attempt] == [0.0, 0.0, -0.5, -0.5, -0.5]
    assert rows["versions"][attempt] == [-1, -1, 0, 0, 0]
    assert rows["tokens"][verdict] == [11, 12, 61, 2]
    assert rows["owners"][verdict] == [-1, -1, 1, 1]
    assert (rows["starts_episode"][attempt], rows["starts_episode"][verdict]) == (True, False)
    assert header["groups"][1]["episodes"][1]["metrics"] == {"first_attempt": 1.0, "final": 1.0}


def test_an_independent_reader_reads_weights_bit_for_bit_and_finds_those_of_a_token(
    stranger: Stranger,
) -> None:
    for version in range(STEPS + 1):
        manifest, result, others = stranger.folder(f"weights/solver/{version:08d}")
        assert result["model.weight"].view("<u2").tolist() == [version + bit for bit in range(6)]
        assert result["model.scale"].view("<u4").tolist() == [version]
        assert others == ({"config.json": b"{}"} if version == 0 else {})
        assert manifest["digest"] == weights_digest(manifest)
        parent = None if version == 0 else version - 1
        assert (manifest["parent"], manifest["batch"], manifest["kind"]) == (
            parent,
            version or None,
            "anchor",
        )
    for key in (stranger.root / "shards").glob("0000000?.arrow"):
        header, _ = stranger.arrow(f"shards/{key.name}", "shard")
        for policy, held in header["weights"].items():
            for version, digest in held.items():
                manifest = stranger.json(f"weights/{policy}/{int(version):08d}/manifest.json")
                assert digest == manifest["digest"]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_independent_reader_balances_the_ledger_of_every_batch(
    stranger: Stranger, policy: str
) -> None:
    waiting: list[tuple[int, ...]] = []
    closed: set[int] = set()
    fates: set[tuple[str, str]] = set()
    for step in range(1, STEPS + 1):
        header, rows = stranger.arrow(f"batches/{policy}/{step:08d}.arrow", "batch")
        assert (header["policy"], header["step"]) == (policy, step)
        held = {
            order: stranger.arrow(f"shards/{order:08d}.arrow", "shard")
            for order in set(rows["order"])
        }
        for order in header["shards"]:
            waiting += _sequences(stranger, order, policy)
        closed |= set(header["shards"])
        keys = list(
            zip(*(rows[name] for name in ("order", "group", "episode", "sequence")), strict=True)
        )
        settled = {key for key, fate in zip(keys, rows["fate"], strict=True) if fate != "waiting"}
        assert settled <= set(waiting)
        waiting = [key for key in waiting if key not in settled]
        assert [
            key for key, fate in zip(keys, rows["fate"], strict=True) if fate == "waiting"
        ] == waiting
        assert closed == {*range(header["closed_below"]), *header["closed"]}
        trained = [at for at, fate in enumerate(rows["fate"]) if fate == "trained"]
        assert trained == list(range(6))
        for at in trained:
            _, shard = held[keys[at][0]]
            places = list(zip(shard["group"], shard["episode"], shard["sequence"], strict=True))
            source = places.index(keys[at][1:])
            assert rows["tokens"][at] == shard["tokens"][source]
            own = [owner == POLICIES.index(policy) for owner in shard["owners"][source]]
            assert rows["loss_mask"][at] == own
            assert [value != 0 for value in rows["advantages"][at]] == own
            assert step - 1 - rows["min_version"][at] <= MAX_STALENESS
        fates |= set(zip(rows["fate"], rows["reason"], strict=True))
    assert {("trained", ""), ("filtered", "zero_advantage"), ("waiting", "")} <= fates


def _sequences(stranger: Stranger, order: int, policy: str) -> list[tuple[int, ...]]:
    """Keys of a shard's sequences in which `policy` owns a token."""
    header, rows = stranger.arrow(f"shards/{order:08d}.arrow", "shard")
    return [
        (order, *place)
        for *place, owners, names in zip(
            *(rows[c] for c in ("group", "episode", "sequence", "owners", "policy_set")),
            strict=True,
        )
        if header["policy_sets"][names].index(policy) in owners
    ]


def test_an_independent_reader_reads_every_other_object(stranger: Stranger) -> None:
    assert stranger.json("run.json")["config"]["data"]["max_staleness"] == MAX_STALENESS
    assert stranger.json("stop.json")["state"] == "completed"
    numbers = sorted(path.name for path in (stranger.root / "orders").iterdir())
    assert numbers == [*(f"{n:08d}.json" for n in range(len(numbers) - 1)), "end.json"]
    assert stranger.json("orders/end.json")["orders"] == len(numbers) - 1
    assert sorted(n for name in numbers[:-1] for n in stranger.json(f"orders/{name}")["seen"]) == [
        0,
        1,
        2,
        3,
    ]
    lease = stranger.json("leases/00000000.0000.json")
    assert (lease["worker"], lease["lost"], lease["renewals"], lease["released"]) == (
        "rollout-us-east-0",
        0,
        1,
        False,
    )
    manifest, result, _ = stranger.folder("checkpoints/solver/00000004")
    assert manifest["state"] == {"engine": {"format": 1}, "tokens_trained": 72.0}
    assert result["model.weight"].view("<u2").tolist() == [4, 5, 6, 7, 8, 9]
    _, result, others = Stranger(stranger.root.parents[1]).folder("models/8c1f")
    assert result["model.scale"].view("<u4").tolist() == [0]
    assert others == {"config.json": b"{}"}
    header, rows = stranger.arrow("evals/solver-00000004_verifier-00000004.arrow", "evaluation")
    assert header["versions"] == {"solver": 4, "verifier": 4}
    assert rows["prompt_id"] == ["a", "b"]
    assert rows["final"] == [1.0, 0.0]
    assert rows["first_attempt"][0] == 1.0
    assert np.isnan(rows["first_attempt"][1])
    header, rows = stranger.arrow(
        "eval_samples/solver-00000004_verifier-00000004.arrow", "evaluation_sample"
    )
    assert [group["prompt"]["id"] for group in header["groups"]] == ["chained_addition/train/17"]
    assert rows["versions"] == [[-1, -1, 4, 4, 4]]
    assert stranger.json("heartbeats/trainer/trainer-solver.json")["versions"] == {"solver": 4}
    assert stranger.json("quarantine/shards/00000099.arrow.json")["key"] == "shards/00000099.arrow"
    assert (stranger.root / "quarantine/shards/00000099.arrow").read_bytes() == b"torn"


def test_an_independent_reader_computes_the_key_of_outcomes(stranger: Stranger) -> None:
    header, rows = stranger.arrow(
        OBJECTS["promotions/{name}/outcomes/{digest}.arrow"], "team_outcomes"
    )
    assert rows["prompt_id"] == ["a", "b", "c"]
    assert [row[0] for row in rows["accuracy"]] == [1.0, 0.25, 0.0]
    first_seven = dict(list(header.items())[:7])
    text = json.dumps(first_seven, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert OBJECTS["promotions/{name}/outcomes/{digest}.arrow"].endswith(f"/{digest}.arrow")


def _strangers_shard() -> bytes:
    """Order 0, one prompt, one failed episode and one of a single sequence; no compression, other
    list item names.
    """
    lists = {
        "tokens": pa.int32(),
        "loss_mask": pa.bool_(),
        "logprobs": pa.float32(),
        "owners": pa.int8(),
        "versions": pa.int32(),
    }
    words = pa.dictionary(pa.int32(), pa.string())
    values: dict[str, tuple[Any, Any]] = {
        name: (pa.int32(), at)
        for name, at in zip(("group", "episode", "sequence"), (0, 1, 0), strict=True)
    }
    sampled = ([11, 40, 2], [False, True, True], [0.0, -0.5, -0.25], [-1, 0, 0], [-1, 3, 4])
    for (name, kind), value in zip(lists.items(), sampled, strict=True):
        values[name] = (pa.list_(pa.field("element", kind, nullable=False)), value)
    values |= {
        "policy_set": (pa.int32(), 0),
        "reward": (pa.float64(), 1.0),
        "temperature": (pa.float64(), 0.7),
    }
    values |= {
        "starts_episode": (pa.bool_(), True),
        "name": (words, "attempt"),
        "finish_reason": (words, "length"),
    }
    play = {
        "reward": 1.0,
        "metrics": {"final": 1.0},
        "error": None,
        "seconds": 2,
        "num_sequences": 1,
    }
    failed = {
        "reward": 0.0,
        "metrics": {},
        "error": "timeout after 60 s",
        "seconds": 60,
        "num_sequences": 0,
    }
    group = {"prompt": {"id": "p/1", "fields": {"question": "1+1=?"}}, "episodes": [failed, play]}
    header = {
        "order": 0,
        "attempt": 2,
        "worker": "stranger",
        "region": "moon",
        "groups": [group],
        "started_s": 1,
        "finished_s": 2,
    }
    header |= {
        "weights": {"solver": {"3": "sha256:aa", "4": "sha256:bb"}},
        "policy_sets": [["solver"]],
        "write_id": WRITE_ID,
    }
    place = b"fedcba98" * 4
    message = {
        "format": "1",
        "kind": "shard",
        "header": json.dumps(header, indent=1),
        "digest": place,
    }
    fields = [pa.field(name, kind, nullable=False) for name, (kind, _) in values.items()]
    schema = pa.schema(
        fields, metadata={f"astraflow.{name}": value for name, value in message.items()}
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(
            pa.RecordBatch.from_arrays(
                [pa.array([value], kind) for kind, value in values.values()], schema=schema
            )
        )
    body: bytes = sink.getvalue().to_pybytes()
    return body.replace(place, xxhash.xxh3_128_hexdigest(body.replace(place, ZEROS)).encode())


def test_a_shard_of_an_independent_writer_is_read(local_store: ObjectStore, tmp_path: Path) -> None:
    Stranger(tmp_path / "store").write("shards/00000000.arrow", _strangers_shard())
    shard = shards.read(local_store, 0)
    (group,) = shard.groups
    failed, play = group.episodes
    (sequence,) = play.sequences
    assert (shard.worker, shard.attempt, shard.weights) == (
        "stranger",
        2,
        {"solver": {3: "sha256:aa", 4: "sha256:bb"}},
    )
    assert (failed.error, failed.failure_kind, failed.sequences) == ("timeout after 60 s", None, ())
    assert (sequence.policies, sequence.temperature, sequence.finish_reason) == (
        ("solver",),
        0.7,
        "length",
    )
    assert sequence.tokens.tolist() == [11, 40, 2]
    assert sequence.versions.tolist() == [-1, 3, 4]
    assert sequence.min_version("solver") == 3


def test_a_version_of_an_independent_publisher_is_read(
    local_store: ObjectStore, tmp_path: Path
) -> None:
    data = np.array([1.0, -2.0], "<f4").tobytes()
    header = json.dumps({"bias": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (-len(header) % 8)
    file = struct.pack("<Q", len(header)) + header + data
    name = f"{WRITE_ID}.model-00000.safetensors"
    listed = {
        "name": name,
        "num_bytes": len(file),
        "digest": "sha256:" + hashlib.sha256(file).hexdigest(),
    }
    tensor = {
        "dtype": "F32",
        "shape": [2],
        "digest": "xxh3_128:" + xxhash.xxh3_128_hexdigest(data),
        "file": name,
    }
    manifest = {
        "policy": "solver",
        "version": 1,
        "parent": 0,
        "batch": 1,
        "kind": "anchor",
    }
    manifest |= {
        "base": None,
        "tensors": {"bias": tensor},
        "files": [listed],
        "metrics": {"trainer/loss": "NaN"},
    }
    manifest["digest"] = weights_digest(manifest)
    stranger = Stranger(tmp_path / "store" / "weights" / "solver" / "00000001")
    stranger.write(name, file)
    stranger.write("manifest.json", sealed(manifest))
    assert reader.fetch(local_store, "solver", 1)["bias"].bits.tolist() == [0x3F800000, 0xC0000000]
    assert np.isnan(manifests.read_manifest(local_store, "solver", 1).metrics["trainer/loss"])


def test_a_lease_and_a_stop_of_an_independent_writer_are_respected(
    local_store: ObjectStore, tmp_path: Path
) -> None:
    stranger = Stranger(tmp_path / "store")
    lease = {
        "format": 1,
        "write_id": WRITE_ID,
        "order": 0,
        "attempt": 0,
        "worker": "stranger",
        "region": "moon",
    }
    stranger.write("leases/00000000.0000.json", json.dumps(lease).encode())
    watch = leases.LeaseWatch(20.0, clock=iter([0.0, 19.9, 20.0]).__next__)
    assert [leases.take(local_store, 0, "own", "earth", watch) for _ in range(2)] == [None, None]
    taken = leases.take(local_store, 0, "own", "earth", watch)
    assert taken is not None
    assert (taken.attempt, taken.lost) == (1, 1)
    stranger.write(
        "stop.json", sealed({"state": "cancelled", "reason": "enough", "at_s": 1700000000})
    )
    assert read_stop(local_store) == Stop("cancelled", "enough", 1700000000.0)


def section(heading: str) -> str:
    """The text of the page under a heading."""
    result = re.search(
        rf"^## `?{re.escape(heading)}`?\n(.*?)(?=^## |\Z)", PAGE, flags=re.DOTALL | re.MULTILINE
    )
    assert result, f"the page has no section {heading}"
    return result[1]


def table(text: str, first: str) -> dict[str, str]:
    """First column → second column, of the table whose first column is called `first`."""
    rows = re.search(rf"^\| {first} \|.*\n\| ---.*\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    assert rows, f"there is no table of {first}s"
    cells = [line.split(" | ") for line in rows[1].splitlines()]
    return {cell[0].strip("| `"): cell[1].strip(" `|") for cell in cells}


def test_the_page_has_exactly_the_keys_of_the_layout() -> None:
    named = {
        "n": 7,
        "attempt": 1,
        "policy": "solver",
        "step": 3,
        "version": 4,
        "base": 0,
        "kind": "rollout",
        "id": "rollout-0",
    }
    named |= {
        "write_id": "WRITE_ID",
        "name": "NAME",
        "night_id": "20260102-0200",
        "run_id": "tiny-1",
        "build_digest": "8c1f",
        "digest": "9f86",
        "versions": "solver-00000004",
        "tag": "best",
        "sha256": DIGITS,
    }
    documented = {
        pattern.format(**named, key=layout.shard(7))
        for pattern in table(section("Store and keys"), "key")
    }
    folders = [layout.weights("solver", 4), layout.checkpoint("solver", 3)]
    keys = {
        layout.prompts: [layout.prompts(f"sha256:{DIGITS}")],
        layout.run_prefix: [layout.run_prefix("tiny-1") + "/"],
        layout.model_prefix: [layout.model_prefix("8c1f") + "/"],
        layout.order: [layout.order(7)],
        layout.orders_end: [layout.orders_end()],
        layout.lease: [layout.lease(7, 1)],
        layout.shard: [layout.shard(7)],
        layout.batch: [layout.batch("solver", 3)],
        layout.weights: [f"{folders[0]}/WRITE_ID.NAME"],
        layout.checkpoint: [f"{folders[1]}/WRITE_ID.NAME"],
        layout.manifest: [layout.manifest(folder) for folder in folders],
        layout.evaluation: [layout.evaluation({"solver": 4})],
        layout.evaluation_sample: [layout.evaluation_sample({"solver": 4})],
        layout.heartbeat: [layout.heartbeat("rollout", "rollout-0")],
        layout.quarantine: [
            layout.quarantine(layout.shard(7)),
            layout.quarantine(layout.shard(7)) + ".json",
        ],
        layout.retired: [layout.retired("solver", 4)],
        layout.merged_delta: [layout.merged_delta("solver", 4, 0)],
        layout.tag: [layout.tag("best")],
        layout.rounds: [],
        layout.round_start: [layout.round_start("solver", 7)],
        layout.round_entry: [layout.round_entry("solver", 7, "9f86")],
        layout.promotion: [layout.promotion("NAME", 7)],
        layout.promotions: [],
        layout.nights: [],
        layout.night: [],
        layout.nights_report: [layout.nights_report("NAME")],
        layout.night_plan: [layout.night_plan("NAME", "20260102-0200")],
        layout.night_start: [layout.night_start("NAME", "20260102-0200", 7)],
        layout.night_outcome: [layout.night_outcome("NAME", "20260102-0200")],
        layout.outcomes: [layout.outcomes("NAME", "9f86")],
        layout.numbers: [],
        layout.merged_deltas: [],
        layout.leases: [],
        layout.is_shard: [],
        layout.store_prefix: [],
        layout.policy_of_weights: [],
        layout.version_of: [],
        layout.is_data_folder: [],
    }
    spelled = {
        function
        for name, function in inspect.getmembers(layout, inspect.isfunction)
        if not name.startswith("_")
    }
    assert keys.keys() == spelled
    others = {
        layout.RUN,
        layout.STOP,
        layout.USAGE,
        layout.FROZEN,
        layout.REPORT,
        "checks/WRITE_ID",
    }
    assert documented == {key for group in keys.values() for key in group} | others


def test_each_object_of_a_run_has_a_key_on_the_page(stranger: Stranger) -> None:
    digits = {
        "n:08d": r"\d{8}",
        "step:08d": r"\d{8}",
        "version:08d": r"\d{8}",
        "attempt:04d": r"\d{4}",
    }
    parts = digits | {
        "write_id": "[0-9a-f]{32}",
        "key": "(?:orders|shards|batches)/.+",
        "name": ".+",
        "versions": r"\S+",
        "sha256": "[0-9a-f]{64}",
    }
    patterns = [
        re.compile(
            "".join(
                parts.get(part, r"[\w-]+") if at % 2 else re.escape(part)
                for at, part in enumerate(re.split(r"[{}]", key))
            )
        )
        for key in table(section("Store and keys"), "key")
        if not key.endswith("/")
    ]
    stored = [
        path.relative_to(stranger.root).as_posix()
        for path in stranger.root.rglob("*")
        if path.is_file()
    ]
    assert len(stored) > 40
    assert [key for key in stored if not any(pattern.fullmatch(key) for pattern in patterns)] == []


OBJECTS = {
    "run.json": "run.json",
    "stop.json": "stop.json",
    "orders/{n:08d}.json": "orders/00000003.json",
    "orders/end.json": "orders/end.json",
    "leases/{n:08d}.{attempt:04d}.json": "leases/00000000.0000.json",
    "shards/{n:08d}.arrow": "shards/00000001.arrow",
    "batches/{policy}/{step:08d}.arrow": "batches/solver/00000001.arrow",
    "weights/{policy}/{version:08d}/manifest.json": "weights/solver/00000001/manifest.json",
    "models/{build_digest}/manifest.json": "../../models/8c1f/manifest.json",
    "checkpoints/{policy}/{step:08d}/manifest.json": "checkpoints/solver/00000004/manifest.json",
    "evals/{versions}.arrow": "evals/solver-00000004_verifier-00000004.arrow",
    "eval_samples/{versions}.arrow": "eval_samples/solver-00000004_verifier-00000004.arrow",
    "usage.json": "usage.json",
    "rounds/{policy}/{n:08d}.json": "rounds/solver/00000001.json",
    "rounds/{policy}/{n:08d}/{digest}.json": rounds.entry_key(
        Round(policy="solver", number=1, is_open=True), "node/1"
    ),
    "heartbeats/{kind}/{id}.json": "heartbeats/trainer/trainer-solver.json",
    "quarantine/{key}.json": "quarantine/shards/00000099.arrow.json",
    "promotions/{name}/{n:08d}.json": "../../promotions/tiny-1.7b/00000001.json",
    "nights/{name}/{night_id}/plan.json": "../../nights/tiny/20260101-0200/plan.json",
    "nights/{name}/{night_id}/starts/{n:08d}.json": "../../nights/tiny/20260105-0200/starts/00000001.json",
    "nights/{name}/{night_id}/outcome.json": "../../nights/tiny/20260101-0200/outcome.json",
    "promotions/{name}/outcomes/{digest}.arrow": f"../../{outcomes.key('tiny-1.7b', CONDITIONS)}",
}
"""Section of the page → an object of the run that it describes."""
KINDS = {
    "shards": "shard",
    "batches": "batch",
    "evals": "evaluation",
    "eval_samples": "evaluation_sample",
    "..": "team_outcomes",
}


def spelled(value: Any, message: dict[str, str], path: str = "") -> dict[str, Any]:
    """The fields of an object as the page spells them: `prompts[].id`, `tensors.*.dtype`; one value
    for each.
    """
    if path and not any(row.startswith((f"{path}.", f"{path}[")) for row in message):
        return {path: value}
    if isinstance(value, list):
        inner = [(f"{path}[]", each) for each in value]
    else:
        star = any(row.startswith(f"{path}.*") for row in message)
        inner = [
            (f"{path}.{'*' if star else key}".lstrip("."), each) for key, each in value.items()
        ]
    return {
        name: leaf for below, each in inner for name, leaf in spelled(each, message, below).items()
    }


JSON_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
}


def fits(value: Any, kind: str) -> bool:
    """Whether a value has the type given by the page for its field."""
    kind = kind.removesuffix(" °")
    if kind.endswith(" or null"):
        return value is None or fits(value, kind.removesuffix(" or null"))
    head, _, inner = kind.partition(" of ")
    if head == "list":
        return isinstance(value, list) and all(fits(each, inner) for each in value if inner)
    if head == "map":
        return isinstance(value, dict) and all(
            fits(each, inner) for each in value.values() if inner
        )
    return isinstance(value, JSON_TYPES[kind]) and not (
        kind in ("integer", "number") and isinstance(value, bool)
    )


@pytest.mark.parametrize(("heading", "key"), OBJECTS.items())
def test_the_page_lists_exactly_the_written_fields_and_their_types(
    stranger: Stranger, heading: str, key: str
) -> None:
    text = section(heading)
    documented = table(text, "field")
    if key.endswith(".json"):
        written = stranger.json(key)
        common = {"format": "integer", "write_id": "string"}
        if not heading.startswith(OVERWRITTEN):
            common["checksum"] = "string"
        assert list(written)[: len(common)] == list(common)
        documented |= common
    else:
        written, _ = stranger.arrow(key, KINDS[key.split("/")[0]])
        assert list(written)[-1] == list(documented)[-1] == "write_id"
    (example,) = (
        json.loads(block) for block in re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL)
    )
    for fields in (written, example):
        result = spelled(fields, documented)
        assert result.keys() == documented.keys()
        assert [name for name, value in result.items() if not fits(value, documented[name])] == []


def test_the_examples_of_the_page_have_correct_checksums() -> None:
    examples = [
        json.loads(block) for block in re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
    ]
    told = [example for example in examples if "checksum" in example]
    assert len(told) == 14
    for example in told:
        zeroed = json.dumps({**example, "checksum": "0" * 32}, separators=(",", ":")).encode()
        assert xxhash.xxh3_128_hexdigest(zeroed) == example["checksum"]


def test_the_page_lists_exactly_the_fields_of_a_tensor_folder(stranger: Stranger) -> None:
    documented = table(section("Tensor folders"), "field")
    for key in ("weights/solver/00000000", "checkpoints/solver/00000004", "../../models/8c1f"):
        manifest = stranger.json(f"{key}/manifest.json")
        result = spelled({name: manifest[name] for name in ("tensors", "files")}, documented)
        assert result.keys() == documented.keys()
        assert all(fits(value, documented[name]) for name, value in result.items())


def _arrow_type(kind: Any) -> str:
    """The type in the notation of the page; fails for types that the page excludes."""
    if pa.types.is_list(kind):
        assert not kind.value_field.nullable
        return f"list<{_arrow_type(kind.value_type)}>"
    if pa.types.is_dictionary(kind):
        assert (kind.index_type, kind.ordered) == (pa.int32(), False)
        return f"dictionary<{kind.value_type}>"
    return {"double": "float64", "float": "float32"}.get(str(kind), str(kind))


@pytest.mark.parametrize("heading", [heading for heading in OBJECTS if heading.endswith(".arrow")])
def test_the_page_lists_exactly_the_written_columns_and_their_types(
    stranger: Stranger, heading: str
) -> None:
    schema = pa.ipc.open_file((stranger.root / OBJECTS[heading]).read_bytes()).schema
    assert not any(field.nullable for field in schema)
    written = [(field.name, _arrow_type(field.type)) for field in schema]
    assert written == list(table(section(heading), "column").items())


def test_an_independent_reader_reads_frozen_prompts_as_the_page_has_them(
    stranger: Stranger,
) -> None:
    window = stranger.json("run.json")["windows"]["evaluation.prompts"]
    digits = window["digest"].removeprefix("sha256:")
    key = f"prompts/{digits}.arrow"
    body = (stranger.root / key).read_bytes()
    assert hashlib.sha256(body).hexdigest() == digits
    header, rows = stranger.arrow(key, "prompts")
    assert header == {}
    assert rows["id"] == [PROMPT.id]
    assert [json.loads(fields) for fields in rows["fields"]] == [PROMPT.fields]
    schema = pa.ipc.open_file(body).schema
    assert not any(field.nullable for field in schema)
    written = [(field.name, _arrow_type(field.type)) for field in schema]
    assert written == list(table(section("prompts/{sha256}.arrow"), "column").items())
