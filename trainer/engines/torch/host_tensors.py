"""Conversion between torch tensors and `HostTensor` (bits in host memory), bit for bit."""

import numpy as np
import torch
from torch import Tensor

from storage.errors import CorruptError
from storage.records.weights import HostTensor

DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_AS_BITS: dict[str, tuple[torch.dtype, type[np.unsignedinteger]]] = {
    "BF16": (torch.int16, np.uint16),
    "F16": (torch.int16, np.uint16),
    "F32": (torch.int32, np.uint32),
}
"""Floats stored as unsigned integers: torch views them as signed ones, NumPy reinterprets those."""

NOTHING = HostTensor("U8", (0,), np.zeros(0, dtype=np.uint8))
"""In place of a tensor that is not used."""


def to_host(tensor: Tensor, dtype: str | None = None) -> HostTensor:
    """Copy `tensor` to host memory, as `dtype` (BF16, F32, …) rounded to nearest even."""
    target = tensor.dtype if dtype is None else DTYPES[dtype]
    name = NAMES[target]
    # copy=True: a published tensor must not follow the optimizer's next step in place.
    host = tensor.detach().to("cpu", target, copy=True).contiguous()
    if name not in _AS_BITS:
        return HostTensor(name, tuple(host.shape), host.numpy())
    signed, unsigned = _AS_BITS[name]
    return HostTensor(name, tuple(host.shape), host.view(signed).numpy().view(unsigned))


def to_torch(host: HostTensor) -> Tensor:
    """Copy to a torch tensor on the CPU with the same bits; CorruptError for an unknown dtype."""
    if host.dtype not in DTYPES:
        raise CorruptError(
            f"a tensor of dtype {host.dtype} cannot be trained on; known are {', '.join(DTYPES)}"
        )
    # Stored bits are often a read-only view of a file, which torch must not share.
    copied = torch.from_numpy(np.array(host.bits, order="C", copy=True).reshape(host.shape))
    dtype = DTYPES[host.dtype]
    return copied.view(dtype) if host.dtype in _AS_BITS else copied.to(dtype)
