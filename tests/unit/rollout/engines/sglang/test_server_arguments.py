from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import AutoConfig

from rollout.config import EngineConfig, SglangConfig
from rollout.engines.sglang.server_arguments import (
    POSITIONS_MAX,
    served_config,
    server_args,
    server_environment,
)
from storage.errors import ConfigError
from tests.support.models.chain_model import CONFIG

MODEL = Path("/models/a")


def args_of(config: EngineConfig) -> dict[str, str]:
    args = server_args(config, MODEL, 4000)
    return {
        flag: value if not value.startswith("--") else ""
        for flag, value in zip(args, [*args[1:], "--"], strict=True)
        if flag.startswith("--")
    }


def test_the_recipe_determines_the_arguments_of_the_server() -> None:
    args = args_of(
        EngineConfig(
            name="sglang",
            device="cuda:3",
            dtype="bfloat16",
            max_concurrent=128,
            max_tokens=2000,
            sglang=SglangConfig(
                tensor_parallel=2, memory_share=0.75, server_args=("--attention-backend", "fa3")
            ),
        )
    )
    assert args["--model-path"] == "/models/a"
    assert (args["--device"], args["--base-gpu-id"], args["--tp-size"]) == ("cuda", "0", "2")
    assert (args["--dtype"], args["--max-running-requests"]) == ("bfloat16", "128")
    assert (args["--mem-fraction-static"], args["--attention-backend"]) == ("0.75", "fa3")
    assert (args["--host"], args["--port"]) == ("127.0.0.1", "4000")
    assert int(args["--context-length"]) > 2000


def test_a_server_on_a_cpu_needs_no_kernels_of_a_gpu() -> None:
    args = args_of(EngineConfig(name="sglang", max_concurrent=4, max_tokens=100))
    assert (args["--device"], args["--attention-backend"]) == ("cpu", "torch_native")
    assert int(args["--max-total-tokens"]) == 4 * int(args["--context-length"])


@pytest.mark.parametrize(
    ("visible", "settings", "expected"),
    [
        (None, {"device": "cuda"}, "0"),
        (None, {"device": "cuda:3", "sglang": SglangConfig(tensor_parallel=2)}, "3,4"),
        ("4,GPU-a,7", {"device": "cuda", "devices": (2,)}, "7"),
        (
            "4,GPU-a,7",
            {"device": "cuda", "devices": (2, 1), "sglang": SglangConfig(tensor_parallel=2)},
            "7,GPU-a",
        ),
        ("4,GPU-a,7", {"device": "cpu"}, "4,GPU-a,7"),
    ],
)
def test_a_server_sees_its_own_gpus_alone(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    visible: str | None,
    settings: dict[str, Any],
    expected: str,
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    variables = server_environment(EngineConfig(name="sglang", **settings), tmp_path)
    assert variables["CUDA_VISIBLE_DEVICES"] == expected


def test_a_gpu_beyond_the_visible_ones_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    config = EngineConfig(name="sglang", device="cuda", devices=(1,))
    with pytest.raises(ConfigError, match="GPU 1 cannot be used: CUDA_VISIBLE_DEVICES is '4'"):
        server_environment(config, tmp_path)


def test_compiled_code_is_in_the_folder_of_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/torchinductor_root")
    variables = server_environment(EngineConfig(name="sglang"), tmp_path)
    assert variables["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
    assert variables["TMPDIR"] == str(tmp_path)


def test_no_process_of_a_server_is_started_by_a_script_in_tmp(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SGLANG_NUMA_BIND_V2", "1")
    assert server_environment(EngineConfig(name="sglang"), tmp_path)["SGLANG_NUMA_BIND_V2"] == "0"


def test_the_share_of_a_device_is_given_as_a_fraction_of_what_is_free_on_it() -> None:
    config = EngineConfig(name="sglang", device="cuda", sglang=SglangConfig(memory_share=0.4))
    args = server_args(config, MODEL, 4000, free=0.5)
    assert args[args.index("--mem-fraction-static") + 1] == "0.8"
    alone = server_args(EngineConfig(name="sglang", device="cuda"), MODEL, 4000, free=0.5)
    assert "--mem-fraction-static" not in alone


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"device 'tpu' cannot be used by sglang; use cpu, cuda"):
        server_args(EngineConfig(name="sglang", device="tpu"), MODEL, 4000)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ["Qwen3ForCausalLM"]),
        ({"architectures": ["Qwen3ForCausalLM"]}, ["Qwen3ForCausalLM"]),
        ({"model_type": "llama"}, ["LlamaForCausalLM"]),
    ],
)
def test_the_served_config_names_the_class_of_the_model_and_no_end_token(
    change: dict[str, Any], expected: list[str]
) -> None:
    served = served_config({**CONFIG, "eos_token_id": 2, **change})
    assert AutoConfig.for_model(**served).eos_token_id is None
    assert served["architectures"] == expected
    assert served["eos_token_id"] is None


def test_a_model_type_that_is_no_language_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="model_type 'warp'"):
        served_config({"model_type": "warp"})


def test_a_served_config_names_no_code() -> None:
    auto_map = {"AutoModel": "/tmp/code--module.Class"}
    served = served_config(
        {**CONFIG, "auto_map": auto_map, "text_config": {"auto_map": auto_map, "parts": [auto_map]}}
    )
    assert "auto_map" not in served
    assert served["text_config"] == {"parts": [auto_map], "eos_token_id": None}


def test_a_class_that_transformers_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"architectures .*Nope.* is Qwen3ForCausalLM"):
        served_config({**CONFIG, "architectures": ["Nope"]})


@pytest.mark.parametrize(
    "change",
    [
        {"max_position_embeddings": POSITIONS_MAX + 1},
        {"text_config": {"max_position_embeddings": 10**12}},
        {"max_position_embeddings": 2**20, "rope_scaling": {"rope_type": "yarn", "factor": 32.0}},
        {"rope_scaling": {"original_max_position_embeddings": 2**20, "factor": float("nan")}},
    ],
)
def test_absurd_numbers_of_positions_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"positions, and at most {POSITIONS_MAX} are served"):
        served_config({**CONFIG, **change})


def test_positions_up_to_the_limit_are_served() -> None:
    rope = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 2**20}
    served = served_config(
        {**CONFIG, "max_position_embeddings": POSITIONS_MAX, "rope_scaling": rope}
    )
    assert (served["max_position_embeddings"], served["rope_scaling"]) == (POSITIONS_MAX, rope)


@pytest.mark.parametrize(
    "arg",
    [
        "--host",
        "--host=0.0.0.0",
        "--hos",
        "--api-key",
        "--forward-hooks=[]",
        "--model_path",
        "--nccl-init-addr=0.0.0.0:1",
        "--sidecar",
        "--crash-dump-f",
        "--kv-events-config={}",
        "--enable-dp-attention",
        "a\0b",
    ],
)
def test_arguments_that_the_engine_sets_or_that_run_code_are_refused(arg: str) -> None:
    with pytest.raises(ValidationError, match=r"not for recipes|null character"):
        SglangConfig(server_args=(arg,))


def test_other_arguments_are_accepted() -> None:
    args = ("--attention-backend", "fa3", "-1", "--enable-deterministic-inference")
    assert SglangConfig(server_args=args).server_args == args


@pytest.mark.parametrize(
    "url",
    ["http://10.0.0.5:30000", "http://localhost:30000", "http://127.0.0.1", "ftp://127.0.0.1:1"],
)
def test_a_server_of_another_machine_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="must be an address of this machine with a port"):
        SglangConfig(urls=(url,))


@pytest.mark.parametrize("end", ["\n", "\t", "/\0", "/\x1b[2J", "/é"])
def test_an_address_that_cannot_be_requested_is_refused(end: str) -> None:
    with pytest.raises(ValidationError, match="must not contain control characters"):
        SglangConfig(urls=(f"http://127.0.0.1:30000{end}",))


def test_a_server_inherits_no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secrets = ("AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "HF_TOKEN", "GITHUB_TOKEN", "ASTRAFLOW_STORE")
    for name in secrets:
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    variables = server_environment(EngineConfig(name="sglang"), tmp_path)
    assert not set(secrets) & set(variables)
    assert (variables["NCCL_DEBUG"], variables["HF_HUB_OFFLINE"]) == ("WARN", "1")
    assert "PATH" in variables
