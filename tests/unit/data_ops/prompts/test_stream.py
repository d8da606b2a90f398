import json
import re
import tracemalloc
from collections import UserDict
from functools import reduce
from types import MappingProxyType

import numpy as np
import pytest
from pydantic import ValidationError

from data_ops.prompts import BuiltinPrompts, CustomPrompts, FilePrompts
from data_ops.prompts.stream import PromptStream
from storage.errors import ConfigError, CorruptError
from storage.records.rollouts import Prompt
from tests.support.checkout import DATA

GSM8K = DATA / "gsm8k" / "test.jsonl"


def ten_prompts(seed: int = 0) -> PromptStream:
    return PromptStream(lambda index: Prompt(f"p/{index}", {"question": str(index)}), 10, seed)


def ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in prompts]


def test_each_epoch_has_every_prompt_once_in_another_order() -> None:
    first, cursor = ten_prompts().take({}, 10)
    second, cursor = ten_prompts().take(cursor, 10)
    everything = sorted(f"p/{index}" for index in range(10))
    assert sorted(ids(first)) == sorted(ids(second)) == everything
    assert ids(first) != ids(second)
    assert cursor == {"epoch": 1, "position": 10}


def test_a_restart_at_any_cursor_continues_exactly() -> None:
    whole, _ = ten_prompts().take({}, 35)
    for cut in range(35):
        head, cursor = ten_prompts().take({}, cut)
        tail, _ = ten_prompts().take(cursor, 35 - cut)
        assert ids(head + tail) == ids(whole)


def test_another_seed_gives_another_order() -> None:
    assert ids(ten_prompts(0).take({}, 10)[0]) != ids(ten_prompts(1).take({}, 10)[0])


def test_the_whole_source_keeps_its_order() -> None:
    assert ids(ten_prompts().all()) == [f"p/{index}" for index in range(10)]
    assert ids(ten_prompts().all(3)) == ["p/0", "p/1", "p/2"]
    assert len(ten_prompts().all(99)) == 10


@pytest.mark.parametrize(
    "cursor", [{"next": 1}, {"epoch": -1}, {"position": "three"}, {"epoch": 0.5}]
)
def test_a_cursor_of_another_form_is_corrupt(cursor: dict[str, object]) -> None:
    with pytest.raises(CorruptError, match="a prompt cursor is"):
        ten_prompts().take(cursor, 1)


def test_the_builtin_source_is_endless_and_its_cursor_is_the_index() -> None:
    stream = BuiltinPrompts(builtin="chained_addition", seed=3).stream()
    first, cursor = stream.take({}, 2)
    second, cursor = stream.take(cursor, 1)
    assert cursor == {"epoch": 0, "position": 3}
    assert ids(first + second) == [f"chained_addition/train/3/{index}" for index in range(3)]
    assert ids(first + second) == ids(stream.all(3))


def test_a_limited_builtin_repeats_in_epochs() -> None:
    stream = BuiltinPrompts(builtin="chained_addition", limit=4).stream()
    prompts, cursor = stream.take({}, 8)
    assert cursor == {"epoch": 1, "position": 4}
    assert sorted(ids(prompts[:4])) == sorted(ids(prompts[4:])) == sorted(ids(stream.all()))


def test_the_first_prompts_of_a_large_source_take_the_memory_of_its_shuffled_numbers() -> None:
    stream = PromptStream(lambda index: Prompt(f"p/{index}", {"index": index}), 1_000_000, 3)
    tracemalloc.start()
    prompts, cursor = stream.take({}, 3)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 9_000_000
    assert cursor == {"epoch": 0, "position": 3}
    expected = np.random.default_rng([3, 0]).permutation(1_000_000)[:3].tolist()
    indices = [prompt.fields["index"] for prompt in prompts]
    assert indices == expected
    assert {type(index) for index in indices} == {int}


def test_a_generated_source_has_a_limit_that_can_be_shuffled() -> None:
    assert BuiltinPrompts(builtin="chained_addition", limit=10_000_000).limit == 10_000_000
    with pytest.raises(ValidationError, match="less than or equal to 10000000"):
        BuiltinPrompts(builtin="chained_addition", limit=10_000_001)


class Numbers:
    def __init__(self, count: int) -> None:
        self.count = count

    def size(self) -> int:
        return self.count

    def prompt(self, index: int) -> Prompt:
        return Prompt(f"n/{index}", {})


def test_a_custom_source_that_is_too_large_to_be_shuffled_is_refused_without_a_limit() -> None:
    source = CustomPrompts(custom=f"{__name__}:Numbers", args={"count": 10_000_001})
    with pytest.raises(ConfigError) as caught:
        source.stream()
    assert str(caught.value) == (
        f"prompts.custom: size() of {__name__}:Numbers returned 10,000,001, more than 10,000,000; "
        "set prompts.limit to at most that, or return None, for an endless source that is not "
        "shuffled"
    )
    limited = source.model_copy(update={"limit": 2})
    assert ids(limited.stream().all()) == ["n/0", "n/1"]
    largest = source.model_copy(update={"args": {"count": 10_000_000}})
    assert ids(largest.stream().all(1)) == ["n/0"]


UNSTORABLE = {
    "id": Prompt("n/\ud800", {"id": "n", "question": "1+1"}),
    "column": Prompt("n", {"question": "1+\ud800"}),
    "name of a column": Prompt("n", {"question": "1+1", "\ud800": 1}),
    "number": Prompt("n", {"question": "1+1", "meta": {"weight": float("nan")}}),
    "long number": Prompt("n", {"question": "1+1", "weight": 10**5000}),
    "levels": Prompt("n", {"question": "1+1", "at": reduce(lambda at, _: [at], range(3000), 1)}),
}


class Unstorable:
    def __init__(self, part: str) -> None:
        self.part = part

    def size(self) -> int:
        return 1

    def prompt(self, index: int) -> Prompt:
        return UNSTORABLE[self.part]


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        ("id", "its id has the lone surrogate U+D800"),
        ("column", "its 'question' has the lone surrogate U+D800"),
        ("name of a column", "it has a key that has the lone surrogate U+D800"),
        ("number", "its 'meta.weight' is nan, which is no number in JSON"),
        ("long number", "its 'weight' is a whole number of more than 128 bits"),
        ("levels", "is nested deeper than 32 levels"),
    ],
)
def test_a_prompt_of_a_custom_source_that_cannot_be_stored_is_refused_when_it_is_read(
    part: str, fault: str
) -> None:
    stream = CustomPrompts(custom=f"{__name__}:Unstorable", args={"part": part}).stream()
    named = f"prompts.custom: prompt(0) of {__name__}:Unstorable cannot be stored: "
    for read in (stream.all, lambda: stream.take({}, 1)):
        with pytest.raises(ConfigError, match=f"^{re.escape(named)}.*{re.escape(fault)}"):
            read()


class Computed(UserDict[str, object]):
    def __getitem__(self, name: str) -> object:
        raise LookupError(f"no value of {name}")


class OfMappings:
    """Prompts whose fields are other mappings than a dict."""

    def __init__(self, fails: bool) -> None:
        fields = {"question": "1+1", "answer": "2"}
        self.fields = Computed(fields) if fails else MappingProxyType(fields)

    def size(self) -> int:
        return 1

    def prompt(self, index: int) -> Prompt:
        return Read(self.fields)


class Read(Prompt):
    """A prompt with a constructor of its own."""

    def __init__(self, fields: object) -> None:
        super().__init__("n", fields)  # type: ignore[arg-type]


def test_the_fields_of_a_custom_source_may_be_any_mapping_and_become_a_dict() -> None:
    source = CustomPrompts(custom=f"{__name__}:OfMappings", args={"fails": False})
    [prompt] = source.stream().all()
    assert json.loads(json.dumps(prompt.fields)) == {"question": "1+1", "answer": "2"}


def test_a_mapping_that_fails_is_an_error_of_the_custom_source() -> None:
    source = CustomPrompts(custom=f"{__name__}:OfMappings", args={"fails": True})
    with pytest.raises(ConfigError, match=r"prompt\(0\) of .*:OfMappings failed.*no value of"):
        source.stream().all()


def test_the_whole_of_an_endless_source_requires_a_limit() -> None:
    with pytest.raises(ConfigError, match=r"set prompts\.limit"):
        BuiltinPrompts(builtin="chained_addition").stream().all()


def test_an_unknown_file_type_is_refused_with_the_two_supported_types() -> None:
    with pytest.raises(ConfigError, match=r"train\.csv is neither \.jsonl nor \.parquet"):
        FilePrompts(path="train.csv").stream()


@pytest.mark.skipif(
    not GSM8K.exists(), reason="GSM8K is not beside this checkout (../shared/data/gsm8k)"
)
def test_gsm8k_is_read_with_the_answer_after_the_hashes() -> None:
    stream = FilePrompts(path=str(GSM8K), answer_after="####").stream()
    prompts = stream.all()
    assert len(prompts) == 1319
    assert prompts[0].id == "test/0"
    assert prompts[0].fields["answer"] == "18"
    assert prompts[0].fields["question"].startswith("Janet’s ducks lay 16 eggs per day.")
    assert all("####" not in prompt.fields["answer"] for prompt in prompts)
