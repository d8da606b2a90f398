"""Save and restore all random states of this process, as tensors and JSON."""

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
    """Return torch's states as U8 tensors `torch`, `cuda/0`, …, Python's and NumPy's as JSON."""
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
    """Restore the states that `capture` returned, except those of GPUs that are not available."""
    torch.set_rng_state(to_torch(tensors["torch"]))
    for index in range(torch.cuda.device_count()):
        if f"cuda/{index}" in tensors:
            torch.cuda.set_rng_state(to_torch(tensors[f"cuda/{index}"]), index)
    python, numpy_state = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    keys = np.array(numpy_state["keys"], dtype=np.uint32)
    np.random.set_state(
        (
            numpy_state["kind"],
            keys,
            numpy_state["position"],
            numpy_state["has_gauss"],
            numpy_state["cached"],
        )
    )
