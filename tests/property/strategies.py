"""Strategies for records: lengths from 0, extreme integers, floats of any bits, any text."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from storage import layout
from storage.records.batches import Batch, BatchRow, LedgerEntry, SequenceKey
from storage.records.numbers import TIME_MAX_S
from storage.records.rollouts import NOT_SAMPLED, Episode, Group, Prompt, Sequence, Shard
from storage.records.types import Float32

INT32_MAX = 2**31 - 1
POLICIES = [("solver",), ("solver", "verifier"), ("a" * 100, "1_e-", "solver")]

texts = st.text(st.characters(codec="utf-8"), max_size=12)
floats = st.floats(width=64)
temperatures = st.just(0.0) | st.floats(1e-12, 1e12)
times = st.floats(0, TIME_MAX_S)
metrics = st.dictionaries(texts, floats, max_size=3)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | texts
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
prompts = st.builds(Prompt, texts, st.dictionaries(texts, json_values, max_size=3))
any_bits = st.integers(0, 2**32 - 1)


def float32_of(bits: list[int]) -> Float32:
    return np.array(bits, dtype=np.uint32).view(np.float32)


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    policies = draw(st.sampled_from(POLICIES))
    length = draw(st.integers(0, 8))
    owners = draw(
        npst.arrays(np.int8, length, elements=st.integers(NOT_SAMPLED, len(policies) - 1))
    )
    sampled = owners != NOT_SAMPLED
    draws = st.lists(any_bits, min_size=length, max_size=length)
    return Sequence(
        tokens=draw(npst.arrays(np.int32, length, elements=st.integers(0, INT32_MAX))),
        loss_mask=draw(npst.arrays(np.bool_, length)) & sampled,
        logprobs=np.where(sampled, float32_of(draw(draws)), np.float32(0)),
        owners=owners,
        versions=np.where(
            sampled,
            draw(npst.arrays(np.int32, length, elements=st.integers(0, INT32_MAX))),
            NOT_SAMPLED,
        ).astype(np.int32),
        policies=policies,
        reward=draw(floats),
        temperature=draw(temperatures),
        starts_episode=draw(st.booleans()),
        name=draw(texts),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
    )


episodes = st.builds(
    Episode,
    sequences=st.lists(sequences(), max_size=3).map(tuple),
    reward=floats,
    metrics=metrics,
    error=st.none() | texts,
    seconds=floats,
)
groups = st.builds(Group, prompts, st.lists(episodes, max_size=3).map(tuple))
shards = st.builds(
    Shard,
    order=st.integers(0, 2**40),
    attempt=st.integers(0, 9999),
    worker=texts,
    region=texts,
    groups=st.lists(groups, max_size=3).map(tuple),
    weights=st.dictionaries(
        st.from_regex(layout.NAME, fullmatch=True),
        st.dictionaries(st.integers(0, INT32_MAX), texts, max_size=2),
        max_size=2,
    ),
    started_s=times,
    finished_s=times,
)
keys = st.builds(
    SequenceKey,
    st.integers(0, 2**60),
    st.integers(0, INT32_MAX),
    st.integers(0, INT32_MAX),
    st.integers(0, INT32_MAX),
)


@st.composite
def rows(draw: st.DrawFn) -> BatchRow:
    length = draw(st.integers(1, 8))
    mask = draw(npst.arrays(np.bool_, length))
    draws = st.lists(any_bits, min_size=length, max_size=length)
    sampled_by = draw(npst.arrays(np.int32, length, elements=st.integers(0, INT32_MAX)))
    key = draw(keys)
    return BatchRow(
        key=key,
        prompt_id=draw(texts),
        tokens=draw(npst.arrays(np.int32, length, elements=st.integers(0, INT32_MAX))),
        loss_mask=mask,
        logprobs=np.where(mask, float32_of(draw(draws)), np.float32(0)),
        versions=np.where(mask, sampled_by, NOT_SAMPLED).astype(np.int32),
        advantages=np.where(mask, float32_of(draw(draws)), np.float32(0)),
        reward=draw(floats),
        temperature=draw(temperatures),
        min_version=draw(st.integers(0, int(sampled_by.min()))),
        replay=draw(st.booleans()),
        region=("", "us-east", "eu")[key.order % 3],
    )


entries = st.builds(LedgerEntry, keys, st.sampled_from(["filtered", "expired"]), texts)
batches = st.builds(
    Batch,
    policy=texts,
    step=st.integers(1, 2**40),
    rows=st.lists(rows(), max_size=4).map(tuple),
    ledger=st.lists(entries, max_size=4).map(tuple),
    waiting=st.lists(keys, max_size=4).map(tuple),
    shards=st.lists(st.integers(0, 2**40), max_size=3).map(tuple),
    closed_below=st.integers(0, 2**40),
    closed=st.lists(st.integers(0, 2**40), max_size=3).map(tuple),
    metrics=metrics,
    created_s=times,
)
