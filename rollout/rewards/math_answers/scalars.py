"""Equality of a single value and a reference: times, numbers, words, and expressions by algebra.

An answer may be a chain (`x = 2+3 = 5`), or have a unit; a reference may name its value (`x = 5`).
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from typing import Final

from rollout.rewards.math_answers.derivatives import derivatives_as_symbols
from rollout.rewards.math_answers.measures import ratio
from rollout.rewards.math_answers.number_parser import Reading, TooLargeError
from rollout.rewards.math_answers.numbers import read_number, rounds, same_number
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
    r"[-+]? ?\\infty$|[^{}]*(?:<|>|\\(?:leq?|geq?|lt|gt|neq?)(?![a-zA-Z]))"
)
"""Infinity, or a relation outside of braces: no number is equal to it."""
UNFINISHED: Final = re.compile(r"[\d.)}\]!][+-]+[\w.(\\{]|\*|\\times|\\cdot|\\div")
"""A sum, difference or product in a text without spaces."""
ROOTS: Final = re.compile(r"\\sqrt(?:\[\w\])?(?:\w|\{[^{}]{0,100}\})(?=\\sqrt|\\frac|\()")
"""A root before another factor, in a text without spaces: `\\sqrt2\\sqrt8`."""
BOUND: Final = re.compile(r"\\(?:sum|prod|lim|liminf|limsup|i{1,3}nt|oint)(?![a-zA-Z])")
"""An operator with an index or a variable of its own."""
TEXT: Final = re.compile(r"\\text ?\{[^{}]*\}")
POLYNOMIAL: Final = re.compile(
    rf"(?:\\(?:frac|cdot|times)(?![a-zA-Z])|{GREEK_LETTER}|[a-zA-Z\d+\-*/^(){{}}\[\]. ])+"
)
EXPONENT: Final = re.compile(r"\^ ?(?:\w|\{[^{}]*\})")
NUMERAL: Final = r"(?:\d{1,99}(?:\.\d{1,99})?|\\frac ?\{\d{1,99}\} ?\{\d{1,99}\})"
NUMERAL_AS_TERM: Final = re.compile(
    rf"[-+] ?{NUMERAL} ?(?:$|[-+)}}\]])|(?:^|[({{\[]) ?{NUMERAL} ?[-+]"
)
"""The 1 of `x-1` and of `(1+x)^2`, but not the 2 of `2x-y`."""
VALUE_OF_FUNCTION: Final = re.compile(r"[a-zA-Z] ?\([^a-zA-Z()]*\)")
"""`f(-1)`."""
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
ANGLE_NAME: Final = re.compile(r"\\(?:angle|triangle)(?![a-zA-Z]) ?([A-Z]{1,3})")
NABLA: Final = re.compile(r"\\nabla(?![a-zA-Z])(?: ?(\\times|\\cdot)(?![a-zA-Z]))?")
"""The gradient, the divergence or the curl."""
INVERSE_FUNCTION: Final = re.compile(r"([fgh]) ?\^ ?\{ ?-1 ?\} ?\(")
FUNCTION: Final = re.compile(r"([fgh]) ?\(")
BAR: Final = r"(?:\||\\vert(?![a-zA-Z]))"
MODULUS: Final = re.compile(rf"{BAR}((?:(?!\\vert)[^|]){{1,100}}){BAR}")
TRANSPOSED: Final = re.compile(
    r"[A-Z]\}? ?\^ ?(?:T|\\top|\\text ?\{ ?T ?\}|\{ ?(?:\\top|\\text ?\{ ?T ?\}) ?\})"
)
CROSS_PRODUCT: Final = re.compile(
    r"[A-Z] ?\\times ?[A-Z]|\\(?:vec|hat|overrightarrow|text) ?(?:\{ ?\w{1,2} ?\}|\w) ?\\times"
)
INVERSE: Final = re.compile(r"[A-Z]\}? ?\^ ?\{ ?-1 ?\}")
CAPITAL: Final = re.compile(r"[A-Z]")
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
        if not number.value and _is_equation_to_solve(answer):
            return False
        if (
            gold_name
            and gold_name != answer_name
            and len(sides(answer)) > 1
            and any(map(_variables, sides(answer)))
        ):
            return False
        return _equals_number(answer_value if answer_name else answer, number, gold_value, algebra)
    for compare in (same_words, _same_word_equation):
        if (verdict := compare(answer, gold)) is not None:
            return verdict
    if gold_name and len(sides(answer)) == 1:
        gold = sides(gold_value)[-1]
    elif len(sides(gold)) == 1:
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


def _is_equation_to_solve(answer: str) -> bool:
    """Return whether `… = 0` is a polynomial equation in one variable, as a copied `x^2-5x+6=0`.

    It has a numeral as a term, since `a-b=0` may be the value that was asked for; and so may be the
    polynomial that follows its name (`\\Delta=k^2-4=0`), but not after `y` or `f(x)`.
    """
    *before, side = sides(answer)[:-1] or [""]
    side = TEXT.sub("", side).strip()
    variables = _variables(side)
    if (
        len(variables) != 1
        or not POLYNOMIAL.fullmatch(side)
        or not NUMERAL_AS_TERM.search(EXPONENT.sub("", side))
        or VALUE_OF_FUNCTION.search(side)
    ):
        return False
    argument = f"({''.join(variables)})"
    return not any(NAME.fullmatch(part) and part != "y" and argument not in part for part in before)


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
        re.search(r"[a-zA-Z\d)}][-+*/^]|\\frac|\d[a-zA-Z]", first)
    )


def _by_algebra(algebra: Algebra, answer: str, gold: str) -> bool | None:
    pair = _for_algebra(answer), _for_algebra(gold)
    if any(pattern.search(text) for pattern in (PRIMES, RAISED_TWICE) for text in pair):
        return False  # the algebra system ignores primes, and a double exponent is invalid TeX
    if _is_meaning_lost(answer, gold):
        return without_spaces(answer) == without_spaces(gold)
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


def _is_meaning_lost(answer: str, gold: str) -> bool:
    """Return whether one of two different texts has an operator that algebra drops or commutes.

    `A^T` (a transpose), `A\\times B` (a cross product), `AB^{-1}` (matrices); `\\angle ABC` is read
    as a product, `f^{-1}(x)` as a reciprocal, `\\nabla\\cdot F` as `\\nabla\\times F`, and z as a
    real number.
    """
    angles = ANGLE_NAME.findall(answer), ANGLE_NAME.findall(gold)
    if angles[0] and angles[1] and angles[0] != angles[1]:
        return True
    if set(NABLA.findall(answer)) != set(NABLA.findall(gold)):
        return True
    if _has_modulus_of_z(answer) != _has_modulus_of_z(gold):
        return True
    for one, other in ((answer, gold), (gold, answer)):
        inverse = set(INVERSE_FUNCTION.findall(one)) - set(INVERSE_FUNCTION.findall(other))
        if inverse & set(FUNCTION.findall(other)):
            return True
    return any(
        TRANSPOSED.search(text)
        or CROSS_PRODUCT.search(text)
        or (INVERSE.search(text) and len(set(CAPITAL.findall(COMMAND.sub("", text)))) > 1)
        for text in (answer, gold)
    )


def _has_modulus_of_z(text: str) -> bool:
    """Return whether a text has an absolute value of z, which is complex by custom."""
    return any("z" in COMMAND.sub("", inside) for inside in MODULUS.findall(text))


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
    if not any("0" <= letter <= "9" for letter in bare) and answer.isascii():
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
    text = GROUPING_COMMA.sub("", derivatives_as_symbols(text))
    for _ in range(TRAILING_UNITS_MAX):
        rest = TRAILING_UNIT.sub(_unless_unit, text).strip()
        rest = rest if ANGLE.search(rest) else TRAILING_DEGREES.sub("", rest).strip()
        if not rest or rest == text:
            break
        text = rest
    return ANGLE_DEGREES.sub(r"(\1\\pi/180)", text) if ANGLE.search(text) else text


def _unless_unit(match: re.Match[str]) -> str:
    return "" if is_unit(match[0]) else match[0]
