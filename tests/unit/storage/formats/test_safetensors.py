import json
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from storage.errors import CorruptError
from storage.formats.safetensors import (
    BITS,
    digest,
    file_digest,
    from_safetensors,
    is_finite,
    read_metadata,
    to_safetensors,
    weights_digest,
)
from storage.records.weights import HostTensor, TensorInfo
from tests.support.runs import builders
from tests.support.stores.resealed import safetensors_file


def bf16(*bits: int) -> HostTensor:
    return HostTensor("BF16", (len(bits),), np.array(bits, dtype=np.uint16))


def test_the_digest_is_over_the_little_endian_bytes() -> None:
    assert (
        digest(bf16(1, 2)) == "xxh3_128:505febe278f7a190cf57b2f6d9a45219"
    )  # of the bytes 01 00 02 00
    assert (
        digest(bf16()) == "xxh3_128:99aa06d3014798d86001c324468d497f"
    )  # the published value for no bytes


def test_the_digest_depends_on_every_bit_but_not_on_the_memory_layout() -> None:
    bits = np.arange(6, dtype=np.uint16).reshape(2, 3)
    plain = HostTensor("BF16", (2, 3), bits)
    turned = HostTensor("BF16", (2, 3), np.asfortranarray(bits))
    assert digest(plain) == digest(turned)
    assert digest(plain) != digest(HostTensor("BF16", (2, 3), bits ^ np.uint16(1)))


def test_digests_distinguish_negative_zero_and_nan_patterns() -> None:
    assert digest(bf16(0x8000)) != digest(bf16(0x0000))
    assert digest(bf16(0x7FC0)) != digest(bf16(0x7FC1))


def test_the_weights_digest_is_a_sha256_of_sorted_lines() -> None:
    infos = {
        "b": TensorInfo(dtype="F32", shape=(), digest="xxh3_128:22", file="f"),
        "a": TensorInfo(dtype="BF16", shape=(2, 3), digest="xxh3_128:11", file="g"),
    }
    assert weights_digest(infos) == file_digest(b"a BF16 2,3 xxh3_128:11\nb F32  xxh3_128:22\n")


def test_the_weights_digest_of_tensors_equals_that_of_their_infos() -> None:
    tensors = builders.tensors(5)
    infos = {
        name: TensorInfo(dtype=t.dtype, shape=t.shape, digest=digest(t), file="any file")
        for name, t in tensors.items()
    }
    assert weights_digest(tensors) == weights_digest(infos)
    assert weights_digest(dict(reversed(tensors.items()))) == weights_digest(tensors)


def test_a_file_is_read_back_bit_for_bit_in_every_dtype() -> None:
    rng = np.random.default_rng(0)
    tensors = {}
    for dtype, kind in BITS.items():
        raw = rng.integers(0, 256, size=3 * 5 * np.dtype(kind).itemsize, dtype=np.uint8)
        raw = raw % 2 if dtype == "BOOL" else raw
        tensors[f"t.{dtype}"] = HostTensor(dtype, (3, 5), raw.view(kind).reshape(3, 5))
    tensors["empty"] = HostTensor("BF16", (0, 7), np.empty((0, 7), dtype=np.uint16))
    tensors["scalar"] = HostTensor("F32", (), np.array(0x80000000, dtype=np.uint32))
    loaded = from_safetensors(to_safetensors(tensors))
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert loaded[name].bits.dtype == tensor.bits.dtype
        assert loaded[name].bits.tobytes() == tensor.bits.tobytes()


def test_the_safetensors_package_reads_our_files_and_we_read_its() -> None:
    body = to_safetensors(builders.tensors(9), {"version": "3"})
    theirs = dict(safetensors.deserialize(body))  # type: ignore[no-untyped-call]  # the package has no types
    assert bytes(theirs["model.weight"]["data"]) == np.arange(9, 15, dtype=np.uint16).tobytes()
    assert theirs["model.weight"]["shape"] == [2, 3]
    assert theirs["model.weight"]["dtype"] == "BF16"
    assert bytes(theirs["model.scale"]["data"]) == (9).to_bytes(4, "little")
    returned = from_safetensors(
        safetensors.numpy.save({"x": np.array([1.5, -0.0], dtype=np.float32)})
    )
    assert returned["x"].bits.tolist() == [0x3FC00000, 0x80000000]
    assert read_metadata(body) == {"format": "pt", "version": "3"}


def test_header_and_tensors_are_aligned() -> None:
    body = to_safetensors(
        {"a": bf16(1), "bb": HostTensor("F32", (1,), np.array([7], dtype=np.uint32))}
    )
    length = int.from_bytes(body[:8], "little")
    assert length % 8 == 0
    header = json.loads(body[8 : 8 + length])
    assert header["bb"]["data_offsets"] == [0, 4]
    assert header["a"]["data_offsets"] == [4, 6]
    assert body[8 + length :] == b"\x07\x00\x00\x00\x01\x00"


def test_tensors_read_are_views_that_cannot_be_written() -> None:
    loaded = from_safetensors(to_safetensors(builders.tensors()))["model.weight"].bits
    with pytest.raises(ValueError, match="read-only"):
        loaded[0, 0] = 1


@pytest.mark.parametrize(
    ("tensor", "sentence"),
    [
        (
            HostTensor("BF16", (2,), np.zeros(2, dtype=np.float32)),
            "whose bits are uint16; found float32",
        ),
        (HostTensor("BF16", (3,), np.zeros(2, dtype=np.uint16)), "found uint16 \\(2,\\)"),
        (
            HostTensor("C64", (2,), np.zeros(2, dtype=np.complex64)),
            "has the dtype 'C64'; safetensors supports",
        ),
    ],
)
def test_bits_that_are_invalid_for_the_dtype_are_refused(tensor: HostTensor, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        to_safetensors({"x": tensor})


def crafted(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "ends within its header"),
        (b"\xff" * 8, "ends within its header"),
        ((4).to_bytes(8, "little") + b"oops", "is not JSON"),
        (crafted([1]), "is not an object of objects"),
        (crafted({"x": 1}), "is not an object of objects"),
        (crafted({"x": {"dtype": "BF16"}}), "entry of x cannot be read"),
        (
            crafted({"x": {"dtype": "ZZ", "shape": [1], "data_offsets": [0, 1]}}, b"1"),
            "entry of x cannot be read",
        ),
        (
            crafted({"x": {"dtype": "U8", "shape": [2], "data_offsets": [0, 1]}}, b"1"),
            "does not fit the bytes",
        ),
        (
            crafted({"x": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}, b"1"),
            "does not fit the bytes",
        ),
        (
            crafted({"x": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, b"1"),
            "does not fit the bytes",
        ),
        (
            crafted({"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"12"),
            "do not cover its 2 bytes",
        ),
        (
            crafted({"x": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}, b"12"),
            "do not cover its 2 bytes",
        ),
        (
            crafted({n: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]} for n in "xy"}, b"1"),
            "do not cover its 1 bytes",
        ),
    ],
)
def test_invalid_files_are_corrupt(body: bytes, sentence: str) -> None:
    with pytest.raises(CorruptError, match=sentence):
        from_safetensors(body)


def header_of(name: str, shape: str, size: int = 0) -> bytes:
    return safetensors_file(
        f'{{"{name}":{{"dtype":"U8","shape":{shape},"data_offsets":[0,{size}]}}}}', b"\0" * size
    )


def test_shapes_are_read_up_to_the_limits_of_numpy() -> None:
    for sizes in ([1] * 64, [0] + [1] * 63, [0, 2**59 - 1], [2**30, 0, 2**28]):
        size = 0 if 0 in sizes else 1
        assert from_safetensors(header_of("w", str(sizes), size))["w"].shape == tuple(sizes)
    for sizes in ([1] * 65, [0, 2**59], [2**30, 0, 2**29], [0, -1]):
        with pytest.raises(CorruptError, match=r"does not fit the bytes 0\.\.[01] of [01]"):
            from_safetensors(header_of("w", str(sizes), 0 if 0 in sizes else 1))


def test_numbers_of_a_header_have_at_most_nineteen_digits() -> None:
    with pytest.raises(CorruptError, match=f"does not fit the bytes 0..{2**63 - 1} of 0"):
        from_safetensors(
            safetensors_file(f'{{"w":{{"dtype":"U8","shape":[1],"data_offsets":[0,{2**63 - 1}]}}}}')
        )
    with pytest.raises(CorruptError, match="a number has 20 digits"):
        from_safetensors(
            safetensors_file(f'{{"w":{{"dtype":"U8","shape":[1],"data_offsets":[0,{10**19}]}}}}')
        )


def test_a_long_name_is_shortened_in_the_message() -> None:
    for length, told in ((200, "n" * 200), (201, f"{'n' * 200}…")):
        with pytest.raises(CorruptError) as caught:
            from_safetensors(header_of("n" * length, "[2]", 1))
        assert str(caught.value) == f"the tensor {told} (U8 [2]) does not fit the bytes 0..1 of 1"


def test_tensor_bytes_begin_after_the_header_and_end_with_the_file() -> None:
    for body in (b"\0" * 7, (3).to_bytes(8, "little") + b"{}"):
        with pytest.raises(
            CorruptError, match=f"a safetensors file of {len(body)} bytes ends within its header"
        ):
            from_safetensors(body)
    assert from_safetensors((2).to_bytes(8, "little") + b"{}") == {}
    with pytest.raises(CorruptError, match="do not cover its 1 bytes exactly once"):
        from_safetensors((2).to_bytes(8, "little") + b"{}\0")


@pytest.mark.parametrize(
    ("dtype", "finite", "not_finite"),
    [
        ("BF16", np.array([0x7F7F, 0x8000], np.uint16), np.array([0x7F80], np.uint16)),
        ("BF16", np.array([0xFF7F], np.uint16), np.array([0, 0xFFC0], np.uint16)),
        ("F16", np.array([0x7BFF], np.uint16), np.array([0x7C00], np.uint16)),
        ("F32", np.array([0x7F7FFFFF], np.uint32), np.array([[1], [0xFF800001]], np.uint32)),
        ("F64", np.array([1.7e308]), np.array([0.0, np.nan])),
    ],
)
def test_nan_and_infinity_are_found_in_every_float_dtype(
    dtype: str, finite: NDArray[Any], not_finite: NDArray[Any]
) -> None:
    assert is_finite(HostTensor(dtype, finite.shape, finite))
    assert not is_finite(HostTensor(dtype, not_finite.shape, not_finite))


def test_tensors_without_nan_and_empty_ones_are_finite() -> None:
    assert is_finite(HostTensor("I64", (1,), np.array([0x7F80])))
    assert is_finite(HostTensor("BF16", (0,), np.array([], np.uint16)))
