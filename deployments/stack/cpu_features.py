"""Check whether this machine's CPU executes the bf16 instructions that it reports.

Some virtual CPUs report AMX without supporting it: the first bf16 matrix product ends the process
with SIGILL and without a Python error. ONEDNN_MAX_CPU_ISA limits the instruction set; it must be
set before torch is imported. The check runs in a child process, since it may crash.
"""

import os
import subprocess
import sys
from pathlib import Path

from deployments.paths import open_private, open_regular

SAFE_ISA = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
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
        base.pop("ONEDNN_MAX_CPU_ISA", None)
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE],
        env=base,
        capture_output=True,
        timeout=PROBE_TIMEOUT_S,
        check=False,
    )
    return probe.returncode == 0


def isa_ceiling(cache: Path) -> dict[str, str]:
    """Return the environment variables that bf16 needs on this machine; usually none.

    The file `cache` stores the result, since the check imports torch. Raises ConfigError when it is
    not a regular file.
    """
    if "ONEDNN_MAX_CPU_ISA" in os.environ:
        return {"ONEDNN_MAX_CPU_ISA": os.environ["ONEDNN_MAX_CPU_ISA"]}
    if not _reports_bf16():
        return {}
    if cache.exists():
        with open(cache, opener=open_regular) as file:
            return SAFE_ISA if file.read() == "refused" else {}
    refused = not survives_bf16()
    new = cache.with_name(f"{cache.name}.tmp")
    with open(new, "w", opener=open_private) as file:
        file.write("refused" if refused else "kept")
    new.replace(cache)
    return SAFE_ISA if refused else {}


def _reports_bf16() -> bool:
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False  # not Linux
