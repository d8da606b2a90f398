"""Digests of tensors, and the safetensors format, for tensors as bits in host memory.

A file is `u64 length of the header | JSON header, padded to 8 bytes | the tensors' bytes`,
little-endian. The safetensors package is not used, because it has no NumPy type for bf16. Files are
read without a copy.
"""

import hashlib
import json
import math
import reprlib
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from storage.errors import CorruptError
from storage.records.types import Json
from storage.records.weights import DIMENSIONS_MAX, HostTensor, TensorInfo

if sys.byteorder != "little":
    raise ImportError(
        "AstraFlow stores little-endian tensors and runs on little-endian machines only"
    )

BITS: Mapping[str, str] = {
    "F64": "float64", "F32": "uint32", "F16": "uint16", "BF16": "uint16",
    "F8_E4M3": "uint8", "F8_E5M2": "uint8",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""safetensors' dtype → the NumPy dtype of `HostTensor.bits`."""

METADATA = "__metadata__"
"""The key of a header that is no tensor."""
HEADER_BYTES_MAX = 100_000_000
"""The limit of the safetensors package."""
NUMBER_DIGITS_MAX = 19
"""Digits of any number in a header: all are below 2^63."""
MESSAGE_CHARACTERS_MAX = 200
"""Characters of a header, which may be of any length, that an error quotes."""
_LENGTH_BYTES = 8
_EXPONENTS = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}
"""The bits of the exponent, all of which are set in infinities and NaNs only."""
_FINITE_BLOCK = 2**20
"""Elements that are compared at once."""


def num_bytes(info: TensorInfo) -> int:
    """Return the size of a whole tensor."""
    return math.prod(info.shape) * np.dtype(BITS[info.dtype]).itemsize


def is_finite(tensor: HostTensor) -> bool:
    """Return whether a tensor has no NaN and no infinity; True for dtypes without them, and F8."""
    values = tensor.bits.reshape(-1)
    mask = _EXPONENTS.get(tensor.dtype)
    if mask is None and tensor.dtype != "F64":
        return True
    for start in range(0, values.size, _FINITE_BLOCK):
        block = values[start : start + _FINITE_BLOCK]
        finite = np.isfinite(block) if mask is None else (block & block.dtype.type(mask)) != mask
        if not finite.all():
            return False
    return True


class Digest:
    """Incremental digest of a tensor: `xxh3_128:` + hex over its bytes.

    Fast (35 GB/s); detects accidental changes, not those of an attacker.
    """

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, bits: NDArray[Any]) -> None:
        """Add the next elements."""
        self._hash.update(_bytes(bits))

    def __str__(self) -> str:
        return f"xxh3_128:{self._hash.hexdigest()}"


def digest(tensor: HostTensor) -> str:
    """Return the digest of a whole tensor."""
    state = Digest()
    state.update(tensor.bits)
    return str(state)


def file_digest(body: bytes) -> str:
    """Return `sha256:` + hex over a whole file."""
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


def weights_digest(tensors: Mapping[str, HostTensor] | Mapping[str, TensorInfo]) -> str:
    """Return the digest of a set of tensors: equal digests mean bit-equal weights.

    It is `sha256:` + hex over the sorted lines `name dtype shape tensor-digest`, each with a line
    feed. Example: `model.norm.weight BF16 2,3 xxh3_128:…`.
    """
    lines = [
        f"{name} {tensor.dtype} {','.join(map(str, tensor.shape))} "
        f"{tensor.digest if isinstance(tensor, TensorInfo) else digest(tensor)}\n"
        for name, tensor in tensors.items()
    ]
    return file_digest("".join(sorted(lines)).encode())


def to_safetensors(
    tensors: Mapping[str, HostTensor], metadata: Mapping[str, str] | None = None
) -> bytes:
    """A valid safetensors file; wide elements first, so that every tensor lies aligned. ValueError
    for false bits.
    """
    header: dict[str, object] = {METADATA: {"format": "pt", **(metadata or {})}}
    chunks: list[memoryview] = []
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].bits.itemsize, item[0])):
        check_bits(name, tensor)
        start, end = end, end + tensor.bits.nbytes
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        chunks.append(_bytes(tensor.bits))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return b"".join([len(text).to_bytes(_LENGTH_BYTES, "little"), text, *chunks])


def from_safetensors(body: bytes) -> dict[str, HostTensor]:
    """Decode and validate a safetensors file; the tensors are read-only views of `body`.

    Raises CorruptError, which names what is invalid.
    """
    header, data = _parts(body)
    header.pop(METADATA, None)
    tensors = {name: _tensor(name, entry, data) for name, entry in header.items()}
    spans = sorted(entry["data_offsets"] for entry in header.values())
    ends = [0, *(end for _, end in spans)]
    if [start for start, _ in spans] != ends[:-1] or ends[-1] != len(data):
        raise CorruptError(
            f"a safetensors file's tensors do not cover its {len(data)} bytes exactly once; it is "
            "truncated"
        )
    return tensors


def _number(digits: str) -> int:
    if len(digits) > NUMBER_DIGITS_MAX:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _object(pairs: list[tuple[str, Json]]) -> Json:
    """Build a JSON object; ValueError for a duplicate key, and for a lone surrogate in one."""
    fields: Json = {}
    for name, value in pairs:
        name.encode()
        if name in fields:
            raise ValueError(f"{_shortened(name)!r} is there twice")
        fields[name] = value
    return fields


def read_metadata(body: bytes) -> dict[str, str]:
    """Read the `__metadata__` of a safetensors file."""
    header, _ = _parts(body)
    return {str(key): str(value) for key, value in header.get(METADATA, {}).items()}


def _parts(body: bytes) -> tuple[dict[str, Json], memoryview]:
    """Return the header and the tensor bytes of a safetensors file."""
    length = int.from_bytes(body[:_LENGTH_BYTES], "little")
    if len(body) < _LENGTH_BYTES or length > min(HEADER_BYTES_MAX, len(body) - _LENGTH_BYTES):
        raise CorruptError(f"a safetensors file of {len(body)} bytes ends within its header")
    try:
        text = body[_LENGTH_BYTES : _LENGTH_BYTES + length].decode()
        header = json.loads(text, parse_int=_number, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise CorruptError(
            f"a safetensors header is not JSON as it should be: {_shortened(str(error))}"
        ) from error
    if not isinstance(header, dict) or not all(
        isinstance(entry, dict) for entry in header.values()
    ):
        raise CorruptError("a safetensors header is not an object of objects")
    return header, memoryview(body)[_LENGTH_BYTES + length :]


def _tensor(name: str, entry: Json, data: memoryview) -> HostTensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, end]} if (
            dtype in BITS
            and all(type(number) is int for number in (start, end, *shape))  # not bool
        ):
            pass
        case _:
            raise CorruptError(
                f"the safetensors entry of {_shortened(name)} cannot be read: {reprlib.repr(entry)}"
            )
    bits_dtype = np.dtype(BITS[dtype])
    if (
        not 0 <= start <= end <= len(data)
        or not _is_shape(shape)
        or end - start != math.prod(shape) * bits_dtype.itemsize
    ):
        raise CorruptError(
            f"the tensor {_shortened(name)} ({dtype} {_shortened(str(shape))}) does not fit the "
            f"bytes {start}..{end} of {len(data)}"
        )
    bits = np.frombuffer(data[start:end], dtype=bits_dtype).reshape(shape)
    return HostTensor(dtype, tuple(shape), bits)


def _is_shape(sizes: list[int]) -> bool:
    """Return whether NumPy supports the shape; an array without elements has limits, too."""
    return (
        len(sizes) <= DIMENSIONS_MAX
        and min(sizes, default=0) >= 0
        and math.prod(filter(None, sizes)) < 2**59
    )


def _shortened(text: str) -> str:
    return text if len(text) <= MESSAGE_CHARACTERS_MAX else f"{text[:MESSAGE_CHARACTERS_MAX]}…"


def _bytes(bits: NDArray[Any]) -> memoryview:
    """Return the bytes without a copy; an empty array has no memory to view."""
    if bits.size == 0:
        return memoryview(b"")
    return np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data


def check_bits(name: str, tensor: HostTensor) -> None:
    """Raise ValueError when the bits of a tensor do not match its dtype and shape."""
    if tensor.dtype not in BITS:
        raise ValueError(
            f"{name} has the dtype {tensor.dtype!r}; safetensors supports {', '.join(BITS)}"
        )
    if tensor.bits.dtype != np.dtype(BITS[tensor.dtype]) or tensor.bits.shape != tensor.shape:
        raise ValueError(
            f"{name} is {tensor.dtype} {tensor.shape}, whose bits are {BITS[tensor.dtype]}; "
            f"found {tensor.bits.dtype} {tensor.bits.shape}"
        )
