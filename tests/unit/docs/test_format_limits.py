"""Each limit in `docs/format.md` is that of readers and writers."""

import pytest

from storage import plain_names
from storage.coordination import heartbeats
from storage.formats import arrow_sizes, json_objects, safetensors, tensor_set
from storage.promotion import outcomes, promotions
from storage.records import machine_use, numbers, rollouts, weights
from storage.records import promotions as promotion_records
from storage.run import evaluation_samples, orders, prompt_windows, runs, shards, usage
from storage.store import backend, s3
from storage.weights import delta_applier
from storage.weights.codec import delta_blocks, delta_numpy
from tasks.promotion import decision_log
from tests.support.checkout import ROOT

PAGE = " ".join((ROOT / "docs" / "format.md").read_text(encoding="utf-8").split())
WORDS = ["no", "one", "two", "three", "four", "five"]


@pytest.mark.parametrize(
    "sentence",
    [
        f"less than {s3.CREATE_BYTES_MAX / 2**30:g} GiB; 412",
        "with more than 2^21 values",
        f"(within *object* fields they have at most {numbers.INTEGER_BITS} bits)",
        f"outside 0 to {numbers.TIME_MAX_S:.0f}.",
        f"another number of record batches than one, and more than {arrow_sizes.DICTIONARIES_MAX} dictionaries",
        f"claim to hold more than {arrow_sizes.MEMORY_MIN / 2**20:g} MiB and",
        f"more than {arrow_sizes.MEMORY_RATIO} times the file together",
        f"more rows than {arrow_sizes.ROWS_MIN:,} and than {arrow_sizes.ROWS_RATIO} times the bytes",
        f"more sequences than {arrow_sizes.SEQUENCES_MIN:,} and than one for each "
        f"{arrow_sizes.BYTES_PER_SEQUENCE} bytes of the file",
        f"at most {plain_names.BYTES_MAX} bytes of UTF-8 together",
        f"(tensors by name, about {tensor_set.FILE_BYTES_MAX / 2**20:g} MiB each)",
        f"numbers have at most {safetensors.NUMBER_DIGITS_MAX} digits, a shape at most "
        f"{weights.DIMENSIONS_MAX} dimensions",
        f"for people; cut after {runs.REASON_MAX:,} characters",
        f"It has at most {runs.STOP_BYTES_MAX:,} bytes.",
        f"It has at most {usage.BYTES_MAX:,} bytes; every number is finite",
        f"the names of a set are unique, and at most {rollouts.POLICIES_MAX}; of all rows together at most "
        f"{shards.POLICIES_MIN:,}, or one for each {WORDS[shards.BYTES_PER_POLICY]} bytes of the file |",
        f"episodes of each prompt; at most {orders.EPISODES_MAX:,} in an order",
        f"at most {WORDS[delta_applier.GROWTH_MAX]} times the bytes of the tensors that were stored whole",
        f"at most {WORDS[delta_applier.GROWTH_MAX]} times the bytes of their entries and of these tensors together",
        f"| `trits` | zstd, ⌈n / {delta_numpy.TRITS_PER_BYTE}⌉ × u8 |",
        f"gap >> `low_bits`; {delta_numpy.ESCAPE}: the gap is in `wide_gaps`",
        f"the object has at most {heartbeats.BYTES_MAX:,} bytes. A reader",
        f"Texts are cut after {heartbeats.TEXT_MAX:,} characters.",
        f"the user or the flow run; cut after {decision_log.BY_MAX} characters",
        f"for people; cut after {decision_log.REASON_MAX:,} characters",
        f"Writers write at most {prompt_windows.TEXT_BYTES_MAX:,} bytes of ids and fields.",
        f"A team has 1 to {promotion_records.POLICIES_MAX} policies, a table at most "
        f"{promotion_records.ROWS_MAX} rows, and a decision at most "
        f"{promotions.DECISION_BYTES_MAX:,} bytes.",
        f"There are at most {outcomes.EPISODES_MAX:,} episodes.",
        f"in use; at most {machine_use.GPUS_MAX} GPUs, as",
        f"Readers refuse a sample of more than {evaluation_samples.BYTES_MAX:,} bytes, "
        f"{rollouts.KEPT_EPISODES_MAX} episodes or {evaluation_samples.TOKENS_MAX:,} tokens",
    ],
)
def test_each_limit_on_the_page_equals_that_of_the_code(sentence: str) -> None:
    assert sentence in PAGE


def test_limits_written_as_powers_equal_those_of_the_code() -> None:
    assert "2³⁰ bytes for `.arrow`, 2²⁷ for everything else" in PAGE
    assert (backend.ARROW_BYTES_MAX, backend.BYTES_MAX, json_objects.VALUES_MAX) == (
        2**30,
        2**27,
        2**21,
    )
    assert "at most 2^53" in PAGE
    assert numbers.QUANTITY_MAX == 2**53
    assert "more characters than both 2²⁵ and 256 times the bytes of the object" in PAGE
    assert (prompt_windows.TEXT_MIN, prompt_windows.TEXT_PER_BYTE) == (2**25, 256)
    assert "more JSON values than both 2²¹ and 16 times these bytes" in PAGE
    assert (prompt_windows.VALUES_MIN, prompt_windows.VALUES_PER_BYTE) == (2**21, 16)
    assert "cut into blocks of 2²² elements" in PAGE
    assert delta_blocks.BLOCK_ELEMENTS == 2**22
