"""A run stored by an earlier release can be read, verified, shown, exported and resumed.

`tests/old_run/README.md` says how it was made.
"""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from data_ops.config import PolicyData
from data_ops.dataflow.service import Dataflow
from deployments.cli.app import app
from storage.errors import CorruptError
from storage.formats.safetensors import weights_digest
from storage.records.types import Json
from storage.records.weights import HostTensor
from storage.run import batches, checkpoints, orders, runs
from storage.store.object_store import ObjectStore, open_store
from storage.verify.verify import verify
from storage.weights import manifests, reader
from tasks.recipes.loader import load
from tasks.recipes.run_terms import run_terms
from tasks.recipes.stored_config import filled, read_config
from tests.support.checkout import ROOT
from tests.support.runs.lifetimes import lifetime_of
from trainer.engines.torch.host_tensors import to_torch
from trainer.service.trainer import train

OLD = ROOT / "tests" / "old_run"
RUN_ID = "old-1"
POLICY = "solver"
DIGESTS = (
    "sha256:a9062957939e8b03b38074e51b0114e1873ed48a554017314210ba933964bd33",
    "sha256:b5bb7efca6782dd1224ed9db8017b12fb92a0e452ba8974c7376917789a56c73",
    "sha256:c84270014fabfa5fc5d81e35348a4060a30b1b0151e75ce35b81459080747a54",
    "sha256:d311bc152fa00292ad05a43513c178c7bb0df63e3fd9ab5c358cbd8d98cf06b9",
    "sha256:30773acca75286ce12b337499f1a1b78068be3237cde4d3258e2585d03df8ea7",
)
"""Of the tensors of versions 0 to 4."""
NEXT_DIGEST = "sha256:b4758adfd03075e30abbfb2ddb41178ac7dfd3a96cfe3fd81fa59004ee4eb28f"
"""Of version 5, which the earlier release made of checkpoint 4 and batch 5."""


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """A copy of the old store, which the command line uses."""
    shutil.copytree(OLD / "store", tmp_path / "store")
    monkeypatch.setenv("ASTRAFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ASTRAFLOW_STORE", str(tmp_path / "store"))
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def run(store: ObjectStore) -> ObjectStore:
    return runs.open_run(store, RUN_ID)


def call(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result


def next_version(store: ObjectStore, folder: Path) -> Mapping[str, HostTensor]:
    """Version 5 as trained by the earlier release."""
    shutil.copytree(folder / "store", folder / "next")
    shutil.copytree(OLD / "next", folder / "next" / "runs" / RUN_ID, dirs_exist_ok=True)
    return reader.fetch(runs.open_run(open_store(str(folder / "next")), RUN_ID), POLICY, 5)


def same_share(tensors: Mapping[str, HostTensor], others: Mapping[str, HostTensor]) -> float:
    """Share of elements with equal bits."""
    assert tensors.keys() == others.keys()
    same = [tensors[name].bits == others[name].bits for name in tensors]
    return float(np.concatenate([each.ravel() for each in same]).mean())


def test_an_old_run_has_no_violations(run: ObjectStore) -> None:
    verdict = verify(run, run_terms(run))
    assert verdict.violations == ()
    assert (verdict.orders, verdict.shards, verdict.sequences) == (7, 7, 56)
    ledger = verdict.policies[POLICY]
    fates = ledger.batches, ledger.trained, ledger.expired, ledger.waiting
    assert fates == (5, 40, 8, 8)
    assert call("verify").stdout.startswith("old-1 clean: 7 orders, 7 shards, 56 sequences")


def test_a_damaged_old_run_has_violations(run: ObjectStore) -> None:
    (damaged,) = (key for key in run.list("weights/solver/00000004") if ".delta-" in key)
    run.delete(damaged)
    assert [violation.invariant for violation in verify(run, run_terms(run)).violations] == [3]


def test_the_stored_configuration_equals_its_recipe(store: ObjectStore, run: ObjectStore) -> None:
    config = load(str(OLD / "recipe.yaml"))
    assert read_config(run) == config
    assert runs.check_restart(store, RUN_ID, config.model_dump(mode="json"), filled) is None


@pytest.mark.parametrize("version", range(5))
def test_every_old_version_has_the_bits_that_were_published(run: ObjectStore, version: int) -> None:
    assert weights_digest(reader.fetch(run, POLICY, version)) == DIGESTS[version]


def test_a_delta_is_applied_to_a_loaded_old_version(run: ObjectStore) -> None:
    loaded = reader.read(run, POLICY, 1)
    for version in (2, 3, 4):
        loaded = reader.read(run, POLICY, version, loaded)
        assert weights_digest(loaded.tensors) == DIGESTS[version]


def test_status_shows_an_old_run() -> None:
    status: Json = json.loads(call("status", "--json").stdout)
    assert (status["run_id"], status["state"], status["problems"]) == (RUN_ID, "interrupted", [])
    policy = status["policies"][POLICY]
    assert {name: policy[name] for name in ("step", "version", "batches", "tokens_trained")} == {
        "step": 4, "version": 4, "batches": 5, "tokens_trained": 278,
    }  # fmt: skip
    assert [(row["versions"], row["workflow"], row["n"]) for row in status["evals"]] == [
        ({"solver": version}, workflow, 8)
        for version in (0, 3)
        for workflow in ("single_turn", "actor_and_verify")
    ]
    assert {member["id"]: member["state"] for member in status["members"]} == {
        "base_model": "done",
        "dataflow": "silent",
        "evaluation": "silent",
        "rollout-us-east-0": "silent",
        "supervisor": "silent",
        "trainer-solver": "done",
    }


def test_weights_lists_the_versions_of_an_old_run() -> None:
    rows: list[Json] = json.loads(call("weights", "--json").stdout)
    assert [(row["version"], row["kind"], row["tags"]) for row in rows] == [
        (0, "anchor", []),
        (1, "delta", []),
        (2, "delta", []),
        (3, "anchor", ["best"]),
        (4, "delta", []),
    ]
    assert rows[4]["held_by"].keys() == {"rollout-us-east-0"}
    assert rows[2]["changed"] == 0.44821428571428573


def test_a_report_of_an_old_run_has_all_numbers(tmp_path: Path) -> None:
    call("report", "--out", str(tmp_path / "report.html"))
    page = (tmp_path / "report.html").read_text()
    assert re.findall(r"<h2[^>]*>([^<]*)</h2>", page)[:5] == [
        "Learning",
        "Staleness",
        "Flow",
        "Time",
        "Training health",
    ]
    assert "rollout-us-east-0" in page


def test_gc_of_an_old_run_plans_to_delete_unneeded_versions_only(run: ObjectStore) -> None:
    before = run.list("")
    plan = call("gc", RUN_ID, "--last", "1", "--every", "0", "--grace-hours", "0").stdout
    assert re.search(r"solver\s+0\s+the base model\s+1–2", plan)
    assert re.search(r"3\s+tagged best", plan)
    assert run.list("") == before


def test_an_old_version_is_exported_with_its_bits(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    call("export", RUN_ID, POLICY, "--version", "best", "--out", str(folder))
    model = AutoModelForCausalLM.from_pretrained(folder)
    exported = dict(model.named_parameters())
    stored = reader.fetch(runs.open_run(open_store(str(tmp_path / "store")), RUN_ID), POLICY, 3)
    assert exported.keys() == stored.keys()
    for name, tensor in stored.items():
        assert exported[name].equal(to_torch(tensor)), name


def test_a_trainer_resumes_an_old_run_and_publishes_the_version_of_the_earlier_release(
    store: ObjectStore, run: ObjectStore, tmp_path: Path
) -> None:
    expected = next_version(store, tmp_path)
    assert weights_digest(expected) == NEXT_DIGEST
    config = read_config(run)
    lifetime = lifetime_of(run, "trainer")
    policy = config.policies[POLICY]
    train(
        lifetime,
        POLICY,
        policy.train,
        5,
        config.seed,
        batch_size=policy.batch_size,
        max_tokens=config.rollout.engine.max_tokens,
    )
    assert "other bits" not in lifetime.heartbeat.last.note, "checkpoint 4 gave version 4"
    manifest = manifests.read_manifest(run, POLICY, 5)
    assert (manifest.parent, manifest.batch, manifest.kind, manifest.base) == (4, 5, "delta", 4)
    trained = reader.fetch(run, POLICY, 5)
    assert same_share(reader.fetch(run, POLICY, 4), expected) < 0.7
    assert same_share(trained, expected) > 0.98, "all of them where both ran on equal processors"
    metrics = {name.removeprefix("trainer/"): value for name, value in manifest.metrics.items()}
    assert (metrics["tokens"], metrics["sequences"], metrics["lr"]) == (69.0, 8.0, 0.001)
    assert metrics["loss"] == pytest.approx(-0.000790916383266449, rel=1e-2)
    assert metrics["entropy/mean"] == pytest.approx(3.9597418619238813, rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(1.5333424806594849, rel=1e-3)
    resumed = checkpoints.newest(run, POLICY)
    assert resumed is not None
    assert (resumed.step, resumed.state.tokens_trained) == (5, 278.0 + 69.0)
    assert verify(run, run_terms(run)).violations == ()


def test_a_dataflow_continues_an_old_run_where_it_stopped(run: ObjectStore) -> None:
    config = read_config(run)
    spec = config.policies[POLICY]
    policies = {POLICY: PolicyData(batch_size=spec.batch_size, steps=config.steps)}
    dataflow = Dataflow(
        run, config.data, policies, config.seed, max_tokens=config.rollout.engine.max_tokens
    )
    dataflow.round()
    batch = batches.read(run, POLICY, 6)
    assert [(row.key.order, row.min_version) for row in batch.rows] == [(6, 4)] * 8
    assert orders.next_number(run) == 7, "the last batch needs no other order"
    verdict = verify(run, run_terms(run))
    assert verdict.violations == ()
    ledger = verdict.policies[POLICY]
    assert (ledger.batches, ledger.trained, ledger.expired, ledger.waiting) == (6, 48, 8, 0)


def test_a_changed_object_of_an_old_run_is_refused(run: ObjectStore) -> None:
    body = bytearray(run.get("batches/solver/00000005.arrow"))
    body[len(body) // 2] ^= 1
    run.put("batches/solver/00000005.arrow", bytes(body))
    with pytest.raises(CorruptError, match="batches/solver/00000005"):
        batches.read(run, POLICY, 5)
