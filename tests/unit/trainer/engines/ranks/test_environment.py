import os
import subprocess
import sys

import pytest

from trainer.engines.ranks.environment import rank_environment

SECRETS = (
    *(
        "AWS_SECRET_ACCESS_KEY",
        "PREFECT_API_KEY",
        "PREFECT_API_AUTH_STRING",
        "MLFLOW_TRACKING_TOKEN",
    ),
    *("HF_TOKEN", "GITHUB_TOKEN", "PGPASSWORD", "ASTRAFLOW_SGLANG_API_KEY", "WANDB_API_KEY"),
)


def test_a_rank_inherits_no_credentials() -> None:
    given = dict.fromkeys(SECRETS, "secret") | {"PATH": "/bin", "NCCL_DEBUG": "WARN"}
    variables = rank_environment(given, "")
    assert variables.keys() == {"PATH", "NCCL_DEBUG", "PYTHONPATH"}


@pytest.mark.parametrize(
    "name",
    [
        *("ONEDNN_MAX_CPU_ISA", "OMP_NUM_THREADS", "LD_LIBRARY_PATH", "ASTRAFLOW_IMPORT_ALLOW"),
        *("ASTRAFLOW_STACK", "PYTORCH_CUDA_ALLOC_CONF", "DS_ACCELERATOR", "PYTHONWARNINGS"),
    ],
)
def test_a_rank_inherits_what_its_libraries_and_astraflow_read(name: str) -> None:
    assert rank_environment({name: "x"}, "")[name] == "x"


def test_a_rank_sees_its_own_gpu_alone_and_one_on_a_cpu_what_the_leader_sees() -> None:
    given = {"CUDA_VISIBLE_DEVICES": "4,6", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert rank_environment(given, "6")["CUDA_VISIBLE_DEVICES"] == "6"
    assert rank_environment(given, "6")["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert rank_environment(given, "")["CUDA_VISIBLE_DEVICES"] == "4,6"


def test_a_process_with_the_environment_of_a_rank_can_import_the_engine() -> None:
    program = "import os, trainer.engines.ranks.rank; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    ended = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=rank_environment(os.environ, "3"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "3\n"
