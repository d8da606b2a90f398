"""Exact reading of numbers as fractions, and equality of two numbers.

    1,200.50   5\\times10^{3}   3e5   -\\frac{1}{2}   3 1/2   2^{10}
    50%   121_3   0.\\overline{3}   18 dollars   45^\\circ   7+8-3

The limits below bound the work for any text. A text with a variable, a function or an irrational
root is not read as a number: a computer algebra system compares it.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Final

from rollout.rewards.math_answers.measures import UNITS, ratio
from rollout.rewards.math_answers.number_parser import (
    NumberParser,
    Reading,
    UnreadableError,
    bounded,
)
from rollout.rewards.math_answers.tokens import Token, tokens
from rollout.rewards.math_answers.units import begins_unit, measure_after, scale_of

CHARS_MAX: Final = 300
"""A longer text is not read as a number."""
SIGNIFICANT_MIN: Final = 6
"""Significant digits that a decimal needs to be accepted for the exact value that it rounds."""

BASED: Final = re.compile(
    r"([+-]?)(\(?)(\d[0-9A-Za-z]{0,99}|[0-9A-F]{2,99}(?=\)?_\{?16))(\)?)"
    r"_(?:(\d{1,2})|\{ ?(?:\\text ?\{)? ?(\d{1,2}|[a-z]{3,7}) ?\}?\})"
)
"""Sign, digits, base: `121_3`, `(121)_{3}`, `121_{\\text{three}}`, `FF_{16}`."""
BASES: Final = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
    "eleven": 11,
    "twelve": 12,
    "sixteen": 16,
}
UNITS_OF_SEVERAL_LETTERS: Final = frozenset(name for name in UNITS if len(name) > 1)
"""Names that are units after a slash: `18/hour` has a unit, `18/h` may be a quotient."""
REPEATING: Final = re.compile(r"([+-]?)(\d{0,30})\.(\d{0,30})\\overline ?\{(\d{1,30})\}")
ENDLESS: Final = re.compile(r"([+-]?)(\d{0,30})\.(\d{0,30}?)(\d)\4{2,30}(?:\.\.\.|\\dots)")
"""`0.1666…`: the same digit at least three times, then dots."""
CROSS: Final = re.compile(r"(?<=\d) ?[xX] ?(?=10\^)")
GROUPED_TEN: Final = re.compile(r"[{(]10[})](?=\^)")
GROUPED_POWER: Final = re.compile(r"(\\times|\\cdot) ?[{(](10\^(?:\d|\{[-+]?\d{1,4}\}))[})]")
"""The power of `5\\times{10^3}`."""


def read_number(text: str, letters_are_units: bool = True) -> Reading | None:
    """Read a tidy text as a number; None if it is not a number. Raises TooLargeError.

    `letters_are_units`: whether `3 m` is the number 3, and not an expression with a variable.
    """
    if len(text) > CHARS_MAX:
        return None
    if based := BASED.fullmatch(text):
        return _read_based(based)
    if repeating := REPEATING.fullmatch(text) or ENDLESS.fullmatch(text):
        return _read_repeating(repeating)
    text = GROUPED_POWER.sub(r"\1 \2", GROUPED_TEN.sub("10", text))
    lexed = tokens(CROSS.sub(r"\\times ", text))
    if lexed is None:
        return None
    try:
        return _read(lexed, letters_are_units)
    except (UnreadableError, ZeroDivisionError):
        return None


def same_number(answer: Reading, gold: Reading) -> bool:
    """Return whether an answer is the number of the gold.

    The comparison is exact, with these rules. If only one side has a percent sign, p % equals both
    p/100 and p; a fraction below 1, such as ½ %, equals only p/100. A decimal of at least
    SIGNIFICANT_MIN digits equals the fraction that it rounds. For a plain gold, an answer that is
    not evaluated is wrong. If both have units of the same kind, the units count: `500 cm` is
    `5 m`. `5 apples` is not `5 pears`.
    """
    if answer.base is not None or gold.base is not None:
        return _same_based(answer, gold)
    if gold.plain and not answer.evaluated:
        return False
    factor = ratio(answer.measure, gold.measure)
    if factor is None:
        return False
    if factor != 1:
        return answer.value * factor == gold.value
    if answer.percent == gold.percent:
        return same_value(answer, gold)
    percent, other = (answer, gold) if answer.percent else (gold, answer)
    hundredth = replace(
        percent,
        value=percent.value / 100,
        decimals=None if percent.decimals is None else percent.decimals + 2,
    )
    is_part = percent.decimals is None and abs(percent.value) < 1 and percent.value != 0
    return same_value(hundredth, other) or (not is_part and same_value(percent, other))


def same_value(first: Reading, second: Reading) -> bool:
    """Return whether two values are equal, or one is a long decimal of the other."""
    if first.value == second.value:
        return True
    if (first.decimals is None) == (second.decimals is None):
        return False
    decimal, exact = (first, second) if first.decimals is not None else (second, first)
    return exact.value.denominator > 1 and is_long_decimal(decimal, exact.value)


def is_long_decimal(decimal: Reading, value: Fraction) -> bool:
    """Return whether a decimal of at least SIGNIFICANT_MIN digits rounds `value`."""
    return decimal.digits >= SIGNIFICANT_MIN and rounds(decimal, value)


def rounds(decimal: Reading, value: Fraction) -> bool:
    """Return whether a decimal is `value` rounded or truncated to the decimal's last digit."""
    if decimal.decimals is None:
        return False
    unit = Fraction(10) ** -decimal.decimals
    beyond = (value - decimal.value) * (-1 if decimal.value < 0 else 1)
    return -unit / 2 <= beyond < unit


def _same_based(answer: Reading, gold: Reading) -> bool:
    """Return whether two numerals are equal, of which at least one has a base.

    For a gold in base 3, the answer must have the same digits, in base 3 or without a base. For a
    gold without a base, only base 10 is right: `1010_2` for 10 may be copied from the question.
    """
    if gold.base is None or answer.base is not None:
        return answer.value == gold.value and answer.base == (gold.base or 10)
    if not answer.plain or answer.value.denominator != 1:
        return False
    digits = str(abs(answer.value.numerator))
    return (
        all(int(digit) < gold.base for digit in digits)
        and _positional(digits, gold.base) == abs(gold.value)
        and (answer.value < 0) == (gold.value < 0)
    )


def _read_based(match: re.Match[str]) -> Reading | None:
    name = match[5] or match[6]
    base = int(name) if name.isdigit() else BASES.get(name, 0)
    if (
        base < 2
        or bool(match[2]) != bool(match[4])
        or any(int(digit, 36) >= base for digit in match[3])
    ):
        return None
    value = _positional(match[3], base)
    return Reading(value=Fraction(-value if match[1] == "-" else value), base=base)


def _read_repeating(match: re.Match[str]) -> Reading:
    """Read a repeating decimal: `0.1\\overline{6}` → 1/6."""
    sign, whole, fixed, period = match.groups()
    value = Fraction(
        int(whole + fixed or "0") + Fraction(int(period), 10 ** len(period) - 1)
    ) / 10 ** len(fixed)
    return Reading(value=-value if sign == "-" else value)


def _positional(digits: str, base: int) -> int:
    value = 0
    for digit in digits:
        value = value * base + int(digit, 36)
    return value


def _read(lexed: Sequence[Token], letters_are_units: bool) -> Reading:
    end = next((index for index, token in enumerate(lexed) if begins_unit(token)), len(lexed))
    number, unit = [token for token in lexed[:end] if token.text not in "€£¥₹₩"], list(lexed[end:])
    if len(number) < end - 1:
        raise UnreadableError  # more than one currency sign
    if (
        unit
        and number
        and number[-1].text == "/"
        and (unit[0].kind == "text" or unit[0].text in UNITS_OF_SEVERAL_LETTERS)
    ):
        number, unit = number[:-1], [replace(unit[0], spaced=True), *unit[1:]]  # `18/hour`
    scale, measure = scale_of(unit, letters_are_units), measure_after(unit)
    if scale is None:
        raise UnreadableError
    percent = bool(number) and number[-1].text == "%"
    if percent or (unit and unit[0].text.strip().lower() in ("percent", "pct", "percentage")):
        digits = number[:-1] if percent else number
        return replace(NumberParser(digits).whole(), percent=True, measure=measure)
    reading = replace(NumberParser(number).whole(), measure=measure)
    return replace(reading, value=bounded(reading.value * scale)) if scale != 1 else reading
