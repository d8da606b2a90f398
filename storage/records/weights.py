"""Records of weights: tensors as bits, and the manifest that lists the files and digests of one
version.

`weights/` stores them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias
from weakref import ReferenceType

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from storage.plain_names import DataFileName, DataFileNameOrNone, PartName
from storage.records.numbers import Count, Number, UnixTime

DIMENSIONS_MAX = 64
"""NumPy's own bound."""
Dtype: TypeAlias = Annotated[
    str, Field(pattern=r"\A(BF16|F(16|32|64)|F8_E4M3|F8_E5M2|[IU](8|16|32|64)|BOOL)\z")
]
"""safetensors' name, in an object that is read."""
Shape: TypeAlias = Annotated[tuple[Count, ...], Field(max_length=DIMENSIONS_MAX)]


@dataclass(frozen=True, eq=False)
class HostTensor:
    """A tensor as bits in host memory, free of torch. Example: bf16 [2, 3] →
    `HostTensor("BF16", (2, 3), uint16 [2, 3])`.
    """

    dtype: str
    """safetensors' name: BF16, F16, F32, I64, U8, …"""
    shape: tuple[int, ...]
    bits: NDArray[Any]
    """C-contiguous, of `shape`; unsigned integer of the element's width for BF16/F16/F32 (the bit
    pattern), else its own dtype.
    """
    difference: "Difference | None" = field(default=None, repr=False)
    """What its maker knows of how it differs from an older tensor. It saves a comparison; the bits
    alone are the truth.
    """


@dataclass(frozen=True, eq=False)
class Difference:
    """How a tensor differs from `base`. Example: bits [5, 7, 9], before [5, 8, 9] → `positions`
    [1], `steps` [65535].
    """

    base: "ReferenceType[HostTensor]"
    """Weak, so that a tensor keeps none of those before it alive."""
    positions: NDArray[np.uint64]
    """[n] of all elements that differ and of no others, in the flat tensor, ascending."""
    steps: NDArray[Any]
    """[n] new − old, wrapping; unsigned, of the element's width."""


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    dtype: Dtype
    shape: Shape
    digest: str
    """`xxh3_128:` + hex over the tensor's little-endian bytes."""
    file: DataFileNameOrNone
    """Where its bytes, or its change, lie; empty when its bits are those of `source`."""
    entry: str = ""
    """Its name in that file, when that is not its own: tied tensors share one entry."""
    source: str = ""
    """In a delta: the base's tensor that it comes from. Empty for a tensor that is there as a
    whole.
    """


@dataclass(frozen=True)
class FileInfo:
    name: DataFileName
    """With the id of its writer: `{write id}.config.json`."""
    num_bytes: Count
    digest: str
    """`sha256:` + hex over the whole file."""


@dataclass(frozen=True)
class StoredDelta:
    """How a version's tensors come from those of an older one."""

    base: int
    """The older version."""
    tensors: Mapping[str, TensorInfo]
    """As in the version's manifest, but `file`, `entry` and `source` tell the way from `base`."""
    files: tuple[FileInfo, ...]


@dataclass(frozen=True, kw_only=True)
class MergedDelta:
    """`weights/{policy}/{version}/since-{base}.json`: a way that passes over the versions in
    between. Created once.
    """

    policy: PartName
    version: int
    step: StoredDelta
    created_s: Number = 0.0
    write_id: str = ""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One version of one policy's weights; the last object written of it, created once."""

    policy: PartName
    version: int
    parent: int | None
    """version − 1; None for version 0."""
    batch: int | None
    """The batch that made it (= version); None for version 0."""
    kind: Literal["anchor", "delta"]
    base: int | None
    """The version a delta is applied to; None for an anchor."""
    digest: str
    """`sha256:` over the sorted `name dtype shape tensor-digest` lines: equal digests mean
    bit-equal weights.
    """
    tensors: Mapping[str, TensorInfo]
    files: tuple[FileInfo, ...]
    """Tensor files. Version 0 lists the model's other files too (`config.json`, tokenizer, …)."""
    step: StoredDelta | None = None
    """Of an anchor: how it also comes from the version before, for those who hold that."""
    metrics: Mapping[str, Number] = field(default_factory=dict)
    """`trainer/…` metrics of the step that made it."""
    created_s: UnixTime = 0.0
    write_id: str = ""
