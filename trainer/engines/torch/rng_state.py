"""Save and restore all random states of this process, as tensors and JSON."""

import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field

from storage.errors import CorruptError
from storage.records.types import Json
from storage.records.weights import HostTensor
from trainer.engines.torch.host_tensors import to_host, to_torch

_MERSENNE_WORDS = 624
_TORCH_BYTES = 5056
_TORCH_POSITION = struct.Struct("<i4xQ")
"""Of torch's state on the CPU, after 8 bytes with the seed: the words that are left, and the next
one.
"""
_Word = Annotated[int, Field(ge=0, lt=2**32)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True)
class PythonRandomState:
    """The state of Python's `random`."""

    version: int
    words: Annotated[
        tuple[_Word, ...], Field(min_length=_MERSENNE_WORDS + 1, max_length=_MERSENNE_WORDS + 1)
    ]
    """[625] the generator's words, then the position of the next one."""
    gauss: _Finite | None


@dataclass(frozen=True, kw_only=True)
class NumpyRandomState:
    """The state of NumPy's global generator. NumPy itself does not check the position."""

    kind: Literal["MT19937"]
    keys: Annotated[
        tuple[_Word, ...], Field(min_length=_MERSENNE_WORDS, max_length=_MERSENNE_WORDS)
    ]
    position: Annotated[int, Field(ge=0, le=_MERSENNE_WORDS)]
    has_gauss: Literal[0, 1]
    cached: _Finite


@dataclass(frozen=True, kw_only=True)
class RandomStates:
    """The random states in the JSON of `capture`."""

    python: PythonRandomState
    numpy: NumpyRandomState


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


def _check_position(state: bytes) -> None:
    """Raise CorruptError for a position with which torch reads beyond its words, unchecked."""
    if len(state) != _TORCH_BYTES:
        return  # torch refuses it
    left, following = _TORCH_POSITION.unpack_from(state, 8)
    is_new = (left, following) == (1, 0)
    if not is_new and not (left >= 1 and left + following == _MERSENNE_WORDS + 1):
        raise CorruptError(
            f"rng/torch is at word {following} with {left} words left, of {_MERSENNE_WORDS}"
        )


def restore(tensors: Mapping[str, HostTensor], state: RandomStates) -> None:
    """Restore the states that `capture` returned, except those of GPUs that are not available.

    CorruptError when torch's state is missing or of another form.
    """
    if "torch" not in tensors:
        raise CorruptError("the random state of torch, rng/torch, is missing")
    _check_position(tensors["torch"].bits.tobytes())
    try:
        torch.set_rng_state(to_torch(tensors["torch"]))
        for index in range(torch.cuda.device_count()):
            if f"cuda/{index}" in tensors:
                torch.cuda.set_rng_state(to_torch(tensors[f"cuda/{index}"]), index)
        random.setstate((state.python.version, state.python.words, state.python.gauss))
    except (RuntimeError, TypeError, ValueError) as error:
        raise CorruptError(f"the random states cannot be restored: {error}") from error
    numpy_state = state.numpy
    np.random.set_state(
        (
            numpy_state.kind,
            np.array(numpy_state.keys, dtype=np.uint32),
            numpy_state.position,
            numpy_state.has_gauss,
            numpy_state.cached,
        )
    )
