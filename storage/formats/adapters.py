"""Adapters among the tensors of a version, and how they are merged into its weights.

    {layer}.weight           W [outputs, inputs], of the base model
    {layer}.lora_A.weight    A [rank, inputs]
    {layer}.lora_B.weight    B [outputs, rank]

A manifest with the field `adapter` has such tensors. Engines and exports get merged weights. All A
and B together have at most as many elements as all W: a merge takes rank · outputs · inputs
multiplications, and A and B may be unchanged tensors of the base, of which nothing is stored.
"""

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from storage.machine.cpus import num_cpus
from storage.records.types import Float32
from storage.records.weights import HostTensor, StoredAdapter, TensorInfo

WEIGHT, LORA_A, LORA_B = ".weight", ".lora_A.weight", ".lora_B.weight"
"""What follows the name of a layer."""
DTYPES = ("BF16", "F16", "F32")
"""Dtypes of W, A and B."""
BLOCK_ELEMENTS = 2**20
"""Elements that are merged at once; each takes 12 bytes of temporary memory."""


class Merged(NamedTuple):
    """The tensors of a version after merging, and what they were made of."""

    adapter: StoredAdapter | None
    given: Mapping[str, HostTensor]
    tensors: Mapping[str, HostTensor]


def is_adapter(name: str) -> bool:
    """Return whether a tensor of this name is part of an adapter."""
    return name.endswith((LORA_A, LORA_B))


def merge(weight: Any, a: Any, b: Any, scale: float) -> Any:
    """Return W + scale · B A (LoRA, arXiv 2106.09685, equation 3).

    The arrays are float32, of NumPy or of torch. Where B is 0, as it is before the first step, the
    result is W itself: an addition would make 0.0 of −0.0.
    """
    return weight + scale * (b @ a) if b.any() else weight


def merged(
    adapter: StoredAdapter | None, given: Mapping[str, HostTensor], before: Merged | None = None
) -> Merged:
    """Return the tensors of a version without those of its adapter, which is merged.

    A merged tensor has the dtype of W, rounded to nearest even. Tensors without A and B are the
    given objects; so are merged tensors those of `before` where W, A and B are the same objects.

    Args:
        adapter: of the version's manifest, which was checked; None: there is nothing to merge.
        before: the result for another version.
    """
    if adapter is None:
        return Merged(None, given, given)

    def made(name: str) -> HostTensor:
        layer = name.removesuffix(WEIGHT)
        names = name, layer + LORA_A, layer + LORA_B
        if not name.endswith(WEIGHT) or names[1] not in given:
            return given[name]
        if (
            before is not None
            and before.adapter == adapter
            and all(before.given.get(each) is given[each] for each in names)
        ):
            return before.tensors[name]
        return _merged_tensor(*(given[each] for each in names), scale=adapter.scale)

    names = [name for name in given if not is_adapter(name)]
    with ThreadPoolExecutor(num_cpus()) as pool:
        return Merged(adapter, given, dict(zip(names, pool.map(made, names), strict=True)))


def fault(
    adapter: StoredAdapter, infos: Mapping[str, TensorInfo] | Mapping[str, HostTensor]
) -> str:
    """Return why the tensors of a version are not those of its adapter; empty if they are."""
    layers = {
        name.removesuffix(end) for name in infos for end in (LORA_A, LORA_B) if name.endswith(end)
    }
    num_own = num_changed = 0
    for layer in sorted(layers):
        weight, a, b = (infos.get(layer + end) for end in (WEIGHT, LORA_A, LORA_B))
        if weight is None or a is None or b is None:
            return f"lacks one of the tensors {layer}{{{WEIGHT},{LORA_A},{LORA_B}}}"
        if any(each.dtype not in DTYPES for each in (weight, a, b)):
            return f"has other dtypes than {', '.join(DTYPES)} for {layer}"
        if len(weight.shape) != 2 or (a.shape, b.shape) != (
            (adapter.rank, weight.shape[1]),
            (weight.shape[0], adapter.rank),
        ):
            return (
                f"has matrices of {layer} that do not fit: W {list(weight.shape)}, "
                f"A {list(a.shape)}, B {list(b.shape)}, rank {adapter.rank}"
            )
        num_own += math.prod(a.shape) + math.prod(b.shape)
        num_changed += math.prod(weight.shape)
    if num_own > num_changed:
        return (
            f"has {num_own:,} elements in A and B, more than the {num_changed:,} of the weights "
            "that they change; the rank is too large"
        )
    return "" if layers else "has no tensors of an adapter"


def _merged_tensor(weight: HostTensor, a: HostTensor, b: HostTensor, *, scale: float) -> HostTensor:
    a_values, b_values = _values(a.bits, a.dtype), _values(b.bits, b.dtype)
    if not b_values.any():
        return weight
    bits = np.empty_like(weight.bits)
    num_rows = max(1, BLOCK_ELEMENTS // max(1, weight.shape[1]))
    with np.errstate(all="ignore"):  # the dtypes have infinities, and NumPy only warns of them
        for start in range(0, weight.shape[0], num_rows):
            rows = slice(start, start + num_rows)
            values = _values(weight.bits[rows], weight.dtype)
            bits[rows] = _bits(merge(values, a_values, b_values[rows], scale), weight.dtype)
    return HostTensor(weight.dtype, weight.shape, bits)


def _values(bits: NDArray[Any], dtype: str) -> Float32:
    if dtype == "BF16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(np.float16).astype(np.float32) if dtype == "F16" else bits.view(np.float32)


def _bits(values: Float32, dtype: str) -> NDArray[Any]:
    """Return the bits of float32 values, rounded to nearest even."""
    if dtype == "F16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    if dtype == "F32":
        return bits
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits + half) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
