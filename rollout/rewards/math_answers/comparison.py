"""Equality of an answer and a reference.

    equal spelling ─▶ lists, tuples, sets, intervals: by item ─▶ numbers: exactly ─▶ `algebra`

In the event loop there is no algebra, and None means "not decided"; the judge uses a computer
algebra system.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Final, Literal

from rollout.rewards.math_answers.inequalities import solution_set
from rollout.rewards.math_answers.scalars import Algebra, conjunction, equal_scalars, number_of
from rollout.rewards.math_answers.spelling import tidy, without_spaces
from rollout.rewards.math_answers.structure import (
    Collection,
    assignments,
    collection,
    is_set,
    nesting,
    parts_of_ratio,
    parts_of_union,
    without_brackets,
)
from rollout.rewards.math_answers.words import is_choice, labelled_choice, same_words

CHARS_MAX: Final = 1_000
"""A longer answer is wrong, unless it is spelled like the reference: no reference of a known
problem set has 300.
"""
DEPTH_MAX: Final = 5
"""Collections within collections."""
NESTING_MAX: Final = 20
"""Groups within groups of an answer; parsers take exponential time for hundreds of them."""


MEMBER: Final = re.compile(r"[a-zA-Z](?:_(?:\w|\{[^{}]*\}))? ?\\in(?![a-zA-Z]) ?")


TO: Final = re.compile(r" ?\\text ?\{ ?to ?\} ?| to ")

CLOSED_AT_INFINITY: Final = re.compile(r"\[[-+]?\\infty|\\infty\]")


def equal(answer: str, reference: str, algebra: Algebra = lambda *_: None) -> bool | None:
    """Whether two answers are equal; None where only algebra could tell, and `algebra` does not.

    `1,200` equals `1200.0`; `0.33` is not `0.333`. For a plain number a sum, a difference or a
    product is wrong even where its value is right: an answer that copies `7+8-3` out of the
    question is no result.
    """
    if len(answer) > CHARS_MAX or len(reference) > CHARS_MAX:
        return bool(answer.strip()) and answer.strip() == reference.strip()
    given, gold = tidy(answer), _tidy_reference(reference)
    if nesting(given) > NESTING_MAX:
        return given == gold
    return _equal(given, gold, algebra, DEPTH_MAX)


@lru_cache(maxsize=4096)
def _tidy_reference(reference: str) -> str:
    return tidy(reference)


def _equal(answer: str, gold: str, algebra: Algebra, depth: int) -> bool | None:
    if without_spaces(answer) == without_spaces(gold):
        return bool(answer)
    assigned = assignments(answer), assignments(gold)
    if assigned[0] is None or assigned[1] is None:
        return False
    answer, gold = assigned[0], assigned[1]
    letter, content = labelled_choice(answer)
    gold_letter, gold_content = labelled_choice(gold)
    if letter or gold_letter:
        return _equal_choices(
            letter or answer, content, gold_letter or gold, gold_content, algebra, depth
        )
    if (intervals := _as_intervals(*_as_ratios(answer, gold))) is None:
        return False
    answer, gold = intervals
    answer, gold = MEMBER.sub("", answer), MEMBER.sub("", gold)
    if without_spaces(answer) == without_spaces(gold):
        return True
    if len(CLOSED_AT_INFINITY.findall(answer)) != len(CLOSED_AT_INFINITY.findall(gold)):
        return False
    expected = collection(gold)
    given = collection(answer, len(expected.items) if expected is not None else 1)
    if expected is not None and given is not None:
        return _equal_collections(given, expected, algebra, depth - 1) if depth else False
    if any(
        each is not None and is_set(each.items[0]) and each.is_set for each in (expected, given)
    ):
        return False  # a set of sets against something else
    ratios = parts_of_ratio(answer), parts_of_ratio(gold)
    if len(ratios[0]) > 2 or len(ratios[1]) > 2:
        return _equal_ratios(*ratios, algebra, depth - 1) if depth else False
    if (expected is not None or given is not None) and number_of(
        gold if given is not None else answer
    ) is not None:
        return False  # a number against several
    parts, expected_parts = parts_of_union(answer), parts_of_union(gold)
    if (
        len(parts) == len(expected_parts) > 1
        and depth
        and _equal_unordered(parts, expected_parts, algebra, depth - 1)
    ):
        return True
    return equal_scalars(without_brackets(answer), without_brackets(gold), algebra)


def _equal_choices(
    letter: str, answer: str, gold_letter: str, gold: str, algebra: Algebra, depth: int
) -> bool | None:
    """Whether two choices with their contents are the same: the letters where both have one, the
    contents where both have one. For an answer or a gold without a letter, `letter` is its content.
    """
    if is_choice(letter) and is_choice(gold_letter) and same_words(letter, gold_letter) is not True:
        return False
    if is_choice(gold) or is_choice(answer):
        return is_choice(letter) and is_choice(gold_letter)
    return _equal(answer, gold, algebra, depth - 1) if depth else False


def _as_ratios(answer: str, gold: str) -> tuple[str, str]:
    """`3 to 4` is a ratio where the gold is one."""
    return (TO.sub(":", answer), gold) if ":" in gold else (answer, gold)


def _as_intervals(answer: str, gold: str) -> tuple[str, str] | None:
    """Inequalities as the intervals that they describe, where the other one is an interval, or
    inequalities too; None for inequalities in different unknowns.
    """
    given, wanted = solution_set(answer), solution_set(gold)
    if given and wanted:
        return (given[1], wanted[1]) if given[0] == wanted[0] else None
    if given and gold and (gold[0] in "([" or "\\cup" in gold):
        return given[1], gold
    if wanted and answer and (answer[0] in "([" or "\\cup" in answer):
        return answer, wanted[1]
    return answer, gold


def _equal_ratios(
    answer: Sequence[str], gold: Sequence[str], algebra: Algebra, depth: int
) -> bool | None:
    """Whether ratios of several terms are the same, each term times the same number."""
    if len(answer) != len(gold):
        return False
    given, wanted = [number_of(term) for term in answer], [number_of(term) for term in gold]
    if wanted[0] is not None and given[0] is not None and given[0].value and wanted[0].value:
        scale = given[0].value / wanted[0].value
        pairs = list(zip(given, wanted, strict=True))
        if all(a is not None and g is not None and a.evaluated for a, g in pairs):
            return all(
                a is not None and g is not None and a.value == scale * g.value for a, g in pairs
            )
    return conjunction(_equal(a, g, algebra, depth) for a, g in zip(answer, gold, strict=True))


def _equal_collections(
    answer: Collection, gold: Collection, algebra: Algebra, depth: int
) -> bool | None:
    if gold.names and not answer.names and answer.is_set:
        return False  # which of them is x and which is y?
    if (
        answer.names
        and not gold.names
        and gold.brackets == "()"
        and all(len(name) == 1 for name in answer.names)
    ):
        answer = replace(answer, items=tuple(sorted(answer.items)))  # `y=2, x=1` is the point (1,2)
    order = _order(answer, gold)
    if order == "unordered" and gold.names and not answer.names:
        order = "ordered"
    if order == "unordered":
        return _equal_unordered(answer.items, gold.items, algebra, depth)
    if order is None or len(answer.items) != len(gold.items):
        return False
    return conjunction(
        _equal_items(a, g, algebra, depth) for a, g in zip(answer.items, gold.items, strict=True)
    )


def _equal_items(answer: str, gold: str, algebra: Algebra, depth: int) -> bool | None:
    """Whether two items of collections are equal; a set is none of its elements there."""
    return False if is_set(answer) != is_set(gold) else _equal(answer, gold, algebra, depth)


def _order(answer: Collection, gold: Collection) -> Literal["ordered", "unordered"] | None:
    """How two collections are compared; None where their brackets contradict each other.

    Sets, and lists without brackets, have no order; tuples and intervals have one. A list without
    brackets may stand for a set, or in the same order for a tuple. With more than two items
    `[1, 2, 3]` is no interval but a tuple too.
    """
    if all(each.is_bare or each.is_set for each in (answer, gold)):
        return "unordered"
    if answer.brackets == gold.brackets:
        return "ordered"
    if answer.is_set or gold.is_set:
        return None
    if len(gold.items) > 2 or {answer.brackets, gold.brackets} == {"", "()"}:
        return "ordered"
    return None


def _equal_unordered(
    answers: Sequence[str], golds: Sequence[str], algebra: Algebra, depth: int
) -> bool | None:
    """Whether the items can be paired so that each equals its partner."""
    answers, golds = _distinct(answers), _distinct(golds)
    if len(answers) != len(golds):
        return False

    @cache
    def edge(gold: int, answer: int) -> bool | None:
        return _equal_items(answers[answer], golds[gold], algebra, depth)

    if _perfect(len(golds), lambda gold, answer: edge(gold, answer) is True):
        return True
    return (
        None
        if _perfect(len(golds), lambda gold, answer: edge(gold, answer) is not False)
        else False
    )


def _distinct(items: Sequence[str]) -> list[str]:
    return list({without_spaces(item): item for item in items}.values())


def _perfect(count: int, edge: Callable[[int, int], bool]) -> bool:
    """Whether a perfect matching exists between `count` items on both sides (Kuhn's algorithm)."""
    partners: dict[int, int] = {}

    def place(gold: int, tried: set[int]) -> bool:
        for answer in range(count):
            if answer not in tried and edge(gold, answer):
                tried.add(answer)
                if answer not in partners or place(partners[answer], tried):
                    partners[answer] = gold
                    return True
        return False

    return all(place(gold, set()) for gold in range(count))
