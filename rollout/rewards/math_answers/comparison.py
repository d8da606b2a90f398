"""Equality of an answer and a reference.

    equal spelling ─▶ lists, tuples, sets, intervals: by item ─▶ numbers: exactly ─▶ `algebra`

In the event loop there is no algebra, and None means "undecided". The judge process has a computer
algebra system.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import chain
from typing import Final, Literal

from rollout.rewards.math_answers.equations import (
    FUNCTION_OF_UNKNOWN,
    is_equation_to_solve,
    is_relation_of_several,
    number_of,
    with_argument_of,
)
from rollout.rewards.math_answers.inequalities import is_any_of_unequal, solution_set
from rollout.rewards.math_answers.operators import LETTER
from rollout.rewards.math_answers.scalars import Algebra, conjunction, equal_scalars
from rollout.rewards.math_answers.spelling.tidying import tidy, without_spaces
from rollout.rewards.math_answers.spelling.unit_signs import without_suns
from rollout.rewards.math_answers.structure import (
    DOMAIN_LETTER,
    ITEMS_MAX,
    SIDES_MAX,
    Collection,
    assignments,
    collection,
    domain,
    is_set,
    matrix,
    nesting,
    parts_of_ratio,
    parts_of_union,
    sides,
    without_brackets,
    without_outer_group,
)
from rollout.rewards.math_answers.words import (
    is_choice,
    labelled_choice,
    same_choices,
    same_words,
)

CHARS_MAX: Final = 1_000
"""A longer answer is wrong unless its text is the reference's.

No reference of a public problem set has 300 characters.
"""
DEPTH_MAX: Final = 5
"""Maximum depth of collections within collections."""
NESTING_MAX: Final = 20
"""Maximum depth of groups in an answer; parsers take exponential time for hundreds of levels."""
QUICK_CHARS_MAX: Final = 200
QUICK_PARTS_MAX: Final = 8
"""Limits of the texts that `is_quick` names."""

SEPARATOR: Final = re.compile(
    r"[,;:=&、≈∪，；：＝＆]|\\\\|\\(?:cup|approx|equiv|simeq|colon|pm|lor|vee)(?![a-zA-Z])|and|or"
)
"""A sign between two parts of a list, chain, union, ratio or matrix, in any spelling."""
MEMBER: Final = re.compile(r"[a-zA-Z](?:_(?:\w|\{[^{}]*\}))? ?\\in(?![a-zA-Z]) ?")
INVERSE_MATRIX: Final = re.compile(r"\A([A-Z]) ?\^ ?\{ ?-1 ?\} ?= ?(?=\\begin\{[pb]matrix\})")
"""The name of `A^{-1}=M`."""
TO: Final = re.compile(r" ?\\text ?\{ ?to ?\} ?| to ")
INDEXED: Final = re.compile(DOMAIN_LETTER)
INDICES: Final = frozenset("jklmn")
"""Letters of whole numbers, by custom."""
REAL: Final = frozenset("xyt")
PERIOD: Final = re.compile(r"\\(?:pi|circ)(?![a-zA-Z])")
INEQUALITY: Final = re.compile(r"[<>]|\\(?:le|ge|ne)(?![a-zA-Z])")
NAMED_SET: Final = "=\\{"
CLOSED_AT_INFINITY: Final = re.compile(r"\[[-+]?\\infty|\\infty\]")


def equal(answer: str, reference: str, algebra: Algebra = lambda *_: None) -> bool | None:
    """Return whether an answer equals the reference; None where `algebra` leaves it undecided.

    `1,200` equals `1200.0`; `0.33` is not `0.333`. If the reference is a plain number, a sum,
    difference or product is wrong even if its value is right: `7+8-3` may be copied from the
    question.
    """
    if len(answer) > CHARS_MAX or len(reference) > CHARS_MAX:
        return bool(answer.strip()) and answer.strip() == reference.strip()
    tidied, gold = tidy(answer), _tidy_reference(reference)
    if nesting(tidied) > NESTING_MAX:
        return tidied == gold
    tidied = with_argument_of(gold, without_suns(gold, tidied))
    return _equal(tidied, gold, algebra, DEPTH_MAX)


def is_quick(text: str) -> bool:
    """Return whether `equal` without algebra takes milliseconds for this text and one like it.

    Each part of one text may be compared with each part of the other.
    """
    return len(text) <= QUICK_CHARS_MAX and len(SEPARATOR.findall(text)) < QUICK_PARTS_MAX


@lru_cache(maxsize=4096)
def _tidy_reference(reference: str) -> str:
    return tidy(reference)


def _equal(answer: str, gold: str, algebra: Algebra, depth: int) -> bool | None:
    if without_spaces(answer) == without_spaces(gold):
        return bool(answer)
    assigned = assignments(answer), assignments(gold)
    if assigned[0] is None or assigned[1] is None:
        return False
    answer, gold = _without_domains(assigned[0], assigned[1])
    if (same := same_choices(answer, gold)) is not None:
        return same
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
    inverses = INVERSE_MATRIX.match(answer), INVERSE_MATRIX.match(gold)
    if ("=" in answer) != ("=" in gold) or (
        inverses[0] and inverses[1] and inverses[0][1] == inverses[1][1]
    ):
        answer, gold = INVERSE_MATRIX.sub("", answer), INVERSE_MATRIX.sub("", gold)
    matrices = matrix(answer), matrix(gold)
    if matrices[0] is not None and matrices[1] is not None and depth:
        return _equal_matrices(matrices[0], matrices[1], algebra, depth - 1)
    answer, gold = _as_tuple(matrices[0], answer, gold), _as_tuple(matrices[1], gold, answer)
    answer, gold = without_outer_group(answer), without_outer_group(gold)
    golds = collection(gold)
    answers = collection(answer, len(golds.items) if golds is not None else 1)
    if golds is not None and answers is not None:
        return _equal_collections(answers, golds, algebra, depth - 1) if depth else False
    if any(each is not None and is_set(each.items[0]) and each.is_set for each in (golds, answers)):
        return False  # only one of them is a set of sets
    result, gold_result = collection(sides(answer)[-1]), collection(sides(gold)[-1])
    if result is not None and gold_result is not None and _order(result, gold_result) is None:
        return False  # `S=(1,2)` is not `\\{1,2\\}`
    ratios = parts_of_ratio(answer), parts_of_ratio(gold)
    if len(ratios[0]) > 2 or len(ratios[1]) > 2:
        return _equal_ratios(*ratios, algebra, depth - 1) if depth else False
    if (golds is not None or answers is not None) and number_of(
        gold if answers is not None else answer
    ) is not None:
        return False  # one is a single number, the other a collection
    if answers is not None and any(len(sides(item)) > 1 for item in answers.items):
        return False  # `a=17, b=\\sqrt{2}` is not a chain that ends with `\\sqrt{2}`
    parts, gold_parts = parts_of_union(answer), parts_of_union(gold)
    if (
        len(parts) == len(gold_parts) > 1
        and depth
        and _equal_unordered(parts, gold_parts, algebra, depth - 1)
    ):
        return True
    if golds is None and is_relation_of_several(gold):
        chains = sides(answer), sides(gold)
        if not depth or len(chains[1]) > SIDES_MAX:
            return False
        return _equal_unordered(*chains, algebra, depth - 1)
    if NAMED_SET not in answer + gold:
        answer, gold = without_brackets(answer), without_brackets(gold)
    return equal_scalars(answer, gold, algebra)


def _without_domains(answer: str, gold: str) -> tuple[str, str]:
    """Remove `, k\\in\\mathbb{Z}` from both, or from an answer in k if the gold has no domain.

    After another answer k is a free variable, and whole numbers may make an inequality stricter.
    With `k\\in\\mathbb{R}`, the family `\\frac\\pi4+k\\pi` would be all numbers. `f(x)=kx` and
    `(k,2k)` are no such families. Positive numbers are the domain of `f(k)` only.
    """
    own, wanted = domain(answer), domain(gold)
    if own is None or wanted is not None or MEMBER.search(gold):
        is_same = own is not None and wanted is not None and own[1:] == wanted[1:]
        return (own[0], wanted[0]) if own and wanted and is_same else (answer, gold)
    rest, variables, numbers = own
    is_stricter = numbers not in ("", "R") and INEQUALITY.search(rest)
    is_free = not variables <= {*LETTER.findall(rest), *INDEXED.findall(rest)}
    is_family = (variables - REAL and PERIOD.search(rest)) or (
        variables & INDICES and not INEQUALITY.search(rest)
    )
    *names, value = sides(rest)
    items = collection(value)
    functions = [name for name in names if FUNCTION_OF_UNKNOWN.fullmatch(name)]
    is_other = (
        REAL & set(LETTER.findall(value))
        or (items is not None and items.brackets == "()")
        or functions
    )
    is_dense = numbers == "R" and is_family and not is_other
    is_argument = variables <= INDICES and all(
        any(f"({variable})" in name for name in functions) for variable in variables
    )
    is_part = numbers in ("N", "Z+") and not is_argument
    return (answer if is_stricter or is_free or is_dense or is_part else rest), gold


def _as_tuple(rows: Sequence[Sequence[str]] | None, text: str, other: str) -> str:
    """Write a column as `(1,2)` if the other text is in round brackets."""
    if rows is None or other[:1] != "(" or {len(row) for row in rows} != {1}:
        return text
    return f"({', '.join(chain.from_iterable(rows))})"


def _equal_choices(
    letter: str, answer: str, gold_letter: str, gold: str, algebra: Algebra, depth: int
) -> bool | None:
    """Return whether two multiple-choice answers are equal.

    The letters are compared if both have a letter, the contents if both have contents. `letter` is
    the whole text of an answer or a gold without a letter.
    """
    if is_choice(letter) and is_choice(gold_letter) and same_words(letter, gold_letter) is not True:
        return False
    if is_choice(gold) or is_choice(answer):
        return is_choice(letter) and is_choice(gold_letter)
    return _equal(answer, gold, algebra, depth - 1) if depth else False


def _as_ratios(answer: str, gold: str) -> tuple[str, str]:
    """Write `3 to 4` in the answer as `3:4` if the gold is a ratio."""
    return (TO.sub(":", answer), gold) if ":" in gold else (answer, gold)


def _as_intervals(answer: str, gold: str) -> tuple[str, str] | None:
    """Replace inequalities by their solution sets if both texts are inequalities or intervals.

    Other pairs are returned unchanged. None for inequalities in different unknowns, and for one
    beside `x\\ne2 or x\\ne3`, which all numbers satisfy.
    """
    solutions, gold_solutions = solution_set(answer), solution_set(gold)
    if solutions and gold_solutions:
        same_unknown = solutions[0] == gold_solutions[0]
        return (solutions[1], gold_solutions[1]) if same_unknown else None
    if (solutions and is_any_of_unequal(gold)) or (gold_solutions and is_any_of_unequal(answer)):
        return None
    if solutions and _is_region(gold):
        return solutions[1], gold
    if gold_solutions and _is_region(answer):
        return answer, gold_solutions[1]
    return answer, gold


def _is_region(text: str) -> bool:
    """Return whether a text may be an interval, a union of intervals or the empty set."""
    return (
        text.startswith(("(", "[", "\\mathbb{R}\\setminus"))
        or "\\cup" in text
        or text == "\\emptyset"
    )


def _equal_ratios(
    answer: Sequence[str], gold: Sequence[str], algebra: Algebra, depth: int
) -> bool | None:
    """Return whether two ratios are proportional: each term of one is k times the other's."""
    if len(answer) != len(gold):
        return False
    terms, gold_terms = [number_of(term) for term in answer], [number_of(term) for term in gold]
    first, gold_first = terms[0], gold_terms[0]
    if first is not None and gold_first is not None and first.value and gold_first.value:
        scale = first.value / gold_first.value
        pairs = list(zip(terms, gold_terms, strict=True))
        if all(a is not None and g is not None and a.evaluated for a, g in pairs):
            return all(
                a is not None and g is not None and a.value == scale * g.value for a, g in pairs
            )
    return conjunction(_equal(a, g, algebra, depth) for a, g in zip(answer, gold, strict=True))


def _equal_collections(
    answer: Collection, gold: Collection, algebra: Algebra, depth: int
) -> bool | None:
    if gold.names and not answer.names and answer.is_set:
        return False  # a set of values does not say which is x and which is y
    if (
        answer.names
        and not gold.names
        and gold.brackets == "()"
        and all(len(name) == 1 for name in answer.names)
    ):
        # `y=2, x=1` is the point (1,2): coordinates in alphabetical order
        answer = replace(answer, items=tuple(sorted(answer.items)))
    order = _order(answer, gold)
    if order == "unordered" and (
        (gold.names and not answer.names) or (_units_differ(gold) and not _units_differ(answer))
    ):
        order = "ordered"
    if order == "unordered":
        items, gold_items = answer.items, gold.items
        if answer.is_set or gold.is_set:
            items, gold_items = _distinct(items), _distinct(gold_items)
        return _equal_unordered(items, gold_items, algebra, depth)
    if order is None or len(answer.items) != len(gold.items):
        return False
    return conjunction(
        _equal_items(a, g, algebra, depth) for a, g in zip(answer.items, gold.items, strict=True)
    )


def _units_differ(numbers: Collection) -> bool:
    """Return whether each item has a unit of its own, as in `5 boys, 7 girls`."""
    readings = [number_of(item) for item in numbers.items]
    units = {reading.measure for reading in readings if reading is not None and reading.measure}
    return len(units) == len(readings)


def _equal_matrices(
    answer: Sequence[Sequence[str]], gold: Sequence[Sequence[str]], algebra: Algebra, depth: int
) -> bool | None:
    if [len(row) for row in answer] != [len(row) for row in gold]:
        return False
    cells, gold_cells = chain.from_iterable(answer), chain.from_iterable(gold)
    pairs = zip(cells, gold_cells, strict=True)
    return conjunction(_equal(cell, gold_cell, algebra, depth) for cell, gold_cell in pairs)


def _equal_items(answer: str, gold: str, algebra: Algebra, depth: int) -> bool | None:
    """Return whether two items of collections are equal; `\\{2\\}` is not 2 there.

    Nor is `x+y=2`: the equation belongs to a system.
    """
    if is_set(answer) != is_set(gold):
        return False
    if len(sides(gold)) == 1 and is_equation_to_solve(answer, gold, ITEMS_MAX):
        return False
    return _equal(answer, gold, algebra, depth)


def _order(answer: Collection, gold: Collection) -> Literal["ordered", "unordered"] | None:
    """Return how two collections are compared; None if their brackets are incompatible.

    Sets and lists without brackets are unordered; tuples and intervals are ordered. A list without
    brackets equals a set, or a tuple in the same order. With more than two items, `[1, 2, 3]` is a
    tuple and not an interval.
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
    """Return whether the items can be paired so that the items of each pair are equal."""
    if len(answers) != len(golds) or len(golds) > ITEMS_MAX:
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


def _distinct(items: Sequence[str]) -> tuple[str, ...]:
    return tuple({without_spaces(item): item for item in items}.values())


def _perfect(count: int, edge: Callable[[int, int], bool]) -> bool:
    """Return whether `count` items on each side have a perfect matching (Kuhn's algorithm)."""
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
