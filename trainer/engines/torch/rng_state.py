"""Every random state of this process as plain tensors and JSON: a resumed trainer draws what it
would have drawn.
"""

import random
from collections.abc import Mapping

import numpy as np
import torch

from storage.records.types import Json
from storage.records.weights import HostTensor
from trainer.engines.torch.host_tensors import to_host, to_torch


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch, on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture() -> tuple[dict[str, HostTensor], Json]:
    """The states now: torch's as U8 tensors `torch` and `cuda/0`, …; Python's and NumPy's as lists
    of integers.
    """
    tensors = {"torch": to_host(torch.get_rng_state())}
    for index in range(torch.cuda.device_count()):
        tensors[f"cuda/{index}"] = to_host(torch.cuda.get_rng_state(index))
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "kind": kind,
            "keys": [int(key) for key in keys],
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
    }
    return tensors, state


def restore(tensors: Mapping[str, HostTensor], state: Json) -> None:
    """Put back what `capture` gave. States of GPUs that this machine lacks are left out."""
    torch.set_rng_state(to_torch(tensors["torch"]))
    for index in range(torch.cuda.device_count()):
        if f"cuda/{index}" in tensors:
            torch.cuda.set_rng_state(to_torch(tensors[f"cuda/{index}"]), index)
    python, legacy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    keys = np.array(legacy["keys"], dtype=np.uint32)
    np.random.set_state(
        (legacy["kind"], keys, legacy["position"], legacy["has_gauss"], legacy["cached"])
    )
