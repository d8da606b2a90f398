from typing import Any

import pytest

from storage.errors import ConfigError
from tasks.recipes.loader import load
from tasks.recipes.placement import Placed, placement, shares_of_gpus

ON_GPUS = {
    "policies.solver.train.device": "cuda",
    "policies.verifier.train.device": "cuda",
    "rollout.engine.device": "cuda",
}
SGLANG = ON_GPUS | {"rollout.engine.name": "sglang"}


def error_of(settings: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as raised:
        load("multi_policy_tiny", settings)
    return str(raised.value)


def test_a_run_on_cpus_uses_no_gpus() -> None:
    assert placement(load("multi_policy_tiny")) == ()


def test_the_gpus_of_each_member_are_those_of_the_recipe() -> None:
    config = load(
        "multi_policy_tiny",
        SGLANG
        | {
            "policies.solver.train.devices": [2],
            "policies.verifier.train.devices": [3],
            "policies.verifier.train.device_share": 0.5,
            "rollout.engine.devices": [0, 1],
            "evaluation.devices": [3],
            "rollout.engine.device_share": 0.5,
        },
    )
    engines = placement(config)
    assert engines == (
        Placed("trainer solver", "solver", (2,), 1.0),
        Placed("trainer verifier", "verifier", (3,), 0.5),
        Placed("a worker", "solver", (0,), 0.5, 0.425),
        Placed("a worker", "verifier", (1,), 0.5, 0.425),
        Placed("the evaluation", "solver", (3,), 0.5, 0.2125),
        Placed("the evaluation", "verifier", (3,), 0.5, 0.2125),
    )
    assert shares_of_gpus(engines) == {
        0: {"a worker": 0.5},
        1: {"a worker": 0.5},
        2: {"trainer solver": 1.0},
        3: {"trainer verifier": 0.5, "the evaluation": 0.5},
    }


def test_the_evaluation_uses_the_gpus_of_a_worker_unless_it_has_its_own() -> None:
    config = load("multi_policy_tiny", ON_GPUS | {"rollout.engine.devices": [4]})
    assert [engine.gpus for engine in placement(config)] == [(0,), (0,), (4,), (4,), (4,), (4,)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"rollout.engine.devices": [0, 1, 2]},
            "rollout.engine.devices: names 3 GPUs; name 2, 1 for each policy, or 1, which all",
        ),
        (
            {"rollout.engine.devices": [0], "rollout.engine.sglang.tensor_parallel": 2},
            "names 1 GPUs; name 4, 2 for each policy, or 2, which all policies share",
        ),
        ({"evaluation.devices": [0, 1, 2]}, "evaluation.devices: names 3 GPUs; name 2"),
        ({"rollout.engine.devices": [1, 1]}, "rollout.engine.devices: names GPU 1 twice"),
        ({"rollout.engine.devices": [-1]}, "must be greater than or equal to 0, not -1"),
        (
            {"rollout.engine.sglang.memory_share": 0.6},
            "the servers of a worker on GPU 0 would have 1.2 of it together; at most 1 can be used",
        ),
        (
            {"rollout.engine.sglang.memory_share": 0.3, "rollout.engine.device_share": 0.5},
            "would have 0.6 of it together; at most 0.5 can be used (device_share)",
        ),
        (
            {"policies.solver.train.ranks": 2, "policies.solver.train.devices": [0]},
            "devices names 1 GPUs, and ranks is 2",
        ),
    ],
)
def test_devices_that_do_not_fit_are_refused(settings: dict[str, Any], words: str) -> None:
    assert words in error_of(SGLANG | settings)


def test_shares_of_servers_on_different_gpus_are_not_added() -> None:
    load(
        "multi_policy_tiny",
        SGLANG
        | {
            "rollout.engine.sglang.memory_share": 0.6,
            "rollout.engine.devices": [0, 1],
            "evaluation.devices": [2, 3],
        },
    )
    load("multi_policy_tiny", SGLANG | {"rollout.engine.sglang.memory_share": 0.5})
    load(
        "multi_policy_tiny",
        {"rollout.engine.name": "sglang", "rollout.engine.sglang.memory_share": 0.9},
    )


def test_devices_without_cuda_are_refused() -> None:
    assert "rollout.engine.devices: has no effect with device: cpu" in error_of(
        {"rollout.engine.devices": [0]}
    )
    assert "devices: has no effect with rollout.engine.device: cpu" in error_of(
        {"evaluation.devices": [0]}
    )


TRAIN = "policies.solver.train"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rollout.engine.dtype": "float8"}, "rollout.engine.dtype: 'float8' is not one of"),
        (
            {"rollout.engine.name": "sglang", "rollout.engine.device": "xpu"},
            "rollout.engine.device: 'xpu' cannot be used by sglang",
        ),
        (
            {f"{TRAIN}.engine": "deepspeed", f"{TRAIN}.optimizer.name": "muon"},
            f"{TRAIN}.optimizer: muon needs whole matrices",
        ),
        (
            {f"{TRAIN}.ranks": 2, f"{TRAIN}.optimizer.name": "muon"},
            f"{TRAIN}.optimizer: muon needs whole matrices",
        ),
        (
            {f"{TRAIN}.ranks": 2, f"{TRAIN}.device": "cuda:1"},
            f"{TRAIN}.device: 'cuda:1' is one device for 2 ranks",
        ),
    ],
)
def test_what_a_built_in_engine_cannot_do_is_refused_before_the_run(
    settings: dict[str, Any], words: str
) -> None:
    assert words in error_of(settings)


ADAPTER = {"name": "lora", "rank": 8, "publish": "adapter"}
SHARED = {
    "rollout.engine.name": "sglang",
    "rollout.engine.sglang.adapter_rank": 8,
    "rollout.engine.sglang.shared": True,
    "policies.solver.train.adapter": ADAPTER,
    "policies.verifier.train.adapter": ADAPTER,
}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"policies.verifier.train.adapter": {"name": "none"}},
            "policies.verifier.train.adapter: publishes no adapter, and with",
        ),
        (
            {"policies.solver.train.adapter": {**ADAPTER, "publish": "merged"}},
            "policies.solver.train.adapter: publishes no adapter, and with",
        ),
        (
            {"policies.verifier.model.tiny.seed": 1},
            "policies.verifier.model: is not that of solver, and with rollout.engine.sglang.shared",
        ),
        (
            {"rollout.engine.sglang.adapter_rank": 0},
            "rollout.engine.sglang.shared: needs rollout.engine.sglang.adapter_rank",
        ),
        ({"rollout.engine.name": "torch"}, "rollout.engine.sglang: has no effect with name: torch"),
    ],
    ids=["no adapter", "merged", "base models", "no room", "engine"],
)
def test_policies_that_cannot_share_a_server_are_refused(
    changed: dict[str, Any], words: str
) -> None:
    assert load("multi_policy_tiny", SHARED).rollout.engine.sglang.shared
    assert words in error_of(SHARED | changed)


def test_one_policy_has_no_server_to_share() -> None:
    alone = {key: value for key, value in SHARED.items() if "verifier" not in key}
    with pytest.raises(ConfigError, match="shared: has no effect: there is one policy"):
        load("single_policy_tiny", alone)


def test_policies_that_share_a_server_use_one_by_url_in_one_worker() -> None:
    one = {
        "rollout.regions.eu-west.workers": 0,
        "rollout.engine.sglang.urls": ["http://127.0.0.1:30000"],
        "evaluation": None,
    }
    assert load("multi_policy_tiny", SHARED | one).rollout.engine.sglang.urls
    apart = {"rollout.engine.sglang.shared": False}
    assert "urls: would serve 2 engines (one for each policy" in error_of(SHARED | one | apart)
    two = {"rollout.regions.us-east.workers": 2}
    assert "urls: would serve 2 engines (one for each worker" in error_of(SHARED | one | two)


def test_a_shared_server_has_its_gpus_and_its_share_once() -> None:
    on_gpus = SHARED | SGLANG
    config = load("multi_policy_tiny", on_gpus | {"rollout.engine.device_share": 0.5})
    both = "solver and verifier"
    assert placement(config)[2:] == (
        Placed("a worker", both, (0,), 0.5, 0.425),
        Placed("the evaluation", both, (0,), 0.5, 0.425),
    )
    load("multi_policy_tiny", on_gpus | {"rollout.engine.sglang.memory_share": 0.9})
    apart = {"rollout.engine.sglang.memory_share": 0.9, "rollout.engine.sglang.shared": False}
    assert "would have 1.8 of it together" in error_of(on_gpus | apart)
    two = {"rollout.engine.devices": [0, 1]}
    assert "names 2 GPUs; name 1, 1 for the shared server\n" in error_of(on_gpus | two) + "\n"
    load("multi_policy_tiny", on_gpus | two | {"rollout.engine.sglang.tensor_parallel": 2})
