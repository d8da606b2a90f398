"""Recursive-descent parser of a number's tokens: exact arithmetic on fractions within limits."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import isqrt
from typing import Final

from rollout.rewards.math_answers.measures import Measure
from rollout.rewards.math_answers.tokens import Token

DEPTH_MAX: Final = 12
"""Maximum depth of groups within groups."""
BITS_MAX: Final = 14_280
"""Maximum bits of the numerator or denominator of an intermediate value.

Enough for `2^{2025}-1`. Python writes no integer of more than 4,300 digits (14,284 bits).
"""


class TooLargeError(Exception):
    """A value that is too large to compute; no problem has such an answer."""


class UnreadableError(Exception):
    """Tokens that are not a number."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A number and how it is written.

    `0.50` → `Reading(value=Fraction(1, 2), plain=True, decimals=2, digits=2)`
    """

    value: Fraction
    plain: bool = False
    """Whether it is a single numeral, with at most a sign, power of ten, percent sign or unit."""
    evaluated: bool = True
    """Whether it has no sum, difference or product, except a product with a power of ten."""
    scaled: bool = field(default=False, compare=False)
    """Whether it has a power of ten."""
    decimals: int | None = None
    """Digits after the point; −2 for `1.5e3`; None if it is not a decimal."""
    digits: int = 0
    """Significant digits of a decimal."""
    percent: bool = False
    base: int | None = None
    """The base of a numeral such as `121_3`."""
    measure: Measure | None = field(default=None, compare=False)
    """The unit after the number; None for no unit."""


class NumberParser:
    """Recursive-descent parser of the tokens of a number.

    sum     → [sign] product ((+ | −) product)*
    product → power ((× | · | * | ÷ | / | nothing) power)*
    power   → atom [^ exponent]
    atom    → numeral | (sum) | {sum} | \\frac | \\sqrt
    """

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    def whole(self) -> Reading:
        reading = self._sum()
        if self._at != len(self._tokens):
            raise UnreadableError
        return reading

    def _sum(self) -> Reading:
        total = self._signed()
        while (sign := self._next()) in ("+", "-"):
            self._at += 1
            term = self._product()
            value = total.value + term.value if sign == "+" else total.value - term.value
            total = Reading(value=bounded(value), evaluated=False)
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
                    value=bounded(left.value / right.value),
                    evaluated=left.evaluated and right.evaluated,
                )
            elif sign in ("*", "\\times", "\\cdot"):
                self._at += 1
                left = self._times(left)
            elif self._begins_mixed():
                left = self._mixed(left)
            elif sign in ("(", "{", "\\frac", "\\sqrt"):
                left = Reading(value=bounded(left.value * self._power().value), evaluated=False)
            else:
                break
        return left

    def _times(self, left: Reading) -> Reading:
        ten = self._next() == "10" and self._next(1) == "^"
        right = self._power() if self._next() not in ("+", "-") else self._signed_power()
        value = bounded(left.value * right.value)
        if not ten or not left.plain or left.scaled or not right.evaluated:
            return Reading(value=value, evaluated=False)
        power = _power_of_ten(right.value)
        return replace(
            left,
            value=value,
            scaled=True,
            decimals=(left.decimals or 0) - power,
            digits=max(left.digits, 1),
        )

    def _begins_mixed(self) -> bool:
        """Return whether the next tokens make `3` a mixed number: `3 1/2`, `3\\frac{1}{2}`."""
        before, token = self._tokens[self._at - 1], self._tokens[self._at]
        if (
            before.kind != "numeral"
            or not before.text.replace(",", "").isdigit()
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
            raise UnreadableError
        value = _raised(base.value, exponent.value.numerator)
        power = Reading(value=value, evaluated=base.evaluated and exponent.evaluated)
        return (
            replace(power, plain=True, scaled=True, decimals=-exponent.value.numerator, digits=1)
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
            raise UnreadableError
        self._at += 1
        if token.kind == "numeral":
            return _numeral(token.text)
        if token.text in ("(", "{"):
            return self._group({"(": ")", "{": "}"}[token.text])
        if token.text == "\\frac":
            above, below = self._braced(), self._braced()
            return Reading(
                value=bounded(above.value / below.value),
                evaluated=above.evaluated and below.evaluated,
            )
        if token.text == "\\sqrt":
            radicand = self._braced() if self._next() == "{" else self._atom()
            return Reading(value=_square_root(radicand.value), evaluated=radicand.evaluated)
        raise UnreadableError

    def _braced(self) -> Reading:
        if self._next() != "{":
            raise UnreadableError
        self._at += 1
        return self._group("}")

    def _group(self, closing: str) -> Reading:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise UnreadableError
        inner = self._sum()
        if self._next() != closing:
            raise UnreadableError
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
        scaled=bool(exponent),
        decimals=len(part) - power,
        digits=significant,
    )


def _raised(base: Fraction, exponent: int) -> Fraction:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(exponent) > BITS_MAX:
        raise TooLargeError
    if base == 0 and exponent < 0:
        raise UnreadableError
    return base**exponent


def _square_root(value: Fraction) -> Fraction:
    if value < 0:
        raise UnreadableError
    root = Fraction(isqrt(value.numerator), isqrt(value.denominator))
    if root * root != value:
        raise UnreadableError
    return root


def _power_of_ten(value: Fraction) -> int:
    """Return k of 10^k."""
    return len(str(value.numerator)) - len(str(value.denominator))


def bounded(value: Fraction) -> Fraction:
    """Return the value; TooLargeError for one of more than BITS_MAX bits."""
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > BITS_MAX:
        raise TooLargeError
    return value
