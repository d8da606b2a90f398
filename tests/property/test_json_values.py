from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from storage.formats import json_values
from storage.formats.json_objects import seal, unseal
from storage.records.rollouts import Order, Prompt

TEXT = st.text(st.characters(), max_size=8)
"""Lone surrogates are among the characters."""
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    TEXT,
    st.just(10**3999),
    st.just(-(10**4000)),
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)
)


def nested(value: Any, depth: int) -> Any:
    for level in range(depth):
        value = [value] if level % 2 else {"in": value}
    return value


@settings(deadline=None)
@given(VALUES, st.integers(0, 40))
def test_every_accepted_value_is_read_back_from_an_order_unchanged(value: Any, depth: int) -> None:
    fields = {"question": "1+1", "more": nested(value, depth)}
    if json_values.fault(fields) is None:
        order = Order(
            number=0,
            prompts=(Prompt("a/0", fields),),
            samples_per_prompt=1,
            seed=0,
            seen=(),
            cursor={},
        )
        assert unseal(Order, seal(order), "an order") == order
