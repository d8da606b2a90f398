"""The instruction ceiling that bf16 needs on this machine (`trainer/cpu_bf16.py`), found once."""

import os
from pathlib import Path

from deployments.paths import open_regular, private_file
from trainer.cpu_bf16 import SAFE_ISA, reports_bf16, survives_bf16


def isa_ceiling(cache: Path) -> dict[str, str]:
    """Return the environment variables that bf16 needs on this machine; usually none.

    The file `cache` stores the result, since the check imports torch. Raises ConfigError when it is
    not a regular file.
    """
    if "ONEDNN_MAX_CPU_ISA" in os.environ:
        return {"ONEDNN_MAX_CPU_ISA": os.environ["ONEDNN_MAX_CPU_ISA"]}
    if not reports_bf16():
        return {}
    if cache.exists():
        with open(cache, opener=open_regular) as file:
            return SAFE_ISA if file.read() == "refused" else {}
    refused = not survives_bf16()
    new = cache.with_name(f"{cache.name}.tmp")
    with private_file(new) as file:
        file.write("refused" if refused else "kept")
    new.replace(cache)
    return SAFE_ISA if refused else {}
