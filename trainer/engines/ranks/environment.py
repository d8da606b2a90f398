"""The environment variables of a rank's process: no credentials, and its own GPU alone."""

import os
import sys
from collections.abc import Mapping
from typing import Final

from storage.import_path import ALLOW_VARIABLE
from storage.machine import gpus

INHERITED: Final = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE"),
        *("TZ", "LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH", "VIRTUAL_ENV"),
        *("XDG_CACHE_HOME", "CC", "CXX", "CUDA_HOME", "CUDA_PATH", "HF_HOME", "HF_HUB_OFFLINE"),
        *("HF_MODULES_CACHE", "TRANSFORMERS_OFFLINE", "TRANSFORMERS_VERBOSITY"),
        *("TOKENIZERS_PARALLELISM", "PYTHONHOME", "PYTHONHASHSEED", "PYTHONUTF8"),
        *("PYTHONIOENCODING", "PYTHONWARNINGS", "PYTHONDONTWRITEBYTECODE"),
        *("PYTHONPYCACHEPREFIX", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER"),
        *("ASTRAFLOW_STACK", ALLOW_VARIABLE),
    )
)
"""What a rank reads: of the system, Python, transformers, and of AstraFlow the mark of the stack
and the packages that a recipe may name. Those of its numeric libraries have these prefixes:
"""
PREFIXES: Final = (
    *("CUDA_", "NCCL_", "GLOO_", "NVIDIA_", "TORCH", "PYTORCH_", "TRITON_", "CUBLAS_", "CUDNN_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "ATEN_", "DS_"),
)


def rank_environment(environment: Mapping[str, str], gpu: str) -> dict[str, str]:
    """Return the variables of a rank's process; `gpu` is the one it sees, empty on a CPU."""
    variables = {
        name: value
        for name, value in environment.items()
        if name in INHERITED or name.startswith(PREFIXES)
    }
    variables["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if gpu:
        variables[gpus.VARIABLE] = gpu
    return variables
