"""Exact reading of numbers as fractions, and equality of two of them.

    1,200.50   5\\times10^{3}   3e5   -\\frac{1}{2}   3 1/2   2^{10}
    50%   121_3   0.\\overline{3}   18 dollars   45^\\circ   7+8-3

All work is bounded by the limits below for any text. A text with a variable, a function or an
irrational root is not read: a computer algebra system must decide.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import isqrt
from typing import Final

from rollout.rewards.math_answers.measures import UNITS, Measure, measure_of, ratio
from rollout.rewards.math_answers.tokens import Token, tokens
from rollout.rewards.math_answers.units import WHOLE, begins_unit, scale_of, written

CHARS_MAX: Final = 300
"""A longer text is not read as a number."""
DEPTH_MAX: Final = 12
"""Groups within groups."""
EXPONENT_MAX: Final = 1_000
BITS_MAX: Final = 20_000
"""Of a numerator or denominator on the way to a value."""
SIGNIFICANT_MIN: Final = 6
"""Significant digits from which on a decimal stands for the fraction that it rounds."""

BASED: Final = re.compile(
    r"([+-]?)(\(?)(\d[0-9A-Za-z]{0,99}|[0-9A-F]{2,99}(?=\)?_\{?16))(\)?)"
    r"_(?:(\d{1,2})|\{ ?(?:\\text ?\{)? ?(\d{1,2}|[a-z]{3,7}) ?\}?\})"
)
"""Sign, digits, base: `121_3`, `(121)_{3}`, `121_{\\text{three}}`, `FF_{16}`."""
BASES: Final = {
    **{
        "two": 2,
        "three": 3,
        "four": 4,
        "five": 5,
        "six": 6,
        "seven": 7,
        "eight": 8,
        "nine": 9,
        "ten": 10,
    },
    **{"eleven": 11, "twelve": 12, "sixteen": 16},
}
UNITS_OF_SEVERAL_LETTERS: Final = frozenset(name for name in UNITS if len(name) > 1)
"""Behind a slash: `18/hour` has a unit, `18/h` may be a quotient."""
REPEATING: Final = re.compile(r"([+-]?)(\d{0,30})\.(\d{0,30})\\overline ?\{(\d{1,30})\}")
ENDLESS: Final = re.compile(r"([+-]?)(\d{0,30})\.(\d{0,30}?)(\d)\4{2,30}(?:\.\.\.|\\dots)")
"""`0.1666…`: the same digit three times and dots."""
CROSS: Final = re.compile(r"(?<=\d) ?[xX] ?(?=10\^)")
GROUPED_TEN: Final = re.compile(r"[{(]10[})](?=\^)")


class TooLargeError(Exception):
    """A value that is too large to compute, and that no problem has as its answer."""


class _UnreadableError(Exception):
    """The tokens are no number."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A number as it was written. `0.50` →
    `Reading(Fraction(1, 2), plain=True, decimals=2, digits=2)`.
    """

    value: Fraction
    plain: bool = False
    """A single numeral, at most with a sign, a power of ten, a percent sign or a unit."""
    evaluated: bool = True
    """No sum, difference or product is left to be computed, except for a product with a power of
    ten.
    """
    decimals: int | None = None
    """Digits after the point; −2 for `1.5e3`; None for what is not written as a decimal."""
    digits: int = 0
    """Significant digits of a decimal."""
    percent: bool = False
    base: int | None = None
    """Of a numeral with a base, such as `121_3`."""
    measure: Measure | None = field(default=None, compare=False)
    """Of a unit behind it; None where there is none that is known."""


def read_number(text: str, letters_are_units: bool = True) -> Reading | None:
    """The number that a tidy text denotes; None where it denotes none. Raises TooLargeError.

    `letters_are_units`: whether `3 m` is 3, and not an expression with a variable.
    """
    if len(text) > CHARS_MAX:
        return None
    if based := BASED.fullmatch(text):
        return _read_based(based)
    if repeating := REPEATING.fullmatch(text) or ENDLESS.fullmatch(text):
        return _read_repeating(repeating)
    found = tokens(CROSS.sub(r"\\times ", GROUPED_TEN.sub("10", text)))
    if found is None:
        return None
    try:
        return _read(found, letters_are_units)
    except (_UnreadableError, ZeroDivisionError):
        return None


def same_number(answer: Reading, gold: Reading) -> bool:
    """Whether `answer` is the number `gold`.

    The comparison is exact, except that p % equals p/100 and also p, where only one of the two has
    the sign, and that a decimal of at least SIGNIFICANT_MIN digits equals a fraction which it
    rounds. For a plain gold, an answer which leaves something to compute is wrong. Where both have
    a unit of the same kind, `500 cm` is `5 m`.
    """
    if answer.base is not None or gold.base is not None:
        return _same_based(answer, gold)
    if gold.plain and not answer.evaluated:
        return False
    if (worth := ratio(answer.measure, gold.measure)) != 1:
        return answer.value * worth == gold.value
    if answer.percent == gold.percent:
        return same_value(answer, gold)
    percent, other = (answer, gold) if answer.percent else (gold, answer)
    hundredth = replace(
        percent,
        value=percent.value / 100,
        decimals=None if percent.decimals is None else percent.decimals + 2,
    )
    return same_value(percent, other) or same_value(hundredth, other)


def same_value(one: Reading, other: Reading) -> bool:
    """Whether two values are equal, or one is a long decimal of the other."""
    if one.value == other.value:
        return True
    if (one.decimals is None) == (other.decimals is None):
        return False
    decimal, exact = (one, other) if one.decimals is not None else (other, one)
    return exact.value.denominator > 1 and is_long_decimal(decimal, exact.value)


def is_long_decimal(decimal: Reading, value: Fraction) -> bool:
    """Whether a decimal has digits enough to stand for `value`, and rounds it."""
    return decimal.digits >= SIGNIFICANT_MIN and rounds(decimal, value)


def rounds(decimal: Reading, value: Fraction) -> bool:
    """Whether a decimal is `value` rounded to its last digit, or cut behind it."""
    if decimal.decimals is None:
        return False
    unit = Fraction(10) ** -decimal.decimals
    beyond = (value - decimal.value) * (-1 if decimal.value < 0 else 1)
    return -unit / 2 <= beyond < unit


def _same_based(answer: Reading, gold: Reading) -> bool:
    """For a gold in base 3 the answer has the same digits, with the base 3 or with none. For a gold
    without a base an answer with one is judged by its value.
    """
    if gold.base is None or answer.base is not None:
        return answer.value == gold.value and (gold.base is None or answer.base == gold.base)
    if not answer.plain or answer.value.denominator != 1:
        return False
    return _positional(str(abs(answer.value.numerator)), gold.base) == abs(gold.value) and (
        answer.value < 0
    ) == (gold.value < 0)


def _read_based(found: re.Match[str]) -> Reading | None:
    name = found[5] or found[6]
    base = int(name) if name.isdigit() else BASES.get(name, 0)
    if (
        base < 2
        or bool(found[2]) != bool(found[4])
        or any(int(digit, 36) >= base for digit in found[3])
    ):
        return None
    value = _positional(found[3], base)
    return Reading(value=Fraction(-value if found[1] == "-" else value), base=base)


def _read_repeating(found: re.Match[str]) -> Reading:
    """`0.1\\overline{6}` → 1/6."""
    sign, whole, fixed, period = found.groups()
    value = Fraction(
        int(whole + fixed or "0") + Fraction(int(period), 10 ** len(period) - 1)
    ) / 10 ** len(fixed)
    return Reading(value=-value if sign == "-" else value)


def _positional(digits: str, base: int) -> int:
    value = 0
    for digit in digits:
        value = value * base + int(digit, 36)
    return value


def _read(found: Sequence[Token], letters_are_units: bool) -> Reading:
    end = next((index for index, token in enumerate(found) if begins_unit(token)), len(found))
    number, unit = [token for token in found[:end] if token.text not in "€£¥₹₩"], list(found[end:])
    if len(number) < end - 1:
        raise _UnreadableError  # one currency sign is a unit, two are a puzzle
    if (
        unit
        and number
        and number[-1].text == "/"
        and (unit[0].kind == "text" or unit[0].text in UNITS_OF_SEVERAL_LETTERS)
    ):
        number, unit = number[:-1], [replace(unit[0], spaced=True), *unit[1:]]  # `18/hour`
    scale, measure = scale_of(unit, letters_are_units), measure_of(WHOLE.sub("", written(unit)))
    if scale is None:
        raise _UnreadableError
    percent = bool(number) and number[-1].text == "%"
    if percent or (unit and unit[0].text.strip().lower() in ("percent", "pct", "percentage")):
        return replace(_Reader(number[:-1] if percent else number).whole(), percent=True)
    reading = replace(_Reader(number).whole(), measure=measure)
    return replace(reading, value=_bounded(reading.value * scale)) if scale != 1 else reading


class _Reader:
    """Recursive descent over the tokens of a number:

    sum     → [sign] product ((+ | −) product)*
    product → power ((× | · | * | ÷ | / | nothing) power)*
    power   → atom [^ exponent]
    atom    → numeral | (sum) | {sum} | \\frac | \\sqrt
    """

    def __init__(self, found: Sequence[Token]) -> None:
        self._tokens = found
        self._at = 0
        self._depth = 0

    def whole(self) -> Reading:
        reading = self._sum()
        if self._at != len(self._tokens):
            raise _UnreadableError
        return reading

    def _sum(self) -> Reading:
        total = self._signed()
        while (sign := self._next()) in ("+", "-"):
            self._at += 1
            term = self._product()
            value = total.value + term.value if sign == "+" else total.value - term.value
            total = Reading(value=_bounded(value), evaluated=False)
        return total

    def _signed(self) -> Reading:
        negative = False
        while (sign := self._next()) in ("+", "-"):
            negative ^= sign == "-"
            self._at += 1
        reading = self._product()
        return replace(reading, value=-reading.value) if negative else reading

    def _product(self) -> Reading:
        left = self._power()
        while (sign := self._next()) is not None:
            if sign in ("/", "\\div"):
                self._at += 1
                right = self._power()
                left = Reading(
                    value=_bounded(left.value / right.value),
                    evaluated=left.evaluated and right.evaluated,
                )
            elif sign in ("*", "\\times", "\\cdot"):
                self._at += 1
                left = self._times(left)
            elif self._begins_mixed():
                left = self._mixed(left)
            elif sign in ("(", "{", "\\frac", "\\sqrt"):
                left = Reading(value=_bounded(left.value * self._power().value), evaluated=False)
            else:
                break
        return left

    def _times(self, left: Reading) -> Reading:
        ten = self._next() == "10" and self._next(1) == "^"
        right = self._power() if self._next() not in ("+", "-") else self._signed_power()
        value = _bounded(left.value * right.value)
        if not ten or not left.plain:
            return Reading(value=value, evaluated=False)
        power = _power_of_ten(right.value)
        return replace(
            left, value=value, decimals=(left.decimals or 0) - power, digits=max(left.digits, 1)
        )

    def _begins_mixed(self) -> bool:
        """Whether what comes continues `3` to `3 1/2` or `3\\frac{1}{2}`."""
        before, token = self._tokens[self._at - 1], self._tokens[self._at]
        if (
            before.kind != "numeral"
            or not before.text.isdigit()
            or (self._at > 1 and self._tokens[self._at - 2].text in "/^_")
        ):
            return False
        follows = [each.text for each in self._tokens[self._at : self._at + 7]]
        if token.kind == "numeral":
            return (
                token.spaced
                and len(follows) > 2
                and follows[1] == "/"
                and all(follows[i].isdigit() for i in (0, 2))
            )
        is_fraction = (
            len(follows) == 7
            and follows[:2] == ["\\frac", "{"]
            and follows[3:5] == ["}", "{"]
            and follows[6] == "}"
        )
        return is_fraction and follows[2].isdigit() and follows[5].isdigit()

    def _mixed(self, whole: Reading) -> Reading:
        if self._tokens[self._at].kind == "numeral":
            part = Fraction(int(self._tokens[self._at].text), int(self._tokens[self._at + 2].text))
            self._at += 3
        else:
            part = self._power().value
        return Reading(value=whole.value + part, evaluated=whole.evaluated)

    def _signed_power(self) -> Reading:
        negative = self._next() == "-"
        self._at += 1
        reading = self._power()
        return replace(reading, value=-reading.value) if negative else reading

    def _power(self) -> Reading:
        is_ten = self._next() == "10"
        base = self._atom()
        if self._next() != "^":
            return base
        self._at += 1
        exponent = self._exponent()
        if exponent.value.denominator != 1:
            raise _UnreadableError
        value = _raised(base.value, exponent.value.numerator)
        power = Reading(value=value, evaluated=base.evaluated and exponent.evaluated)
        return (
            replace(power, plain=True, decimals=-exponent.value.numerator, digits=1)
            if is_ten
            else power
        )

    def _exponent(self) -> Reading:
        if self._next() in ("+", "-"):
            return self._signed_power() if self._next(1) != "{" else self._signed()
        return self._atom()

    def _atom(self) -> Reading:
        token = self._tokens[self._at] if self._at < len(self._tokens) else None
        if token is None:
            raise _UnreadableError
        self._at += 1
        if token.kind == "numeral":
            return _numeral(token.text)
        if token.text in ("(", "{"):
            return self._group({"(": ")", "{": "}"}[token.text])
        if token.text == "\\frac":
            above, below = self._braced(), self._braced()
            return Reading(
                value=_bounded(above.value / below.value),
                evaluated=above.evaluated and below.evaluated,
            )
        if token.text == "\\sqrt":
            radicand = self._braced() if self._next() == "{" else self._atom()
            return Reading(value=_square_root(radicand.value), evaluated=radicand.evaluated)
        raise _UnreadableError

    def _braced(self) -> Reading:
        if self._next() != "{":
            raise _UnreadableError
        self._at += 1
        return self._group("}")

    def _group(self, closing: str) -> Reading:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise _UnreadableError
        inner = self._sum()
        if self._next() != closing:
            raise _UnreadableError
        self._at += 1
        self._depth -= 1
        return inner

    def _next(self, ahead: int = 0) -> str | None:
        at = self._at + ahead
        return self._tokens[at].text if at < len(self._tokens) else None


def _numeral(text: str) -> Reading:
    digits, _, exponent = text.lower().partition("e")
    digits = digits.replace(",", "")
    whole, point, part = digits.partition(".")
    value = Fraction(int((whole + part) or "0"), 10 ** len(part))
    if not point and not exponent:
        return Reading(value=value, plain=True)
    power = int(exponent or "0")
    significant = len((whole + part).lstrip("0")) or 1
    return Reading(
        value=value * _raised(Fraction(10), power),
        plain=True,
        decimals=len(part) - power,
        digits=significant,
    )


def _raised(base: Fraction, exponent: int) -> Fraction:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) > EXPONENT_MAX or bits * abs(exponent) > BITS_MAX:
        raise TooLargeError
    if base == 0 and exponent < 0:
        raise _UnreadableError
    return base**exponent


def _square_root(value: Fraction) -> Fraction:
    if value < 0:
        raise _UnreadableError
    root = Fraction(isqrt(value.numerator), isqrt(value.denominator))
    if root * root != value:
        raise _UnreadableError
    return root


def _power_of_ten(value: Fraction) -> int:
    """k of 10^k."""
    return len(str(value.numerator)) - len(str(value.denominator))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > BITS_MAX:
        raise TooLargeError
    return value
