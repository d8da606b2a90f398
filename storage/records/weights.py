"""Records of weights: tensors as bits, and manifests with the files and digests of a version.

Shape legend: N changed elements of a tensor. `storage/weights` stores these records.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias
from weakref import ReferenceType

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field

from storage.plain_names import DataFileName, DataFileNameOrNone, PartName, RunId
from storage.records.numbers import Count, Number, UnixTime

DIMENSIONS_MAX = 64
"""NumPy's limit."""
RANK_MAX = 65_536
"""Limit of the rank of an adapter, as of any dimension of a model."""
Dtype: TypeAlias = Annotated[
    str, Field(pattern=r"\A(BF16|F(16|32|64)|F8_E4M3|F8_E5M2|[IU](8|16|32|64)|BOOL)\z")
]
"""A dtype by its name in safetensors, in an object that is read."""
Shape: TypeAlias = Annotated[tuple[Count, ...], Field(max_length=DIMENSIONS_MAX)]


@dataclass(frozen=True, eq=False)
class HostTensor:
    """A tensor as bits in host memory.

    Example: bf16 [2, 3] → `HostTensor("BF16", (2, 3), bits=uint16 [2, 3])`.
    """

    dtype: str
    """Name in safetensors: BF16, F16, F32, I64, U8, …"""
    shape: tuple[int, ...]
    bits: NDArray[Any]
    """C-contiguous, of `shape`. Unsigned integers of the element's width for BF16, F16, F32 and F8
    (the bit patterns), else the NumPy dtype of the same name.
    """
    difference: "Difference | None" = field(default=None, repr=False)
    """The difference from an older tensor, if it was computed already; saves a comparison."""


@dataclass(frozen=True, eq=False)
class Difference:
    """The changed elements of a tensor, compared with `base`.

    Example: base bits [5, 8, 9], new bits [5, 7, 9] → `positions` [1], `bit_deltas` [65535].
    """

    base: "ReferenceType[HostTensor]"
    """Weak, so that a tensor does not keep older ones in memory."""
    positions: NDArray[np.uint64]
    """[N] indices of exactly the changed elements in the flat tensor, ascending."""
    bit_deltas: NDArray[Any]
    """[N] new − old bits, wrapping; unsigned, of the element's width."""


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor in a manifest."""

    dtype: Dtype
    shape: Shape
    digest: str
    """`xxh3_128:` + hex over the tensor's little-endian bytes."""
    file: DataFileNameOrNone
    """The file with its bytes or its delta; empty when its bits equal those of `source`."""
    entry: str = ""
    """Its name in the file, if that is another one: tied tensors share an entry."""
    source: str = ""
    """In a delta: the tensor of the base version to which the delta is applied. Empty for a tensor
    that is stored whole.
    """


@dataclass(frozen=True)
class FileInfo:
    """One file in a manifest."""

    name: DataFileName
    """With the write id: `{write id}.config.json`."""
    num_bytes: Count
    digest: str
    """`sha256:` + hex over the whole file."""


def _each_once(files: tuple[FileInfo, ...]) -> tuple[FileInfo, ...]:
    if len({file.name for file in files}) < len(files):
        raise ValueError("a file is listed twice")
    return files


FileInfos: TypeAlias = Annotated[tuple[FileInfo, ...], AfterValidator(_each_once)]
"""The files of a manifest that is read: each is read once, and its bytes count once."""


@dataclass(frozen=True)
class StoredDelta:
    """A delta: the changes of a version's tensors since an older version."""

    base: int
    """The older version."""
    tensors: Mapping[str, TensorInfo]
    """As in the version's manifest, but `file`, `entry` and `source` are those of the delta."""
    files: FileInfos


@dataclass(frozen=True, kw_only=True)
class MergedDelta:
    """A merged delta over several versions: `weights/{policy}/{version}/since-{base}.json`."""

    policy: PartName
    version: int
    step: StoredDelta
    created_s: Number = 0.0
    write_id: str = ""


@dataclass(frozen=True, kw_only=True)
class StoredAdapter:
    """How the tensors `{layer}.lora_A.weight` and `{layer}.lora_B.weight` of a version change
    `{layer}.weight` (`storage/formats/adapters.py`).
    """

    kind: Literal["lora"]
    rank: Annotated[int, Field(ge=1, le=RANK_MAX)]
    """Rows of A [rank, inputs], and columns of B [outputs, rank]."""
    alpha: Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]
    rslora: bool = False

    @property
    def scale(self) -> float:
        """Factor of B A: alpha / rank, with `rslora` alpha / √rank."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The version of another run in the same store that is version 0 of a policy. Example:
    `Origin(run="tiny-1", policy="solver", version=40, digest="sha256:…")`.
    """

    run: RunId
    policy: PartName
    version: Count
    digest: str
    """Weights digest of its tensors, as in its manifest when the new run was created."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The manifest of one version of a policy's weights; written last, created once."""

    policy: PartName
    version: int
    parent: int | None
    """version − 1; None for version 0."""
    batch: int | None
    """The batch of its training step (= version); None for version 0."""
    kind: Literal["anchor", "delta"]
    base: int | None
    """The version a delta is applied to; None for an anchor."""
    digest: str
    """`sha256:` over the sorted `name dtype shape tensor-digest` lines: equal digests mean
    bit-equal weights.
    """
    tensors: Mapping[str, TensorInfo]
    files: FileInfos
    """Tensor files. Version 0 lists the model's other files too (`config.json`, tokenizer, …)."""
    step: StoredDelta | None = None
    """Of an anchor: its delta to the version before, for readers that have loaded that version."""
    adapter: StoredAdapter | None = None
    """Which of the tensors are an adapter, to be merged into the others; None: there is none."""
    origin: Origin | None = None
    """Of version 0: the version of another run that it was made from; None: of another source."""
    metrics: Mapping[str, Number] = field(default_factory=dict)
    """`trainer/…` metrics of its training step."""
    created_s: UnixTime = 0.0
    write_id: str = ""

    @property
    def shared(self) -> Origin | None:
        """The origin whose stored tensors are this version's; None where it has its own."""
        has_own = any(info.file for info in self.tensors.values())
        return None if self.origin is None or has_own else self.origin
