from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from rollout.config import EngineConfig, SglangConfig
from rollout.engines.sglang.engine import SglangRolloutEngine
from rollout.engines.sglang.server_process import ServerProcess, served_config, server_args
from storage.errors import ConfigError
from tests.support.models.chain_model import CONFIG, counting
from tests.support.patience import until

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
    assert (args["--device"], args["--base-gpu-id"], args["--tp-size"]) == ("cuda", "3", "2")
    assert (args["--dtype"], args["--max-running-requests"]) == ("bfloat16", "128")
    assert (args["--mem-fraction-static"], args["--attention-backend"]) == ("0.75", "fa3")
    assert (args["--host"], args["--port"]) == ("127.0.0.1", "4000")
    assert int(args["--context-length"]) > 2000


def test_a_server_on_a_cpu_needs_no_kernels_of_a_gpu() -> None:
    args = args_of(EngineConfig(name="sglang", max_concurrent=4, max_tokens=100))
    assert (args["--device"], args["--attention-backend"]) == ("cpu", "torch_native")
    assert int(args["--max-total-tokens"]) == 4 * int(args["--context-length"])


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"device 'tpu' cannot be used by sglang; use cpu, cuda"):
        server_args(EngineConfig(name="sglang", device="tpu"), MODEL, 4000)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ["Qwen3ForCausalLM"]),
        ({"architectures": ["MyForCausalLM"]}, ["MyForCausalLM"]),
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


def test_an_interpreter_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    config = EngineConfig(name="sglang", sglang=SglangConfig(python=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match=r"rollout\.engine\.sglang\.python '.*none' cannot be"):
        ServerProcess(config, CONFIG)


async def test_a_server_that_cannot_start_is_refused_with_its_last_words(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho ModuleNotFoundError: sglang >&2\nexit 3\n")
    python.chmod(0o755)
    engine = SglangRolloutEngine(
        EngineConfig(name="sglang", sglang=SglangConfig(python=str(python))), CONFIG
    )
    with pytest.raises(ConfigError, match=r"ended with status 3; .*ModuleNotFoundError: sglang"):
        await engine.load(0, counting(1))
    await engine.close()


def test_stopping_a_server_kills_it_and_deletes_its_folder(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\npwd > {tmp_path}/folder\nexec sleep 3600\n")
    python.chmod(0o755)
    server = ServerProcess(
        EngineConfig(name="sglang", sglang=SglangConfig(python=str(python))), CONFIG
    )
    until(lambda: (tmp_path / "folder").exists() and (tmp_path / "folder").read_text() != "")
    assert server.ended() == ""
    server.stop()
    server.stop()
    assert server.ended().startswith("the SGLang server ended with status -9")
    assert not Path((tmp_path / "folder").read_text().strip()).exists()
