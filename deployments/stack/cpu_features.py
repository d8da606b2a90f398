"""Whether this machine's CPU keeps its word about bf16.

Some virtual CPUs announce AMX and then refuse it: the first bf16 matrix product ends in SIGILL,
without a Python error. A ceiling on the instruction set, in the environment before torch is
imported, cures it. The probe dies in a child's place.
"""

import os
import subprocess
import sys
from pathlib import Path

SAFE_ISA = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
PROBE_TIMEOUT_S = 900.0
"""A backstop: importing torch takes seconds, and minutes on a busy machine."""
_PROBE = "import torch;a = torch.ones(64, 64, dtype=torch.bfloat16, requires_grad=True);(a @ a).sum().backward()"


def survives_bf16(environment: dict[str, str] | None = None) -> bool:
    """Multiplies two bf16 matrices in a child process, forward and backward."""
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


def isa_ceiling(memory: Path) -> dict[str, str]:
    """The environment variables that bf16 needs on this machine; often none. The answer is
    remembered in a file, since asking costs the import of torch.
    """
    if "ONEDNN_MAX_CPU_ISA" in os.environ:
        return {"ONEDNN_MAX_CPU_ISA": os.environ["ONEDNN_MAX_CPU_ISA"]}
    if not _announces_bf16():
        return {}
    if memory.exists():
        return SAFE_ISA if memory.read_text() == "refused" else {}
    refused = not survives_bf16()
    memory.write_text("refused" if refused else "kept")
    return SAFE_ISA if refused else {}


def _announces_bf16() -> bool:
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False  # no Linux: no AMX behind a hypervisor either
