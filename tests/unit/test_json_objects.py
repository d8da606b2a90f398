import json
import math

import numpy as np
import pytest

from storage.errors import CorruptError
from storage.json_objects import decode, dump, encode
from storage.records import Lease, Order, Prompt, Stop

ORDER = Order(3, (Prompt("p/1", {"question": 'é\n"?', "n": [1, None]}),), 8, 2**63 - 1, (0, 2), {"next": 4}, 1.5)


def test_a_record_comes_back_equal() -> None:
    assert decode(Order, encode(ORDER), "x") == ORDER


def test_the_bytes_are_plain_json_with_format_and_write_id() -> None:
    fields = json.loads(encode(ORDER))
    assert fields["format"] == 1
    assert len(fields["write_id"]) == 32
    assert fields["prompts"] == [{"id": "p/1", "fields": {"question": 'é\n"?', "n": [1, None]}}]


def test_two_encodings_of_one_record_differ_so_that_rivals_cannot_both_win() -> None:
    assert encode(ORDER) != encode(ORDER)


def test_a_write_id_of_the_record_is_kept() -> None:
    lease = Lease(1, 0, "w", "r", write_id="ab" * 16)
    assert decode(Lease, encode(lease), "x") == lease


def test_numbers_json_cannot_write_come_back_as_numbers() -> None:
    body = encode(Stop("failed", "x", math.inf))
    assert json.loads(body)["at_s"] == "Infinity"
    assert decode(Stop, body, "x").at_s == math.inf
    assert json.loads(dump({"a": math.nan, "b": -math.inf})) == {"a": "NaN", "b": "-Infinity"}


def test_numpy_values_are_written_as_numbers() -> None:
    assert json.loads(dump({"a": np.float32(0.5), "b": np.int64(3), "c": np.arange(2)})) == {
        "a": 0.5,
        "b": 3,
        "c": [0, 1],
    }


def test_what_json_cannot_hold_is_refused_when_it_is_written() -> None:
    with pytest.raises(ValueError, match="a object cannot be stored as JSON"):
        dump({"a": object()})


def test_keys_of_a_later_release_are_ignored() -> None:
    fields = {**json.loads(encode(ORDER)), "new": 1}
    assert decode(Order, json.dumps(fields).encode(), "x") == ORDER


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "orders/1 is not JSON"),
        (b"{", "orders/1 is not JSON"),
        (b"\xff\xfe", "orders/1 is not JSON"),
        (b"[]", "orders/1 holds a JSON list where an object belongs"),
        (b"{}", "orders/1 has format None; this release reads format 1"),
        (b'{"format": 2}', "orders/1 has format 2"),
        (b'{"format": 1, "number": "x"}', "orders/1 is not a Order: number: Input should be a valid integer"),
    ],
)
def test_bytes_that_are_not_the_record_say_what_is_wrong(body: bytes, sentence: str) -> None:
    with pytest.raises(CorruptError, match=sentence):
        decode(Order, body, "orders/1")
