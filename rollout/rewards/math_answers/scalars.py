"""Equality of a single value and a reference: times, numbers, words, and expressions by algebra.

An answer may be a chain (`x = 2+3 = 5`), or have a unit; a reference may name its value (`x = 5`).
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from typing import Final

from rollout.rewards.math_answers.equations import (
    ABOUT,
    BOUND,
    NAME,
    VARIABLE,
    WORD,
    has_sum_or_product,
    is_equation_to_solve,
    is_left_to_compute,
    is_relation,
    named,
    number_of,
    variables,
)
from rollout.rewards.math_answers.measures import ratio
from rollout.rewards.math_answers.number_parser import Reading, TooLargeError
from rollout.rewards.math_answers.numbers import read_number, rounds, same_number
from rollout.rewards.math_answers.operators import (
    COMMAND,
    applications_as_symbols,
    brackets_as_floors,
    derivatives_as_symbols,
    differences_as_symbols,
    functions,
    in_one_notation,
    in_one_spelling,
    is_meaning_lost,
    unknowns_as_symbols,
)
from rollout.rewards.math_answers.spelling.tidying import without_spaces
from rollout.rewards.math_answers.structure import sides, without_brackets, without_grouping
from rollout.rewards.math_answers.tokens import DEGREES
from rollout.rewards.math_answers.units import is_unit, measure_behind
from rollout.rewards.math_answers.words import same_time, same_words

Algebra = Callable[[str, str], bool | None]
"""Equality of two tidy expressions (answer, reference) by rules of algebra; None: undecided."""

COMPUTABLE: Final = re.compile(r"\d|\\pi(?![a-zA-Z])|(?<![a-zA-Z\\])[ei](?![a-zA-Z])")
"""A part of every expression that has a value: a digit, or one of the constants π, e and i."""
NO_VALUE: Final = re.compile(
    r"\A(?:[-+]? ?\\infty$|[^{}]*(?:<|>|\\(?:leq?|geq?|lt|gt|neq?)(?![a-zA-Z])))"
)
"""Infinity, or a relation outside of braces: no number is equal to it."""
DIGIT_WITH_INDEX: Final = re.compile(r"(?<![\^_])(?<![\^_]\{)(?<!\d)\d{1,100} ?_|\) ?_")
"""`5_2`, which is no numeral in base 2; `x^2_1` is the square of a variable."""
STEPS: Final = re.compile(r"(?!\d{1,12}/\d{1,12}$)\d{1,12}(?:[-/]\d{1,12})+")
"""Whole numbers with dashes or several slashes: a date, a telephone number, or a calculation."""
APART: Final = re.compile(r"(?<![_\d])\d+ \d")
ELLIPSIS: Final = re.compile(r"\.\.|\\[lc]?dots")
TRAILING_UNIT: Final = re.compile(r"\\text ?\{[^{}]*\}(?:\^(?:\d|\{-?\d\}))?$")
TRAILING_UNITS_MAX: Final = 4
PRIMES: Final = re.compile(r"'|\\prime(?![a-zA-Z])")
RAISED_TWICE: Final = re.compile(r"\^ ?(?:\w|\{[^{}]*\}) ?\^")
TRAILING_DEGREES: Final = re.compile(r"(?<=[\d})a-z])\^ ?(?:\{\\circ ?\}|\\circ)$")
ANGLE: Final = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
ANGLE_DEGREES: Final = re.compile(
    r"(?<![\d.])(\d{1,9}(?:\.\d{1,9})?) ?\^ ?(?:\{\\circ ?\}|\\circ(?![a-zA-Z]))"
)


def conjunction(verdicts: Iterable[bool | None]) -> bool | None:
    """Return False if any verdict is False, else None if any is None, else True.

    Stops at the first False, since a verdict may be expensive.
    """
    is_undecided = False
    for verdict in verdicts:
        if verdict is False:
            return False
        is_undecided |= verdict is None
    return None if is_undecided else True


def equal_scalars(answer: str, gold: str, algebra: Algebra) -> bool | None:
    """Return whether two single values are equal; None where `algebra` leaves it undecided."""
    if without_spaces(answer) == without_spaces(gold):
        return bool(answer)
    if (same := same_time(answer, gold)) is not None:
        return same
    if STEPS.fullmatch(without_spaces(answer)) and STEPS.fullmatch(without_spaces(gold)):
        return False  # `2020-01-05` is a date, and not 2014
    answer_name, answer_value = named(answer)
    gold_name, gold_value = named(gold)
    if gold_name:
        gold_value = gold_value.partition(ABOUT)[0].strip() or gold_value
    number = number_of(gold_value)
    if number is not None:
        if not gold_name and is_equation_to_solve(answer, gold_value):
            return False
        if (
            gold_name
            and gold_name != answer_name
            and len(sides(answer)) > 1
            and any(map(variables, sides(answer)))
        ):
            return False
        return _equals_number(answer_value if answer_name else answer, number, gold_value, algebra)
    if is_left_to_compute(answer) and not is_left_to_compute(gold):
        return False
    for compare in (same_words, _same_word_equation):
        if (verdict := compare(answer, gold)) is not None:
            return verdict
    if gold_name and len(sides(answer)) == 1:
        gold = sides(gold_value)[-1]
    elif len(sides(gold)) == 1:
        if is_equation_to_solve(answer, gold):
            return False
        return _equal_chain(answer_value if answer_name else answer, gold, algebra)
    elif len(sides(answer)) == 1 and is_relation(gold):
        return False
    return _by_algebra(algebra, answer, gold)


def _same_word_equation(answer: str, gold: str) -> bool | None:
    """Return whether two equations between words are equal; None for other texts.

    `MR=SRMC` is `SRMC=MR`, and not `MR=SMRC`.
    """
    own, wanted = sides(answer), sides(gold)
    if len(own) != 2 or len(wanted) != 2 or not all(map(WORD.fullmatch, (*own, *wanted))):
        return None
    verdicts = {
        conjunction(
            one == other or same_words(one, other) for one, other in zip(own, each, strict=True)
        )
        for each in (wanted, wanted[::-1])
    }
    return True if True in verdicts else None if None in verdicts else False


def _equal_chain(answer: str, gold: str, algebra: Algebra) -> bool | None:
    """Return whether all computable sides of `a = b = result ≈ 1.41` equal the gold.

    A side is computable if the gold has all its variables: the name in `S = …` is not, both sides
    of `x+1 = x+2` are for a gold in x.
    """
    exact = answer.partition(ABOUT)[0].strip()
    *before, result = sides(exact or answer)
    gold_variables = variables(gold)
    computable = [part for part in before if variables(part) <= gold_variables]
    return conjunction(_by_algebra(algebra, part, gold) for part in (result, *computable))


def _by_algebra(algebra: Algebra, answer: str, gold: str) -> bool | None:
    if (floors := brackets_as_floors(answer, gold)) is None:
        return False
    answer, gold = floors
    names = functions(answer, gold)
    pair = in_one_notation(
        *(_for_algebra(applications_as_symbols(text, names)) for text in (answer, gold))
    )
    if any(pattern.search(text) for pattern in (PRIMES, RAISED_TWICE) for text in pair):
        return False  # the algebra system ignores primes, and a double exponent is invalid TeX
    is_same = in_one_spelling(answer) == in_one_spelling(gold)
    if is_meaning_lost(answer, gold) or (is_same and BOUND.search(gold)):
        return is_same  # algebra compares few infinite sums
    if any(DIGIT_WITH_INDEX.search(text) for text in pair):
        return False
    if ("{,}" in pair[0]) != ("{,}" in pair[1]):
        return False  # it may be a decimal comma or separate items
    if ratio(measure_behind(answer), measure_behind(gold)) != 1:
        return False
    trailing = TRAILING_UNIT.search(pair[0]), TRAILING_UNIT.search(pair[1])
    if (trailing[0] and trailing[0][0]) != (trailing[1] and trailing[1][0]):
        return False  # `\\sqrt{2}\\text{ squared}`
    return algebra(*pair)


def _equals_number(answer: str, gold: Reading, gold_text: str, algebra: Algebra) -> bool | None:
    *before, result = sides(answer)
    exact, _, decimal = answer.rpartition(ABOUT)
    if (
        exact
        and (reading := number_of(decimal)) is not None
        and rounds(reading, gold.value)
        and reading.value != gold.value
    ):
        answer, (*before, result) = exact, sides(exact)
    try:
        reading = read_number(without_brackets(result))
        verdict = (
            _unread_equals_number(result, gold, gold_text, algebra)
            if reading is None
            else same_number(reading, gold)
        )
        return conjunction(
            chain([verdict], (_agrees(part, answer, reading or gold, algebra) for part in before))
        )
    except TooLargeError:
        return False


def _agrees(part: str, chain_text: str, result: Reading, algebra: Algebra) -> bool | None:
    """Return whether `part = result` is true; True also for a part that has a variable or no value.

    `7 = 8`, `\\pi = 3`, `5! = 100`, `\\infty = 5` and `x < 3 = 5` are false. A decimal may be
    rounded: `\\sqrt{10} = 3.16`. The numerals may have different bases: `1111_2 = 15_{10}`.
    """
    reading = read_number(without_brackets(part))
    if reading is not None:
        value = replace(reading, plain=False, evaluated=True, base=None)
        return same_number(value, replace(result, plain=False, base=None)) or rounds(
            result, reading.value
        )
    if NO_VALUE.match(part):
        return False
    if NAME.fullmatch(part) or variables(part) or not COMPUTABLE.search(part):
        return True
    decimals = 0 if result.decimals is None and ABOUT in chain_text else result.decimals
    verdict: bool | None = False
    for factor in _factors(chain_text, result):
        for expression, value_text in _equations(
            _for_algebra(part), factor, result.value, decimals
        ):
            found = algebra(expression, value_text)
            if found:
                return True
            verdict = None if found is None else verdict
    return verdict


def _factors(chain_text: str, result: Reading) -> list[str]:
    """Return the factors from an expression to its result: 100 for `\\frac{1}{\\sqrt4} = 50%`."""
    factors = ["1"]
    if result.percent:
        factors.append("100")
    if DEGREES.search(chain_text):
        factors.append("\\frac{180}{\\pi}")
    return factors


def _equations(
    part: str, factor: str, value: Fraction, decimals: int | None
) -> Iterator[tuple[str, str]]:
    """Yield pairs of which one is equal if `part * factor` is a value, or rounds to its decimals.

    A positive number is truncated to k decimals by `\\lfloor 10^k x\\rfloor`, and rounded by
    `\\lfloor 10^k x+\\frac12\\rfloor`.
    """
    scaled = part if factor == "1" else f"({part})\\cdot {factor}"
    yield scaled, _as_latex(value)
    if decimals is None:
        return
    sign = "-" if value < 0 else ""
    power = Fraction(10) ** decimals
    shift, digits = _as_latex(power), _as_latex(abs(value) * power)
    for half in ("", "+\\frac{1}{2}"):
        yield f"\\lfloor {sign}({scaled})\\cdot {shift}{half}\\rfloor", digits


def _as_latex(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _unread_equals_number(
    answer: str, gold: Reading, gold_text: str, algebra: Algebra
) -> bool | None:
    """Return whether an expression that `read_number` cannot read has the value of the gold."""
    bare = COMMAND.sub("", answer)
    if not COMPUTABLE.search(answer):
        return False
    if VARIABLE.search(bare) or APART.search(answer) or ELLIPSIS.search(answer):
        return False
    if BOUND.search(answer):
        return False
    if gold.plain and has_sum_or_product(answer):
        return False
    return _by_algebra(algebra, answer, gold_text)


def _for_algebra(text: str) -> str:
    """Remove the commas of thousands and the unit after the expression."""
    text = without_brackets(
        unknowns_as_symbols(differences_as_symbols(derivatives_as_symbols(text)))
    )
    text = without_grouping(text)
    for _ in range(TRAILING_UNITS_MAX):
        rest = TRAILING_UNIT.sub(_unless_unit, text).strip()
        rest = rest if ANGLE.search(rest) else TRAILING_DEGREES.sub("", rest).strip()
        if not rest or rest == text:
            break
        text = rest
    return ANGLE_DEGREES.sub(r"(\1\\pi/180)", text) if ANGLE.search(text) else text


def _unless_unit(match: re.Match[str]) -> str:
    return "" if is_unit(match[0]) else match[0]
