"""Generate problems such as `7+8-3=?`: three to five operands from 1 to 9, every running value
within 0 and 99.

A problem is a pure function of its index, split and seed. A hash of the expression itself decides
its split, so `train` and `test` never share a problem, whatever the seeds.
"""

import re
from hashlib import blake2b

from storage.errors import ConfigError
from storage.records.rollouts import Prompt

SPLITS = ("train", "test")
TEST_SHARE = 5
"""One expression in this many belongs to `test`."""
ATTEMPTS_MAX = 1000
"""Draws until an expression of the split is drawn; the chance that none is drawn is below 1e-90."""

_EXPRESSION = re.compile(r"[1-9](?:[+-][1-9])+")
_TERM = re.compile(r"([+-])([1-9])")


def problem(index: int, split: str, seed: int) -> Prompt:
    """Return problem number `index` of a split, the same on every machine.

    Example: `Prompt("chained_addition/train/0/17", {"question": "7+8-3=?", "answer": "12"})`.
    Raises ConfigError for an unknown split.
    """
    if split not in SPLITS:
        raise ConfigError(
            f"the split {split!r} of chained_addition does not exist; set prompts.split to train "
            "or test"
        )
    for attempt in range(ATTEMPTS_MAX):
        expression, value = _draw(f"{seed}/{split}/{index}/{attempt}")
        if split_of(expression) == split:
            fields = {"question": f"{expression}=?", "answer": str(value)}
            return Prompt(f"chained_addition/{split}/{seed}/{index}", fields)
    raise AssertionError(
        f"no expression of split {split} in {ATTEMPTS_MAX} draws: the hash is broken"
    )


def split_of(expression: str) -> str:
    """Return the split of an expression such as `7+8-3`."""
    digest = blake2b(expression.encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "little") % TEST_SHARE == 0 else "train"


def steps(question: str) -> list[tuple[int, str, int, int]]:
    """Return the additions of a question, as (left, op, right, value).

    `7+8-3=?` → `[(7, "+", 8, 15), (15, "-", 3, 12)]`. Raises ValueError for anything else.
    """
    expression = question.removesuffix("=?")
    if not _EXPRESSION.fullmatch(expression):
        raise ValueError(f"not a chained addition: {question!r}")
    value, chain = int(expression[0]), []
    for op, digit in _TERM.findall(expression):
        left, right = value, int(digit)
        value = left + right if op == "+" else left - right
        chain.append((left, op, right, value))
    return chain


def _draw(key: str) -> tuple[str, int]:
    """Draw an expression and its value from a key, by a hash: draws of `random` may change with a
    Python release.
    """
    draws = iter(blake2b(key.encode(), digest_size=64).digest())

    def below(limit: int) -> int:
        return (next(draws) << 8 | next(draws)) % limit

    num_operands = 3 + below(3)
    value = 1 + below(9)
    expression = str(value)
    for _ in range(num_operands - 1):
        right, minus = 1 + below(9), below(2) == 1
        if right > value:
            minus = False  # no running value is negative; five operands up to 9 never pass 99
        value = value - right if minus else value + right
        expression += f"{'-' if minus else '+'}{right}"
    return expression, value
