"""`astraflow doctor --recipe`: verdicts, and both engines of a recipe with a model of random weights."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.cli.app import app
from deployments.cli.doctor.machine import Check
from deployments.cli.doctor.recipe import (
    PAGE,
    examine_recipe,
    memory_checks,
    mismatch_checks,
    placement_checks,
)
from storage.errors import ConfigError
from storage.formats.model_sizes import ModelSizes
from storage.store.object_store import ObjectStore
from tasks import mismatch_probe
from tasks.base_models.folders import Progress
from tasks.mismatch_probe import measure_mismatch
from tasks.recipes.loader import load
from tasks.recipes.memory_plan import memory_plan
from tasks.recipes.run_config import RunConfig

RANDOM = {
    "hidden": 32,
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "intermediate": 32,
    "skill_iterations": 0,
    "habit_iterations": 0,
}
SMALL = {
    "policies.solver.model": {"tiny": RANDOM},
    "policies.solver.sampling.max_new_tokens": 5,
    "policies.solver.train.loss": {"name": "ppo_clip", "correction": {"name": "tis_token"}},
    "policies.solver.train.lr": 0.1,
    "policies.solver.train.minibatches": 2,
}
METRICS = {
    "trainer/mismatch/mean_abs": 0.0123,
    "trainer/mismatch/ratio_max": 1.5,
    "trainer/mismatch/beyond_2x_share": 0.25,
    "trainer/mismatch/tokens": 64.0,
}


@pytest.mark.parametrize(
    ("limits", "verdict"),
    [
        ({}, "ok"),
        ({"warn": 0.02, "stop": 0.03}, "ok"),
        ({"warn": 0.01}, "warn"),
        ({"warn": 0.01, "stop": 0.02}, "warn"),
        ({"stop": 0.01}, "fail"),
    ],
)
def test_the_limits_of_the_recipe_give_the_verdict(limits: dict[str, float], verdict: str) -> None:
    config = load("single_policy_tiny", {"policies.solver.train.mismatch": limits})
    (check,) = mismatch_checks(config, {"solver": METRICS})
    assert (check.name, check.verdict) == ("mismatch solver", verdict)
    assert check.finding == (
        "torch and trainer: mean |Δ log p| 0.012, largest ratio 1.5, 25.0% of 64 tokens beyond 2×"
    )
    assert check.fix == (
        "" if verdict == "ok" else f"make them compute alike, or correct for it: {PAGE}"
    )


def unseen(stage: str, share: float) -> None:
    """Progress that nobody sees."""


def test_a_mismatch_that_is_not_finite_has_failed_and_none_is_a_warning() -> None:
    config = load("single_policy_tiny")
    (infinite,) = mismatch_checks(config, {"solver": {"trainer/mismatch/tokens": 64.0}})
    (missing,) = mismatch_checks(config, {"solver": {}})
    assert (infinite.verdict, missing.verdict) == ("fail", "warn")
    assert "mean |Δ log p| inf" in infinite.finding


def test_both_engines_of_a_recipe_agree_in_float32(memory_store: ObjectStore) -> None:
    stages: dict[str, float] = {}
    trained = {"policies.solver.model": {"tiny": RANDOM | {"skill_iterations": 1}}}
    config = load("single_policy_tiny", SMALL | trained)
    metrics = measure_mismatch(memory_store, config, stages.__setitem__)["solver"]
    assert metrics.keys() == METRICS.keys() | {"trainer/mismatch/k3"}
    assert 8 <= metrics["trainer/mismatch/tokens"] <= 5 * mismatch_probe.NUM_PROMPTS
    assert metrics["trainer/mismatch/mean_abs"] < 1e-5
    assert metrics["trainer/mismatch/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    *building, playing, training = stages
    assert len(building) >= 1
    assert (playing, training) == ("playing 8 prompts", "training solver for one step")


def test_a_policy_that_samples_nothing_is_named_with_the_reason(memory_store: ObjectStore) -> None:
    config = load("single_policy_tiny", SMALL | {"rollout.engine.max_tokens": 6})
    with pytest.raises(ConfigError, match=r"solver sampled no token to train on in 8 episodes: 8 "):
        measure_mismatch(memory_store, config, unseen)


def test_a_recipe_that_cannot_run_has_failed(memory_store: ObjectStore) -> None:
    config = load("single_policy_tiny", SMALL | {"rollout.engine.max_tokens": 6})
    *memory, check = examine_recipe(memory_store, config, unseen)
    assert [each.name for each in memory] == ["memory trainer solver", "memory a worker"]
    assert (check.name, check.verdict) == ("mismatch", "fail")
    assert check.finding.startswith("solver sampled no token to train on")


def test_a_server_that_cannot_start_has_failed(memory_store: ObjectStore, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no python here\nexit 1\n")
    python.chmod(0o700)
    engine = {"name": "sglang", "sglang": {"python": str(python)}}
    *_, check = examine_recipe(
        memory_store, load("single_policy_tiny", SMALL | {"rollout.engine": engine}), unseen
    )
    assert (check.name, check.verdict) == ("mismatch", "fail")
    assert "no python here" in check.finding


def test_the_command_shows_its_stages_beside_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def examined(models: ObjectStore, config: RunConfig, progress: Progress) -> Iterator[Check]:
        progress("building a base model", 0.5)
        yield Check("mismatch solver", "ok", "none")

    monkeypatch.setenv("ASTRAFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("deployments.cli.doctor.recipe.examine_recipe", examined)
    result = CliRunner().invoke(app, ["doctor", "--recipe", "single_policy_tiny", "--json"])
    assert json.loads(result.stdout)[-1]["name"] == "mismatch solver"
    assert "building a base model" in result.stderr


def test_the_command_refuses_a_recipe_that_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRAFLOW_HOME", str(tmp_path / "home"))
    result = CliRunner().invoke(app, ["doctor", "--recipe", "no_such_recipe"])
    assert result.exit_code == 2
    assert "no_such_recipe" in result.output


QWEN = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 6144,
    "tie_word_embeddings": True,
}
"""Qwen3-1.7B."""


QWEN_8B = QWEN | {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "intermediate_size": 12_288,
    "tie_word_embeddings": False,
}
H100 = {"cpu": 2**40, "cuda": 81_559 * 2**20}
"""A node with 1 TiB; bytes of one of its GPUs, as nvidia-smi lists them."""


@pytest.mark.parametrize(
    ("available", "verdicts"),
    [
        ({"cpu": 10**11, "cuda": 80 * 10**9}, ["ok", "ok", "ok", "ok"]),
        ({"cpu": 10**11, "cuda": 24 * 10**9}, ["fail", "ok", "ok", "ok"]),
        ({"cpu": 10**10, "cuda": 4 * 10**9}, ["fail", "fail", "fail", "fail"]),
        ({"cpu": 10**11}, ["warn", "ok", "warn", "ok"]),
    ],
)
def test_the_memory_of_each_member_is_compared_with_its_device(
    available: dict[str, int], verdicts: list[str]
) -> None:
    sizes = {"solver": ModelSizes.of(QWEN)}
    checks = list(memory_checks(load("math_qwen3_1.7b"), sizes, available))
    assert [check.verdict for check in checks] == verdicts
    trainer, trainer_host, worker, worker_host = checks
    assert [check.name for check in checks] == [
        "memory trainer solver",
        "memory trainer solver, host",
        "memory a worker, server of solver",
        "memory a worker, host",
    ]
    assert "weights 6.88 GB, gradients 6.88 GB, moments 13.8 GB" in trainer.finding
    assert "checkpoint 20.6 GB" in trainer_host.finding
    assert "weights 3.44 GB, KV cache 0.803 GB" in worker.finding
    assert "two versions of solver 6.88 GB" in worker_host.finding
    assert ("micro_batch_tokens" in trainer.fix) == (verdicts[0] == "fail")
    assert ("a machine with more memory" in trainer_host.fix) == (verdicts[1] == "fail")


# P = 151,936·4096·2 + 36·192,946,432 + 4096 = 8,190,735,360 weights, of which the layers are
# 36·(2·4096·128·(32 + 8) + 2·128 + 3·4096·12,288 + 2·4096). On each of 4 ranks: masters and
# gradients P each, moments 2P; gathered 4·(2·1,244,659,712 + 3·192,946,545); bf16 2·(P − 622,329,856).
# Activations of a token: 4·4096·36 for the layers' inputs, and one layer in full,
# 26·4096 + 10·4096 + 5·2048 + 8·12,288 = 256,000; together 845,824.
# Host: a checkpoint 12P, twice, and the moments of 4 ranks 32P.
PARTS_8B = {
    "weights": 8_190_735_360,
    "gradients": 8_190_735_360,
    "moments": 16_381_470_720,
    "gathered": 12_272_636_236,
    "logits": 402_653_184,
    "gradient of the head": 2_489_319_424,
    "weights in bf16": 15_136_811_008,
}
HOST_8B = {
    "checkpoint": 98_288_824_320,
    "copy for the ranks": 98_288_824_320,
    "moments of each rank": 262_103_531_520,
}


def test_the_plan_of_the_8b_recipe_is_the_one_computed_by_hand() -> None:
    config = load("math_qwen3_8b")
    trainer, host, server, worker_host = memory_plan(config, {"solver": ModelSizes.of(QWEN_8B)})
    assert trainer.parts == PARTS_8B | {"activations": 16_384 * 845_824}
    assert (trainer.device, trainer.count) == ("cuda", 4)
    assert host.parts == HOST_8B
    # A token has 2 bytes · 36 layers · 2048 elements.
    assert server.parts == {"weights": 16_381_470_720, "KV cache": 16_384 * 147_456}
    assert (server.count, server.share, server.cache_token_bytes) == (1, 0.85, 147_456)
    assert worker_host.parts == {
        "two versions of solver": 32_762_941_440,
        "reading of solver": 2**30,
        "version for the server of solver": 16_381_470_720,
    }
    findings = [check.finding for check in memory_checks(config, _sizes_8b(config), H100)]
    assert findings[0].startswith("about 76.9 GB on each of 4 devices (weights 8.19 GB, ")
    assert findings[1].startswith("about 459 GB (checkpoint 98.3 GB, ")
    # (0.85 · 81,559 MiB − 16,381,470,720) / 147,456
    assert findings[2].endswith("of 72.7 GB, 85% of 85.5 GB; the KV cache has about 381,884 tokens")
    assert findings[3].startswith("about 50.2 GB (")


def test_the_plan_of_the_8b_recipe_with_two_policies_is_the_one_computed_by_hand() -> None:
    config = load("math_multi_agent_qwen3_8b")
    plan = {need.member: need for need in memory_plan(config, _sizes_8b(config))}
    for policy in ("solver", "verifier"):
        trainer = plan[f"trainer {policy}"]
        assert trainer.parts == PARTS_8B | {"activations": 12_288 * 845_824}
        assert plan[f"trainer {policy}, host"].parts == HOST_8B
        server = plan[f"a worker, server of {policy}"]
        assert server.parts == {"weights": 8_190_735_360, "KV cache": 12_288 * 73_728}
        assert (server.count, server.cache_token_bytes) == (2, 73_728)
    shares = [plan[f"a worker, server of {policy}"].share for policy in ("solver", "verifier")]
    assert shares == [0.425, 0.425]  # 0.85 for the servers of a GPU, which are two
    assert plan["trainer verifier"].gpus == (4, 5, 6, 7)
    assert plan["a worker, host"].num_bytes == 2 * (3 * 16_381_470_720 + 2**30)
    checks = list(memory_checks(config, _sizes_8b(config), H100))
    assert [check.verdict for check in checks] == ["ok"] * 7
    assert checks[0].finding.startswith("about 73.5 GB on each of 4 devices")
    assert checks[5].finding.endswith(
        # (0.425 · 81,559 MiB − 8,190,735,360) / 73,728
        "of 36.3 GB, 42% of 85.5 GB; the KV cache has about 381,884 tokens"
    )


def test_what_runs_on_a_cpu_is_one_need_with_all_ranks() -> None:
    config = load("single_policy_tiny", SMALL | {"policies.solver.train.ranks": 2})
    sizes = ModelSizes(parameters=1000, vocab=50, hidden=8, layers=1, kv_elements=4)
    trainer, worker = memory_plan(config, {"solver": sizes})
    assert (trainer.member, trainer.device, trainer.count) == ("trainer solver", "cpu", 1)
    assert trainer.parts["moments"] == 8000  # of two ranks, half each
    assert trainer.parts["checkpoint"] == 12_000
    assert worker.parts["two versions of solver"] == 4000
    assert (worker.member, worker.device) == ("a worker", "cpu")


def _sizes_8b(config: RunConfig) -> dict[str, ModelSizes]:
    return {policy: ModelSizes.of(QWEN_8B) for policy in config.policies}


def test_a_recipe_that_does_not_fit_is_not_measured(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.cli.doctor.recipe.device_bytes", lambda: {"cpu": 1000})
    checks = list(examine_recipe(memory_store, load("single_policy_tiny", SMALL), unseen))
    assert [check.verdict for check in checks] == ["fail", "fail"]


ON_GPUS = {
    "policies.solver.train.device": "cuda",
    "policies.verifier.train.device": "cuda",
    "rollout.engine.name": "sglang",
    "rollout.engine.device": "cuda",
}
PLACED = ON_GPUS | {
    "policies.solver.train.devices": [1],
    "policies.verifier.train.devices": [2],
    "rollout.engine.devices": [0],
    "evaluation.devices": [3],
}


def test_the_placement_of_a_recipe_is_shown() -> None:
    (check,) = placement_checks(load("multi_policy_tiny", PLACED))
    assert (check.name, check.verdict) == ("GPUs", "ok")
    assert check.finding == (
        "trainer solver on GPU 1; trainer verifier on GPU 2; solver of a worker on GPU 0 (0.425 of "
        "its memory); verifier of a worker on GPU 0 (0.425 of its memory); solver of the evaluation "
        "on GPU 3 (0.425 of its memory); verifier of the evaluation on GPU 3 (0.425 of its memory)"
    )
    assert list(placement_checks(load("multi_policy_tiny"))) == []


def test_a_gpu_of_several_members_is_a_warning_unless_their_shares_fit() -> None:
    placed, first = placement_checks(load("multi_policy_tiny", ON_GPUS))
    assert (placed.verdict, first.verdict, first.name) == ("ok", "warn", "GPU 0")
    assert "trainer solver 1, trainer verifier 1, a worker 1, the evaluation 1; " in first.finding
    shares = {
        "policies.solver.train.device_share": 0.3,
        "policies.verifier.train.device_share": 0.3,
        "rollout.engine.device_share": 0.2,
    }
    assert len(list(placement_checks(load("multi_policy_tiny", ON_GPUS | shares)))) == 1


def test_the_memory_of_each_server_is_compared_with_its_share() -> None:
    sizes = dict.fromkeys(("solver", "verifier"), ModelSizes.of(QWEN))
    config = load("multi_policy_tiny", PLACED)
    available = {"cpu": 10**9, "cuda": 9 * 10**9}
    *_, solver, verifier, _host = memory_checks(config, sizes, available)
    assert [each.name for each in (solver, verifier)] == [
        "memory a worker, server of solver",
        "memory a worker, server of verifier",
    ]
    assert [each.verdict for each in (solver, verifier)] == ["fail", "fail"]
    assert "on GPU 0 (weights 6.88 GB" in solver.finding
    assert solver.finding.endswith("this machine has 3.83 GB, 42% of 9 GB")
    *_, solver, verifier, _host = memory_checks(config, sizes, available | {"cuda": 18 * 10**9})
    assert [each.verdict for each in (solver, verifier)] == ["ok", "ok"]
    assert " of 7.65 GB, 42% of 18 GB; the KV cache has " in solver.finding
    apart = load("multi_policy_tiny", PLACED | {"rollout.engine.devices": [0, 4]})
    *_, solver, verifier, _host = memory_checks(apart, sizes, available)
    assert [each.verdict for each in (solver, verifier)] == ["ok", "ok"]
    assert "on GPU 4 (weights of verifier" in verifier.finding


ON_CPUS = {
    "rollout.engine.name": "sglang",
    "rollout.engine.sglang.shared": True,
    "rollout.engine.sglang.adapter_rank": 16,
    "policies.*.train.adapter": {"name": "lora", "rank": 16, "publish": "adapter"},
}
SHARED = ON_GPUS | ON_CPUS | {"rollout.engine.devices": [0], "evaluation.devices": [3]}


def test_the_memory_of_a_shared_server_is_counted_once_and_its_division_shown() -> None:
    config = load("multi_policy_tiny", SHARED)
    sizes = dict.fromkeys(("solver", "verifier"), ModelSizes.of(QWEN))
    plan = {need.member: need for need in memory_plan(config, sizes)}
    server = plan["a worker, server of solver and verifier"]
    # 8 slots of rank 16 in float32 for each policy: q and o 4096, k and v 3072, gate, up, down 8192
    # inputs and outputs, in 28 layers.
    adapters = 8 * 4 * 16 * 28 * 38_912
    assert server.parts == {
        "weights": 6_882_299_904,
        "adapters of solver": adapters,
        "adapters of verifier": adapters,
        "KV cache": 160 * 229_376,
    }
    assert (server.count, server.gpus, server.share) == (1, (0,), 1.0)
    host = plan["a worker, host"].parts
    version = 2 * ModelSizes.of(QWEN).parameters
    assert host["base for the server"] == version
    assert host["two versions of verifier"] == 2 * version
    assert "version for the server of solver" not in host
    assert len(host) == 5
    *_, check, _host = memory_checks(config, sizes, {"cpu": 10**12, "cuda": 20 * 10**9})
    assert check.finding.startswith("about ")
    assert " on GPU 0 (weights 6.88 GB, adapters of solver " in check.finding
    assert check.finding.endswith("of 20 GB")  # its share is SGLang's own choice
    half = load("multi_policy_tiny", SHARED | {"rollout.engine.sglang.memory_share": 0.5})
    *_, check, _host = memory_checks(half, sizes, {"cpu": 10**12, "cuda": 20 * 10**9})
    tokens = (10**10 - 6_882_299_904 - 2 * adapters) // 229_376
    assert check.finding.endswith(
        f"of 10 GB, 50% of 20 GB; the KV cache has about {tokens:,} tokens"
    )
    *_, check, _host = memory_checks(config, sizes, {"cpu": 10**12, "cuda": 7 * 10**9})
    assert (check.verdict, check.name) == ("fail", f"memory {server.member}")


def test_a_shared_server_on_a_cpu_is_part_of_the_worker_once() -> None:
    config = load("multi_policy_tiny", ON_CPUS)
    sizes = ModelSizes(parameters=1000, vocab=50, hidden=8, layers=1, kv_elements=4)
    *_, worker = memory_plan(config, dict.fromkeys(("solver", "verifier"), sizes))
    assert worker.member == "a worker"
    assert worker.parts["weights"] == 4000
    assert worker.parts["base for the server"] == 2000
    assert {"adapters of solver", "adapters of verifier"} <= worker.parts.keys()


def test_the_placement_of_a_shared_server_is_shown_once() -> None:
    check, _ = placement_checks(load("multi_policy_tiny", SHARED))
    assert check.finding.endswith(
        "; solver and verifier of a worker on GPU 0; solver and verifier of the evaluation on GPU 3"
    )
