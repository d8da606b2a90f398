"""A whole run through the command line; the JSON output follows docs/schemas.md."""

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags

from deployments.registration import flow_runs
from deployments.registration.client import connected
from storage.run import runs
from storage.weights import manifests, reader
from tests.e2e.conftest import E2E_TIMEOUT_S, RECIPE, LocalStack
from trainer.engines.torch.host_tensors import to_torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(E2E_TIMEOUT_S)]

STEPS, PROBLEMS, BATCH = 6, 32, 16
POLICIES = ["solver", "verifier"]
REGIONS = {"rollout.regions.eu-west.workers": 0, "rollout.regions.mars.workers": 1}
"""Settings of the run: `mars` is a region that neither the stack nor the code names."""
SET = [part for key, value in REGIONS.items() for part in ("--set", f"{key}={value}")]


@pytest.fixture(scope="module")
def run_output(laptop: LocalStack) -> str:
    """The output of `astraflow run`; the run is named `first`."""
    done = laptop.astraflow("run", "--recipe", str(RECIPE), "--run-id", "first", *SET)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def test_the_run_command_shows_progress_and_the_end_of_the_run(run_output: str) -> None:
    assert re.search(
        r"^first: completed after \d+:\d\d; all policies reached version 6$",
        run_output,
        re.MULTILINE,
    )
    assert re.search(
        rf"the policy alone: \d+\.\d% → \d+\.\d% of {PROBLEMS} held-out problems \(version 0 → 6\)",
        run_output,
    )
    assert "verify: clean" in run_output
    assert "/runs/first/report.html" in run_output


def test_the_json_of_status_follows_its_schema(laptop: LocalStack, run_output: str) -> None:
    status = _json(laptop, "status", "first", "--json")
    assert {
        "run_id": "first",
        "state": "completed",
        "deployment": "astraflow/multi-policy",
        "steps": STEPS,
    }.items() <= status.items()
    assert status["elapsed_s"] > 0
    assert list(status["policies"]) == POLICIES
    for policy in status["policies"].values():
        assert (policy["step"], policy["steps"], policy["version"], policy["batches"]) == (
            STEPS,
        ) * 4
        assert 0 <= policy["wait_fraction"] <= 1
        assert 0 <= policy["reward_mean"] <= 1
        assert 0 <= policy["accuracy"] <= 1
        assert 0 <= policy["staleness_mean"] <= policy["staleness_max"] <= 8
        assert policy["tokens_trained"] > STEPS * BATCH
    assert list(status["regions"]) == ["us-east", "eu-west", "mars"]
    assert (
        sum(region["orders_done"] for region in status["regions"].values())
        == status["counts"]["orders"]
    )
    assert {
        (region["workers"], region["tokens_per_s"]) for region in status["regions"].values()
    } == {(0, 0.0)}
    assert [(row["versions"], row["workflow"]) for row in status["evals"]] == [
        ({"solver": version, "verifier": version}, workflow)
        for version in (0, 3, 6)
        for workflow in ("single_turn", "actor_and_verify")
    ]
    assert all(
        row["dataset"] == "chained_addition" and row["n"] == PROBLEMS for row in status["evals"]
    )
    assert all(0 <= row["accuracy"] <= 1 for row in status["evals"])
    assert status["counts"]["evaluations"] == 3
    assert {member["id"]: (member["state"], member["attempt"]) for member in status["members"]} == {
        "base-model": ("done", 0),
        "dataflow": ("done", 0),
        "evaluation": ("done", 0),
        "rollout-mars-0": ("done", 0),
        "rollout-us-east-0": ("done", 0),
        "supervisor": ("done", 0),
        "trainer-solver": ("done", 0),
        "trainer-verifier": ("done", 0),
    }


def test_runs_lists_the_run(laptop: LocalStack, run_output: str) -> None:
    (run,) = [run for run in _json(laptop, "runs", "--json") if run["run_id"] == "first"]
    assert (run["state"], run["deployment"], run["steps"]) == (
        "completed",
        "astraflow/multi-policy",
        STEPS,
    )
    assert run["versions"] == dict.fromkeys(POLICIES, STEPS)
    assert run["started"] == runs.read_run(laptop.run("first")).created_s


def test_the_ledger_of_the_run_balances(laptop: LocalStack, run_output: str) -> None:
    verdict = _json(laptop, "verify", "first", "--json")
    assert (verdict["ok"], verdict["violations"], verdict["quarantined"]) == (True, [], 0)
    assert verdict["orders"] >= STEPS
    assert verdict["shards"] == verdict["orders"]
    assert list(verdict["policies"]) == POLICIES
    for book in verdict["policies"].values():
        assert (book["batches"], book["trained"], book["replayed"]) == (STEPS, STEPS * BATCH, 0)
    assert verdict["sequences"] == sum(
        book[fate]
        for book in verdict["policies"].values()
        for fate in ("trained", "filtered", "expired", "waiting")
    )


def test_the_report_loads_no_external_resource(
    laptop: LocalStack, run_output: str, tmp_path: Path
) -> None:
    assert (
        laptop.astraflow("report", "first", "--out", str(tmp_path / "report.html")).returncode == 0
    )
    page = (tmp_path / "report.html").read_text()
    assert page.startswith("<!DOCTYPE html>") or page.startswith("<!doctype html>")
    assert "first" in page
    loaded = re.findall(r"""(?:src|href)\s*=\s*["'](?!data:|#)([^"']+)""", page) + re.findall(
        r"@import|url\(\s*http", page
    )
    assert loaded == []


def test_an_exported_policy_is_the_stored_version_and_generates_text_in_transformers(
    laptop: LocalStack, run_output: str, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "solver"
    result = laptop.astraflow("export", "first", "solver", "--out", str(out))
    assert result.stdout.strip() == f"solver version {STEPS} is in {out}"
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "7+8=?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    with torch.inference_mode():
        answer = model.generate(**prompt, do_sample=False, max_new_tokens=4)
    assert tokenizer.decode(answer[0]).startswith(tokenizer.decode(prompt["input_ids"][0]))
    stored = reader.read(laptop.run("first"), "solver", STEPS).tensors
    loaded = model.state_dict()
    assert set(stored) <= set(loaded)
    assert [name for name in stored if not loaded[name].equal(to_torch(stored[name]).float())] == []


def test_mlflow_has_a_run_for_each_policy_and_its_last_weights(
    laptop: LocalStack, run_output: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # created by MLflow itself
        from mlflow.tracking import MlflowClient

        client = MlflowClient(laptop.stack.mlflow_url, laptop.stack.mlflow_url)
        experiment = client.get_experiment_by_name("astraflow")
        result = client.search_runs([experiment.experiment_id], "tags.`astraflow.run_id` = 'first'")
        (parent,) = [run for run in result if "mlflow.parentRunId" not in run.data.tags]
        children = {run.data.tags["astraflow.policy"]: run for run in result if run != parent}
        assert sorted(children) == POLICIES
        for policy, child in children.items():
            assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
            for name in ("trainer/loss", "dataflow/reward/mean"):
                history = client.get_metric_history(child.info.run_id, name)
                assert [point.step for point in history] == list(range(1, STEPS + 1)), name
                assert all(math.isfinite(point.value) for point in history)
            (version,) = client.search_model_versions(f"name='astraflow-{policy}'")
            assert version.run_id == child.info.run_id
            workflows = ("single_turn", "actor_and_verify")
            accuracies = {f"astraflow.accuracy.chained_addition.{each}" for each in workflows}
            tags = {key: value for key, value in version.tags.items() if key not in accuracies}
            assert version.tags.keys() - tags.keys() == accuracies
            assert tags == {
                "astraflow.run_id": "first",
                "astraflow.policy": policy,
                "astraflow.version": str(STEPS),
                "astraflow.weights_digest": manifests.read_manifest(
                    laptop.run("first"), policy, STEPS
                ).digest,
                "astraflow.store": laptop.stack.store_url,
            }
        assert {run.info.status for run in result} == {"FINISHED"}
        team = client.get_metric_history(
            parent.info.run_id, "eval/chained_addition/actor_and_verify/accuracy"
        )
        assert [point.step for point in team] == [0, 3, 6]
        assert {"config.json", "report.html"} <= {
            item.path for item in client.list_artifacts(parent.info.run_id)
        }


def test_prefect_shows_the_closing_steps_as_a_graph(laptop: LocalStack, run_output: str) -> None:
    steps = laptop.task_runs(laptop.flow_run_id("first"))
    closing = {name: step for name, step in steps.items() if "closing" in step.tags}
    assert {name: step.after for name, step in closing.items()} == {
        "last evaluation of first": set(),
        "verify first": {"last evaluation of first"},
        "report first": {"verify first"},
        "register first in MLflow": {"report first"},
        "notify first": set(closing) - {"notify first"},
    }
    assert {(step.state, *step.tags) for step in closing.values()} == {
        ("Completed", "closing", "run:first")
    }


def test_prefect_shows_links_the_progress_and_the_members(
    laptop: LocalStack, run_output: str
) -> None:
    shown = laptop.artifacts(laptop.flow_run_id("first"))
    assert set(shown) == {
        *("store", "report", "mlflow", "members", "progress-solver", "progress-verifier"),
        "run-summary",
    }
    assert [shown[f"progress-{policy}"].data for policy in POLICIES] == [100.0, 100.0]
    assert (shown["progress-solver"].description or "").startswith("solver: step 6 of 6")
    members = {row["member"]: row for row in json.loads(str(shown["members"].data))}
    assert {row["attempt"] for row in members.values()} == {"#1"}
    assert members["trainer-solver"]["state"] == "done"
    assert laptop.stack.mlflow_url in str(shown["mlflow"].data)
    summary = str(shown["run-summary"].data)
    assert "verify: clean" in summary
    assert "Last evaluation: `evals/solver-00000006_verifier-00000006.arrow`" in summary


def test_the_flow_runs_of_members_have_their_attempt_policy_and_region(
    laptop: LocalStack, run_output: str
) -> None:
    with connected(laptop.stack.prefect_url) as client:
        tagged = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=["run:first"]))
        )
    tags = {each.name: set(each.tags) - {"astraflow", "run:first"} for each in tagged}
    assert tags["trainer-solver #1 · first"] == {
        *("member:trainer-solver", "policy:solver", "attempt:1")
    }
    assert tags["rollout-mars-0 #1 · first"] == {
        *("member:rollout-mars-0", "region:mars", "attempt:1")
    }


def test_the_name_of_a_flow_run_is_the_name_of_its_run(laptop: LocalStack, run_output: str) -> None:
    with connected(laptop.stack.prefect_url) as client:
        target = client.read_deployment_by_name("astraflow/multi-policy")
        named = client.create_flow_run_from_deployment(
            target.id,
            name="first",  # it exists and is completed: nothing is trained here
            parameters={"recipe": str(RECIPE), "overrides": REGIONS},
        )
    assert laptop.wait_for_end(str(named.id)) == "Failed"
    message = flow_runs.read(laptop.stack.prefect_url, str(named.id)).message
    assert message == "run first is completed; choose another run id"


def test_a_completed_run_is_not_restarted_and_the_reason_is_one_sentence(
    laptop: LocalStack, run_output: str
) -> None:
    sentence = "run first is completed; choose another run id"
    refused = laptop.astraflow(
        "run", "--recipe", str(RECIPE), "--run-id", "first", *SET, "--detach"
    )
    assert (refused.returncode, refused.stderr) == (2, f"{sentence}\n")
    asked = laptop.prefect(
        *(
            "deployment",
            "run",
            "astraflow/multi-policy",
            "--param",
            "run_id=first",
            "--param",
            f"recipe={RECIPE}",
        ),
        *("--param", f"overrides={json.dumps(REGIONS)}"),
    )
    again = asked.stdout.split("UUID: ")[1].split()[0]
    assert laptop.wait_for_end(again) == "Failed"
    assert flow_runs.read(laptop.stack.prefect_url, again).message == sentence
    assert "Traceback" not in laptop.flow_log(again)


def test_every_parameter_of_the_form_has_a_type_and_a_description(laptop: LocalStack) -> None:
    with connected(laptop.stack.prefect_url) as client:
        form = client.read_deployment_by_name("astraflow/multi-policy").parameter_openapi_schema[
            "properties"
        ]
    assert set(form) == {
        "run_id",
        "recipe",
        "steps",
        "seed",
        "max_staleness",
        "samples_per_prompt",
        "overrides",
    }
    for name, field in form.items():
        kinds = {field.get("type"), *(kind.get("type") for kind in field.get("anyOf", []))} - {
            None,
            "null",
        }
        assert kinds <= {"string", "integer", "object"}, name
        assert len(kinds) == 1, name
        assert len(field["description"]) > 15, name


def _json(laptop: LocalStack, *arguments: str) -> Any:
    done = laptop.astraflow(*arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
