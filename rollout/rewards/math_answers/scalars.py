"""Equality of a single value and a reference: times, numbers, words, and expressions by algebra.

An answer may be a chain (`x = 2+3 = 5`), or have a unit; a reference may name its value (`x = 5`).
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from typing import Final

from rollout.rewards.math_answers.measures import ratio
from rollout.rewards.math_answers.number_parser import Reading, TooLargeError
from rollout.rewards.math_answers.numbers import read_number, rounds, same_number
from rollout.rewards.math_answers.operators import (
    CHANGE,
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
from rollout.rewards.math_answers.spelling import GREEK_LETTER, without_spaces
from rollout.rewards.math_answers.structure import sides, without_brackets
from rollout.rewards.math_answers.tokens import DEGREES
from rollout.rewards.math_answers.units import is_unit, measure_behind
from rollout.rewards.math_answers.words import same_time, same_words

Algebra = Callable[[str, str], bool | None]
"""Equality of two tidy expressions (answer, reference) by rules of algebra; None: undecided."""

NAME: Final = re.compile(
    r"(?!\\(?:pi|infty|emptyset)(?![a-zA-Z]))(?:[a-zA-Z]|\\[a-zA-Z]+|\\text "
    r"?\{[^{}]*\})(?:_(?:\w|\{[^{}]*\}))?'{0,2}(?:\((?:[a-zA-Z](?:,[a-zA-Z])*|\d{1,3})\))?"
)
"""A name before `=`, not part of the answer: `x`, `x_1`, `f(x)`, `\\theta`, `\\text{Area}`."""
COMMAND: Final = re.compile(r"\\[a-zA-Z]+")
VARIABLE: Final = re.compile(r"[a-df-hj-zA-Z]")
"""A letter other than the constants e and i, in a text without commands."""
COMPUTABLE: Final = re.compile(r"\d|\\pi(?![a-zA-Z])|(?<![a-zA-Z\\])[ei](?![a-zA-Z])")
"""A part of every expression that has a value: a digit, or one of the constants π, e and i."""
NO_VALUE: Final = re.compile(
    r"\A(?:[-+]? ?\\infty$|[^{}]*(?:<|>|\\(?:leq?|geq?|lt|gt|neq?)(?![a-zA-Z])))"
)
"""Infinity, or a relation outside of braces: no number is equal to it."""
UNFINISHED: Final = re.compile(r"[\d.)}\]!][+-]+[\w.(\\{]|\*|\\times|\\cdot|\\div")
"""A sum, difference or product in a text without spaces."""
ROOTS: Final = re.compile(r"\\sqrt(?:\[\w\])?(?:\w|\{[^{}]{0,100}\})(?=\\sqrt|\\frac|\()")
"""A root before another factor, in a text without spaces: `\\sqrt2\\sqrt8`."""
BOUND: Final = re.compile(r"\\(?:sum|prod|lim|liminf|limsup|i{1,3}nt|oint)(?![a-zA-Z])")
"""An operator with an index or a variable of its own."""
DERIVATIVE: Final = re.compile(
    r"\\frac ?\{ ?(?P<d>d|\\partial|\\text ?\{ ?d ?\})(?: ?\^ ?(?:\d|\{ ?\d ?\}))? ?\} ?\{ ?(?P=d)"
)
"""`\\frac{d}{dx}` before an expression, which is still to be derived."""
TEXT: Final = re.compile(r"\\text ?\{[^{}]*\}")
QUANTITY: Final = re.compile(
    rf"(?:\\(?:angle|measuredangle|triangle) ?[A-Z]{{1,4}}|[A-Z]{{2,4}}|\[[A-Z]{{3,6}}\]|{CHANGE}"
    r"|\|\\?[a-zA-Z]{1,8}(?:_\w)?\||[fghFGHP](?:_\w|\^\{-1\})?'{0,2} ?\(.{1,100}\)"
    r"|(?P<function>[a-zA-Z])(?:_\w)?'{0,2} ?\((?:(?!(?P=function))[^()]){1,100}\))"
    r"(?: ?\^ ?(?:\d|\{\d\}))?"
)
"""A quantity that is asked for, besides a name: `AB^2`, `[ABC]`, `|z|^2`, `f(-1)`, `\\Delta x`."""
TEXT_INDEX: Final = re.compile(r"(?<=_\{)\\text ?\{ ?(\w{1,8}) ?\}(?=\})")
"""The index of `v_{\\text{max}}`."""
POLYNOMIAL: Final = re.compile(
    rf"(?:\\(?:frac|cdot|times|div|sqrt|binom|angle|pi)(?![a-zA-Z])|{GREEK_LETTER}"
    r"|[a-zA-Z\d+\-*/^(){}\[\].|!_' ])+"
)
UNKNOWN: Final = re.compile(
    rf"(?P<unknown>{GREEK_LETTER}(?:_(?:\w|\{{\w{{1,8}}\}}))?"
    r"|[A-Z]{2,4}|[a-df-hj-zA-Z](?:_(?:\w|\{\w{1,8}\}))?)|\\[a-zA-Z]+"
)
CAPITAL: Final = re.compile(r"[A-Z](?=[A-Z])")
"""A capital before another one."""
FUNCTION_OF_UNKNOWN: Final = re.compile(r"[a-zA-Z] ?\([a-zA-Z]\)")
"""`f(x)`, whose value is asked for only by a numeral, as `f(-1)`."""
DIGIT_WITH_INDEX: Final = re.compile(r"(?<![\^_])(?<![\^_]\{)(?<!\d)\d{1,100} ?_|\) ?_")
"""`5_2`, which is no numeral in base 2; `x^2_1` is the square of a variable."""
STEPS: Final = re.compile(r"(?!\d{1,12}/\d{1,12}$)\d{1,12}(?:[-/]\d{1,12})+")
"""Whole numbers with dashes or several slashes: a date, a telephone number, or a calculation."""
APART: Final = re.compile(r"(?<![_\d])\d+ \d")
ELLIPSIS: Final = re.compile(r"\.\.|\\[lc]?dots")
TRAILING_UNIT: Final = re.compile(r"\\text ?\{[^{}]*\}(?:\^(?:\d|\{-?\d\}))?$")
TRAILING_UNITS_MAX: Final = 4
GREEK: Final = re.compile(GREEK_LETTER)
ABOUT: Final = "\\approx"
PRIMES: Final = re.compile(r"'|\\prime(?![a-zA-Z])")
RAISED_TWICE: Final = re.compile(r"\^ ?(?:\w|\{[^{}]*\}) ?\^")
WORD: Final = re.compile(r"[a-zA-Z]{2,}")
TRAILING_DEGREES: Final = re.compile(r"(?<=[\d})a-z])\^ ?(?:\{\\circ ?\}|\\circ)$")
ANGLE: Final = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
ANGLE_DEGREES: Final = re.compile(
    r"(?<![\d.])(\d{1,9}(?:\.\d{1,9})?) ?\^ ?(?:\{\\circ ?\}|\\circ(?![a-zA-Z]))"
)
GROUPING_COMMA: Final = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


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
    answer_name, answer_value = _named(answer)
    gold_name, gold_value = _named(gold)
    number = number_of(gold_value)
    if number is not None:
        if not gold_name and is_equation_to_solve(answer, gold_value):
            return False
        if (
            gold_name
            and gold_name != answer_name
            and len(sides(answer)) > 1
            and any(map(_variables, sides(answer)))
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
    elif len(sides(answer)) == 1 and _is_relation(gold):
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


def is_left_to_compute(text: str) -> bool:
    """Return whether the last exact side is a sum, an integral, a limit or a derivative.

    `\\int_0^1 e^x dx` may be copied from the question; `\\int_0^1 e^x dx = e-1` is computed.
    """
    last = sides(text.partition(ABOUT)[0].strip() or text)[-1]
    return bool(BOUND.search(last) or DERIVATIVE.search(last))


def is_equation_to_solve(answer: str, gold: str, unknowns_max: int = 1) -> bool:
    """Return whether the right side of `2x = 5` is no answer, but a part of an equation to solve.

    This is so if the left side is an expression in one unknown that the gold lacks. It is not if
    the left side is a name, a quantity such as `AB^2`, a function (`\\sin x`), or has several
    unknowns: questions ask for the values of these, such as `m+n`. If the gold is 0, also the
    polynomial after `y` or `f(x)` is an equation to solve.
    """
    *before, _ = sides(answer)
    if not before:
        return False
    side = before[0]
    if NAME.fullmatch(side):
        is_zero = (number := number_of(gold)) is not None and not number.value
        if not is_zero or len(before) == 1 or not (side == "y" or FUNCTION_OF_UNKNOWN.search(side)):
            return False
        side = before[-1]
    side = TEXT.sub("", TEXT_INDEX.sub(r"\1", side)).strip()
    found = (match["unknown"] for match in UNKNOWN.finditer(side))
    unknowns = {
        unknown for unknown in found if unknown and not _variables(unknown) <= _variables(gold)
    }
    return (
        1 <= len(unknowns) <= unknowns_max
        and not (NAME.fullmatch(side) or QUANTITY.fullmatch(side))
        and POLYNOMIAL.fullmatch(side) is not None
        and not DERIVATIVE.search(side)
    )


def _equal_chain(answer: str, gold: str, algebra: Algebra) -> bool | None:
    """Return whether all computable sides of `a = b = result ≈ 1.41` equal the gold.

    A side is computable if the gold has all its variables: the name in `S = …` is not, both sides
    of `x+1 = x+2` are for a gold in x.
    """
    exact = answer.partition(ABOUT)[0].strip()
    *before, result = sides(exact or answer)
    gold_variables = _variables(gold)
    computable = [part for part in before if _variables(part) <= gold_variables]
    return conjunction(_by_algebra(algebra, part, gold) for part in (result, *computable))


def _variables(text: str) -> frozenset[str]:
    return frozenset(VARIABLE.findall(COMMAND.sub("", text))) | frozenset(GREEK.findall(text))


def _is_relation(text: str) -> bool:
    """Return whether an equation is a relation, and not a name and its value.

    In a relation, the left side is an expression in variables (`x+y = 4`), or both sides are words
    (`MR = SRMC`).
    """
    first, *others = sides(text)
    if not others:
        return False
    if WORD.fullmatch(first) and WORD.fullmatch(others[-1]):
        return True
    return bool(_variables(first)) and bool(
        re.search(r"[a-zA-Z\d)}'|!][-+*/^]|\\frac|\d[a-zA-Z]", first)
    )


def is_relation_of_several(text: str) -> bool:
    """Return whether `a = 2b = c` is a relation of several quantities, and not a computation.

    In a computation, such as `S = \\sum_{k=1}^n k = \\frac{n(n+1)}{2}`, the left side is what is
    asked for, no other side is a name, and the result has a value or letters of all sides between.
    """
    chain_of_sides = sides(text.partition(ABOUT)[0])
    if len(chain_of_sides) < 3:
        return False
    first, *between, result = chain_of_sides
    is_quantity = QUANTITY.fullmatch(first) is not None
    named = [side for side in between if _variables(side)]
    if any(NAME.fullmatch(side) or (is_quantity and QUANTITY.fullmatch(side)) for side in named):
        return True
    if not _variables(result):
        return False
    is_asked_for = NAME.fullmatch(first) or is_quantity or derivatives_as_symbols(first) != first
    if not is_asked_for and not is_left_to_compute(first):
        return True
    letters = _letters(result, is_quantity)
    return any(letters.isdisjoint(_letters(side, is_quantity)) for side in between)


def _letters(text: str, are_names: bool) -> frozenset[str]:
    """Return the letters of a text with their indices; `AB` is one letter if `are_names`."""
    text = TEXT.sub(" ", text) if are_names else CAPITAL.sub(r"\g<0> ", TEXT.sub(" ", text))
    return frozenset(match["unknown"] for match in UNKNOWN.finditer(text) if match["unknown"])


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
    if is_same or is_meaning_lost(answer, gold):
        return is_same
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
    if NAME.fullmatch(part) or _variables(part) or not COMPUTABLE.search(part):
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
    bare_answer = without_spaces(answer)
    if gold.plain and (UNFINISHED.search(bare_answer) or ROOTS.search(bare_answer)):
        return False
    return _by_algebra(algebra, answer, gold_text)


def _named(text: str) -> tuple[str, str]:
    """Split `x = 5` and `5 = x` into (`x`, `5`); a text without a name gives ("", text)."""
    first, *rest = sides(text)
    if rest and NAME.fullmatch(first):
        return first, "=".join(rest)
    if len(rest) == 1 and NAME.fullmatch(rest[0]) and number_of(first) is not None:
        return rest[0], first
    return "", text


def number_of(gold: str) -> Reading | None:
    """Read a reference as a number; None if it is not one. A letter after it is a variable."""
    try:
        return read_number(without_brackets(gold), letters_are_units=False)
    except TooLargeError:
        return None


def _for_algebra(text: str) -> str:
    """Remove the commas of thousands and the unit after the expression."""
    text = without_brackets(
        unknowns_as_symbols(differences_as_symbols(derivatives_as_symbols(text)))
    )
    text = GROUPING_COMMA.sub("", text)
    for _ in range(TRAILING_UNITS_MAX):
        rest = TRAILING_UNIT.sub(_unless_unit, text).strip()
        rest = rest if ANGLE.search(rest) else TRAILING_DEGREES.sub("", rest).strip()
        if not rest or rest == text:
            break
        text = rest
    return ANGLE_DEGREES.sub(r"(\1\\pi/180)", text) if ANGLE.search(text) else text


def _unless_unit(match: re.Match[str]) -> str:
    return "" if is_unit(match[0]) else match[0]
