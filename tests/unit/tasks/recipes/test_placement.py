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
