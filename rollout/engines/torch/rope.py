"""Rotary position embeddings in Hugging Face's half-split layout.

Su et al. 2021, https://arxiv.org/abs/2104.09864.

Shapes: T positions, N tokens, H heads, D head dimension.
"""

import math
import sys
from typing import Any

import torch
from torch import Tensor

from storage.errors import ConfigError
from storage.records.types import Json

NUMBERS = {
    "default": ("rope_theta",),
    "linear": ("rope_theta", "factor"),
    "llama3": (
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    ),
}
"""Settings that the frequencies of a `rope_type` are computed from."""


def inverse_frequencies(rope: Json, head_dim: int) -> Tensor:
    """Return the angle per position of each rotated pair, [D/2] float32.

    `default`: θ^(−2i/D). `linear`: the same divided by `factor`. `llama3`: long wavelengths divided
    by `factor`, short ones unchanged, a linear blend between.

    Raises:
        ConfigError: the scaling is not implemented, or a setting is not a positive number, or the
            angles are not finite.
    """
    kind = rope.get("rope_type", "default")
    is_known = isinstance(kind, str) and kind in NUMBERS
    if not is_known or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"the torch engine does not implement the rope scaling {rope!r} of the model's "
            "config.json; it implements rope_type default, linear and llama3 with the whole head "
            "rotated"
        )
    for name in NUMBERS[kind]:
        value: Any = rope.get(name)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise ConfigError(
                f"the {name} of rope_parameters in the model's config.json must be a positive "
                f"number, not {value!r}; correct it"
            )
    # As floats: torch takes no integer of more than 64 bits.
    rope = {**rope, **{name: float(rope[name]) for name in NUMBERS[kind]}}
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies: Tensor = 1.0 / (rope["rope_theta"] ** exponents)
    if kind == "linear":
        frequencies = frequencies.div_(rope["factor"])
    elif kind == "llama3":
        frequencies = _llama3(frequencies, rope)
    if not frequencies.isfinite().all():
        raise ConfigError(
            f"the rope_parameters {rope!r} of the model's config.json give angles that are not "
            "finite; correct them"
        )
    return frequencies


def _llama3(frequencies: Tensor, rope: Json) -> Tensor:
    original, low, high = (
        rope["original_max_position_embeddings"],
        rope["low_freq_factor"],
        rope["high_freq_factor"],
    )
    rotations = original * frequencies / (2 * math.pi)
    unscaled_share = ((rotations - low) / (high - low)).clamp(0, 1)
    return torch.lerp(frequencies / rope["factor"], frequencies, unscaled_share)


def rotation_tables(
    rope: Json, head_dim: int, positions: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines [T, 1, D] for `rotate`; float32 rounded to `dtype`."""
    angles = torch.outer(torch.arange(positions).float(), inverse_frequencies(rope, head_dim))
    cosines = torch.cat((angles.cos(), angles.cos()), dim=-1)
    sines = torch.cat((-angles.sin(), angles.sin()), dim=-1)
    return cosines[:, None].to(device, dtype), sines[:, None].to(device, dtype)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate `x` [N, H, D] by each token's angles: rows [N, 1, D] of the tables."""
    return torch.addcmul(x * cosines, x.roll(x.shape[-1] // 2, -1), sines)
