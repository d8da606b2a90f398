"""Check whether this machine's CPU executes the bf16 instructions that it reports.

Some virtual CPUs report AMX without supporting it: the first bf16 matrix product ends the process
with SIGILL and without a Python error. ONEDNN_MAX_CPU_ISA limits the instruction set; it must be
set before torch is imported. The check runs in a child process, since it may crash. Importing this
module does not import torch.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from storage.errors import ConfigError

ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
SAFE_ISA = {ISA_VARIABLE: "AVX512_CORE_FP16"}
PROBE_TIMEOUT_S = 900.0
"""Importing torch takes seconds, and minutes on a busy machine."""
_PROBE = """
import torch
a = torch.ones(64, 64, dtype=torch.bfloat16, requires_grad=True)
(a @ a).sum().backward()
"""


def survives_bf16(environment: dict[str, str] | None = None) -> bool:
    """Multiply two bf16 matrices in a child process, forward and backward; return its success."""
    base = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    if environment is None:
        base.pop(ISA_VARIABLE, None)
    probe = subprocess.run(
        [sys.executable, "-P", "-c", _PROBE],
        env=base,
        capture_output=True,
        timeout=PROBE_TIMEOUT_S,
        check=False,
    )
    return probe.returncode == 0


def reports_bf16() -> bool:
    """Return whether the CPU reports the instructions that some virtual CPUs do not execute."""
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False  # not Linux


@cache
def check_bf16(setting: str) -> None:
    """Raise ConfigError where a bf16 matrix product on the CPU would end this process.

    `setting` of the recipe needs such products. With ONEDNN_MAX_CPU_ISA set, nothing is checked.
    """
    if ISA_VARIABLE in os.environ or not reports_bf16() or survives_bf16():
        return
    (value,) = SAFE_ISA.values()
    raise ConfigError(
        f"{setting} needs bf16 instructions, which this CPU reports and does not execute; set "
        f"{ISA_VARIABLE}={value} in the environment of the process"
    )
