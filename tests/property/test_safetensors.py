"""Tensors of every dtype and shape survive a round trip, also through the safetensors package."""

import json
from contextlib import suppress

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.errors import CorruptError
from storage.formats.safetensors import BITS, from_safetensors, to_safetensors
from storage.records.weights import HostTensor
from tests.support.runs import builders

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(
    lambda name: name != "__metadata__"
)


@st.composite
def tensors(draw: st.DrawFn) -> HostTensor:
    dtype = draw(st.sampled_from(sorted(BITS)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(BITS[dtype]).itemsize
    raw = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype=np.uint8)
    raw = raw % 2 if dtype == "BOOL" else raw
    return HostTensor(
        dtype, shape, raw.view(BITS[dtype]).reshape(shape) if size else np.zeros(shape, BITS[dtype])
    )


@settings(max_examples=100)
@given(st.dictionaries(NAMES, tensors(), max_size=4))
def test_tensors_survive_a_round_trip_bit_for_bit(given_tensors: dict[str, HostTensor]) -> None:
    body = to_safetensors(given_tensors)
    loaded = from_safetensors(body)
    theirs = dict(safetensors.deserialize(body))  # type: ignore[no-untyped-call]  # the package has no types
    assert loaded.keys() == theirs.keys() == given_tensors.keys()
    for name, tensor in given_tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert loaded[name].bits.dtype == tensor.bits.dtype
        assert loaded[name].bits.tobytes() == tensor.bits.tobytes() == bytes(theirs[name]["data"])


def test_a_file_cut_anywhere_is_corrupt() -> None:
    body = to_safetensors(builders.tensors(1))
    for length in range(len(body)):
        with pytest.raises(CorruptError):
            from_safetensors(body[:length])


@settings(max_examples=40)
@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda x: st.lists(x) | st.dictionaries(NAMES, x),
    )
)
def test_any_json_header_is_read_or_raises_corrupt(header: object) -> None:
    text = json.dumps(header).encode()
    with suppress(CorruptError):
        from_safetensors(len(text).to_bytes(8, "little") + text)
