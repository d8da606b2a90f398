import importlib.util

import pytest

from deployments.cli import preflight
from deployments.registration import flow_runs
from deployments.registration.deployments import DEPLOYMENTS
from storage.errors import ConfigError
from storage.records.control import Stop
from storage.run import runs
from storage.store.object_store import ObjectStore
from tasks.recipes import loader
from tests.support.runs import builders

NOWHERE = "http://127.0.0.1:1/api"


@pytest.fixture(autouse=True)
def _our_deployments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Prefect server with the deployments of `astraflow deploy`."""
    names = [f"{item.flow}/{item.name}" for item in DEPLOYMENTS]

    def deployments_of(api_url: str, flow: str) -> list[str]:
        return sorted(name for name in names if name.startswith(f"{flow}/"))

    monkeypatch.setattr(flow_runs, "deployments_of", deployments_of)


def test_an_embedded_recipe_passes_on_this_machine() -> None:
    config = loader.load("multi_policy_tiny")
    preflight.refuse_missing_deployments(NOWHERE, config)
    preflight.refuse_what_this_machine_lacks(config)


def test_any_region_passes_with_the_registered_deployments() -> None:
    mars = {"workers": 1, "mirror": "memory://mars"}
    config = loader.load("multi_policy_tiny", {"rollout.regions.mars": mars})
    preflight.refuse_missing_deployments(NOWHERE, config)


def test_a_missing_deployment_of_a_region_is_named_with_its_key() -> None:
    config = loader.load("multi_policy_tiny", {"rollout.regions.mars.deployment": "rollout/gpu"})
    with pytest.raises(ConfigError) as caught:
        preflight.refuse_missing_deployments(NOWHERE, config)
    assert str(caught.value) == (
        f"{NOWHERE} has no deployment rollout/gpu, which rollout-mars-0 needs; it has "
        "rollout/worker: "
        "correct rollout.regions.mars.deployment, or leave it out"
    )
    here = loader.load("multi_policy_tiny", {"rollout.regions.mars.deployment": "rollout/worker"})
    preflight.refuse_missing_deployments(NOWHERE, here)


def test_a_server_without_deployments_gives_the_command_to_register_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flow_runs, "deployments_of", lambda api_url, flow: [])
    with pytest.raises(
        ConfigError,
        match="prepare/base-model, which base-model needs; `astraflow deploy` registers it",
    ):
        preflight.refuse_missing_deployments(NOWHERE, loader.load("multi_policy_tiny"))


def test_a_missing_package_and_a_missing_device_are_reported_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(preflight, "_has_cuda", lambda: False)
    changes = {"prompts.hub": "openai/gsm8k", "policies.solver.train.device": "cuda"}
    with pytest.raises(ConfigError) as caught:
        preflight.refuse_what_this_machine_lacks(loader.load("multi_policy_tiny", changes))
    assert str(caught.value) == (
        "data.prompts.hub: openai/gsm8k needs the package `datasets`, which is not installed here: "
        "pip install datasets; "
        "policies.solver.train.device: torch finds no CUDA device on this machine; set cpu, or run "
        "where there is one"
    )


def test_members_that_cannot_share_a_gpu_of_this_machine_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "_has_cuda", lambda: True)
    on_gpu = {"policies.solver.train.device": "cuda", "rollout.engine.device": "cuda"}
    on_gpu |= {"evaluation.devices": [1]}
    with pytest.raises(ConfigError) as caught:
        preflight.refuse_what_this_machine_lacks(loader.load("single_policy_tiny", on_gpu))
    assert str(caught.value).startswith("GPU 0 of this machine: trainer solver 1, a worker 1; ")
    shares = {"policies.solver.train.device_share": 0.5, "rollout.engine.device_share": 0.5}
    shared = loader.load("single_policy_tiny", on_gpu | shares)
    preflight.refuse_what_this_machine_lacks(shared)


def test_a_restart_with_other_settings_or_of_a_completed_run_is_refused(
    memory_store: ObjectStore,
) -> None:
    config = loader.load("multi_policy_tiny")
    stored = config.model_dump(mode="json")
    del stored["policies"]["solver"]["train"][
        "anchor_every"
    ]  # as stored by an earlier release without this setting
    run = runs.create_run(memory_store, "mine", stored)
    assert preflight.refuse_restart(memory_store, "mine", config) is None
    cancelled = runs.request_stop(run, Stop("cancelled", "by a person", 5.0))
    assert preflight.refuse_restart(memory_store, "mine", config) == cancelled
    with pytest.raises(ConfigError, match="steps is 80 there, 3 here"):
        preflight.refuse_restart(
            memory_store, "mine", loader.load("multi_policy_tiny", {"steps": 3})
        )
    larger = loader.load("multi_policy_tiny", {"budget.hours": 8})
    assert preflight.refuse_restart(memory_store, "mine", larger) == cancelled
    runs.clear_stop(run)
    runs.request_stop(run, Stop("completed", "all done", 6.0))
    with pytest.raises(ConfigError, match="run mine is completed"):
        preflight.refuse_restart(memory_store, "mine", None)
    builders.put_heartbeat(run, builders.heartbeat("supervisor", "supervisor", state="reporting"))
    assert preflight.refuse_restart(memory_store, "mine", None) is None, (
        "its supervisor died before the last closing step"
    )


def test_a_mirror_in_the_store_of_the_run_is_refused(memory_store: ObjectStore) -> None:
    config = loader.load(
        "multi_policy_tiny", {"rollout.regions.us-east.mirror": memory_store.address}
    )
    with pytest.raises(
        ConfigError, match=r"rollout\.regions\.us-east\.mirror is the run's own store memory://"
    ):
        preflight.refuse_mirrors_at_home(memory_store, config)
    preflight.refuse_mirrors_at_home(memory_store.sub("elsewhere"), config)
