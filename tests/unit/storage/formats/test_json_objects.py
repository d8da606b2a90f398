import json
import math
import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
import xxhash
from pydantic_core import from_json

from storage.errors import ConfigError, CorruptError
from storage.formats import json_objects
from storage.formats.json_objects import build, decode, dump, encode, seal, unseal
from storage.records.control import Lease, Stop
from storage.records.numbers import Number
from storage.records.rollouts import Order, Prompt
from storage.run import orders
from storage.store.object_store import ObjectStore

ORDER = Order(
    number=3,
    prompts=(Prompt("p/1", {"question": 'é\n"?', "n": [1, None]}),),
    samples_per_prompt=8,
    seed=2**63 - 1,
    seen=(0, 2),
    cursor={"next": 4},
    created_s=1.5,
)


def test_a_record_survives_a_round_trip() -> None:
    assert unseal(Order, seal(ORDER), "x") == ORDER
    assert decode(Order, encode(ORDER), "x") == ORDER


def test_the_bytes_are_plain_json_with_format_and_write_id() -> None:
    fields = json.loads(encode(ORDER))
    assert list(fields)[:3] == ["format", "write_id", "number"]
    assert fields["format"] == 1
    assert len(fields["write_id"]) == 32
    assert fields["prompts"] == [{"id": "p/1", "fields": {"question": 'é\n"?', "n": [1, None]}}]


def test_two_encodings_of_one_record_differ_so_that_only_one_writer_wins() -> None:
    assert encode(ORDER) != encode(ORDER)
    assert seal(ORDER) != seal(ORDER)


def test_the_checksum_is_over_the_bytes_with_zeros_in_place_of_the_checksum() -> None:
    body = seal(ORDER)
    fields = json.loads(body)
    assert list(fields)[:4] == ["format", "write_id", "checksum", "number"]
    zeroed = body.replace(fields["checksum"].encode(), b"0" * 32)
    assert xxhash.xxh3_128_hexdigest(zeroed) == fields["checksum"]


def test_zeros_around_the_checksum_do_not_affect_it() -> None:
    lease = Lease(order=1, attempt=0, worker="0" * 40, region="r", write_id="0" * 32)
    assert unseal(Lease, seal(lease), "x") == lease


def test_each_changed_bit_of_a_sealed_object_is_detected() -> None:
    body = seal(
        Order(
            number=3,
            prompts=(Prompt("p", {"a": 1.5}),),
            samples_per_prompt=8,
            seed=7,
            seen=(0,),
            cursor={},
            created_s=1.5,
        )
    )
    for place in range(len(body)):
        for bit in range(8):
            damaged = body[:place] + bytes([body[place] ^ 1 << bit]) + body[place + 1 :]
            with pytest.raises(CorruptError):
                unseal(Order, damaged, "x")


@pytest.mark.parametrize("name", ["checksum", "write_id"])
@pytest.mark.parametrize("value", [None, 7, "ab" * 15, "AB" * 16, ["ab" * 16]])
def test_a_sealed_object_starts_with_its_two_fields(name: str, value: object) -> None:
    fields = {**json.loads(seal(ORDER)), name: value}
    with pytest.raises(
        CorruptError, match=f"orders/3 has the {name} .*, which is not 32 hex digits"
    ):
        unseal(Order, json.dumps(fields).encode(), "orders/3")


def test_a_write_id_of_the_record_is_kept() -> None:
    lease = Lease(order=1, attempt=0, worker="w", region="r", write_id="ab" * 16)
    assert decode(Lease, encode(lease), "x") == lease


@dataclass(frozen=True)
class Measured:
    loss: Number


def test_numbers_that_json_cannot_represent_are_read_back_as_numbers() -> None:
    body = encode(Measured(math.inf))
    assert json.loads(body)["loss"] == "Infinity"
    assert decode(Measured, body, "x").loss == math.inf
    assert json.loads(dump({"a": math.nan, "b": -math.inf})) == {"a": "NaN", "b": "-Infinity"}


def test_numpy_values_are_written_as_numbers() -> None:
    assert json.loads(dump({"a": np.float32(0.5), "b": np.int64(3), "c": np.arange(2)})) == {
        "a": 0.5,
        "b": 3,
        "c": [0, 1],
    }


def test_values_that_json_cannot_represent_are_refused_by_the_writer() -> None:
    with pytest.raises(ValueError, match="a object cannot be stored as JSON"):
        dump({"a": object()})


def test_keys_of_a_later_release_are_ignored() -> None:
    fields = {**json.loads(encode(ORDER)), "new": 1}
    assert decode(Order, json.dumps(fields).encode(), "x") == ORDER


@dataclass(frozen=True, kw_only=True)
class _Typed:
    integer: int = 0
    number: Number = 0.0
    boolean: bool = False
    string: str = ""
    integers: tuple[int, ...] = ()
    numbers: Mapping[int, Number] = field(default_factory=dict)


def test_an_integer_is_read_as_float_and_a_decimal_key_as_integer() -> None:
    result = build(_Typed, b'{"number": 2, "integers": [3], "numbers": {"4": "-Infinity"}}', "x")
    assert result == _Typed(number=2.0, integers=(3,), numbers={4: -math.inf})
    assert isinstance(result.number, float)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ('"integer": "0"', "integer"),
        ('"integer": true', "integer"),
        ('"integer": 1.0', "integer"),
        ('"number": "1.5"', "number"),
        ('"number": "inf"', "number"),
        ('"number": true', "number"),
        ('"boolean": 1', "boolean"),
        ('"boolean": "true"', "boolean"),
        ('"string": 1', "string"),
        ('"integers": ["1"]', "integers.0"),
        ('"integers": {"0": 1}', "integers"),
        ('"numbers": {"a": 1}', r"numbers.a.\[key\]"),
    ],
)
def test_no_value_is_converted_to_another_type(fields: str, place: str) -> None:
    with pytest.raises(CorruptError, match=f"x is not a _Typed: {place}: Input should be"):
        build(_Typed, b"{%b}" % fields.encode(), "x")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "orders/1 is not JSON"),
        (b"{", "orders/1 is not JSON"),
        (b"\xff\xfe", "orders/1 is not JSON"),
        (b"[]", "orders/1 is a JSON list where an object belongs"),
        (b"{}", "orders/1 has format None; this release reads format 1"),
        (b'{"format": 2}', "orders/1 has format 2"),
        (b'{"format": true}', "orders/1 has format True"),
        (b'{"format": 1.0}', r"orders/1 has format 1\.0"),
        (
            b'{"format": 1, "number": "x"}',
            "orders/1 is not a Order: number: Input should be a valid integer",
        ),
    ],
)
def test_invalid_bytes_give_an_error_that_names_the_fault(body: bytes, sentence: str) -> None:
    with pytest.raises(CorruptError, match=sentence):
        decode(Order, body, "orders/1")


def test_an_integer_that_readers_reject_is_not_written() -> None:
    assert json.loads(dump({"state": 2**128 - 1})) == {"state": 2**128 - 1}
    with pytest.raises(
        ConfigError,
        match="the value to store has an integer of 129 bits; at most 128 are read; use a smaller",
    ):
        dump({"state": [{"x": 2**128}]})


def test_more_values_than_readers_accept_are_not_written() -> None:
    accepted = [0] * (json_objects.VALUES_MAX - 1)  # the list is a value, too
    assert from_json(dump(accepted)) == accepted
    with pytest.raises(
        ConfigError,
        match="the value to store has 2097153 JSON values in 4194305 bytes; at most 2097152 are "
        "read; store fewer",
    ):
        dump([*accepted, 0])


@pytest.mark.parametrize("ending", [b"", b"\\", b"\\\n"])
def test_a_string_that_does_not_end_is_searched_once(
    ending: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are counted above a limit only, here that of a small object. Each quote that was taken
    for the start of a string would count what follows it as values: an error about their number.
    """
    monkeypatch.setattr(json_objects, "VALUES_MAX", 100)
    with pytest.raises(CorruptError, match=r"^x is not JSON"):
        decode(Stop, b'{"reason":"' + b'\\",' * 200 + ending, "x")


@pytest.mark.parametrize(
    ("item", "num_items", "expected"),
    [
        (b'"",', 2**22, 2**22 + 1),
        (b"1,", 2**22, 2**22 + 1),
        (b'"[,\\",{",', 10_000, 10_001),
        (b'"' + b",[{\\\\" * 50_000 + b'",', 3, 4),
        (b" " * 1_023 + b'"[",', 3, 4),
    ],
)
def test_values_of_many_strings_are_counted_in_few_bytes(
    item: bytes, num_items: int, expected: int
) -> None:
    text = item * num_items
    tracemalloc.start()
    counted = json_objects.num_values(text, 0)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert counted == expected
    assert peak_bytes < 2**22


def test_long_digit_strings_in_text_are_accepted() -> None:
    assert unseal(Stop, seal(Stop("failed", "9" * 5000, 1.5)), "x").reason == "9" * 5000


def test_an_order_with_too_many_episodes_is_refused_by_the_writer(
    memory_store: ObjectStore,
) -> None:
    prompts = tuple(Prompt(f"p/{number}", {"question": "?"}) for number in range(2))
    with pytest.raises(
        ConfigError, match="an order of 65538 episodes is too large, at most 65536 are allowed"
    ):
        orders.create(
            memory_store,
            Order(
                number=0, prompts=prompts, samples_per_prompt=2**15 + 1, seed=0, seen=(), cursor={}
            ),
        )
    orders.create(
        memory_store,
        Order(number=0, prompts=prompts, samples_per_prompt=2**15, seed=0, seen=(), cursor={}),
    )
    assert orders.read(memory_store, 0).samples_per_prompt == 2**15


@dataclass(frozen=True)
class _Numbers:
    n: tuple[int, ...]


@dataclass(frozen=True)
class _Named:
    n: Mapping[str, int]


@dataclass(frozen=True)
class _Measured:
    numbers: _Numbers
    named: _Named
    a: int
    b: int


def test_of_a_list_or_mapping_the_first_wrong_item_is_described_and_three_faults_in_all() -> None:
    def error_message(fields: object) -> str:
        with pytest.raises(CorruptError) as caught:
            build(_Measured, json.dumps(fields).encode(), "it")
        return str(caught.value)

    wrong = "Input should be a valid integer"
    fields = {
        "numbers": {"n": [1, "x", "x"]},
        "named": {"n": {"x": 1, "y": "", "z": ""}},
        "a": 1,
        "b": 1,
    }
    faults = [f"numbers.n.1: {wrong}", f"named.n.y: {wrong}", f"a: {wrong}"]
    assert error_message(fields) == f"it is not a _Measured: {'; '.join(faults[:2])}"
    assert error_message({**fields, "a": "", "b": ""}) == (
        f"it is not a _Measured: {'; '.join(faults)}"
    )


def test_an_error_message_has_at_most_five_hundred_characters() -> None:
    for length in (400, 1000):
        key = "k" * length
        with pytest.raises(CorruptError) as caught:
            build(_Named, json.dumps({"n": {key: "x"}}).encode(), "it")
        whole = f"n.{key}: Input should be a valid integer"
        assert (
            str(caught.value)
            == f"it is not a _Named: {whole if length == 400 else f'{whole[:500]}…'}"
        )
