"""Make labelled answers from golds: rewritten so that they stay right, or changed to wrong ones."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

NUMERAL: Final = re.compile(r"([+-]?)(\d{1,3}(?:,\d{3})+|\d+)(\.\d*)?(?:e([+-]?\d+))?")


@dataclass(frozen=True)
class Labelled:
    """An answer with its label: `Labelled("1,200", "1200", True, "thousands")`."""

    answer: str
    gold: str
    right: bool
    change: str
    """Name of the change to the gold."""


def labelled(gold: str) -> Iterator[Labelled]:
    """Yield all answers made from a gold."""
    number = NUMERAL.fullmatch(gold)
    right = {
        "as it is": [gold],
        "dollars": [f"${gold}$"],
        "brackets": [f"\\({gold}\\)"],
        "full stop": [f"{gold}."],
    }
    wrong: dict[str, list[str]] = {}
    if number:
        right |= _right_numbers(number)
        wrong |= _wrong_numbers(number)
    else:
        right |= _right_expressions(gold)
        wrong |= _wrong_expressions(gold)
    for label, made in ((True, right), (False, wrong)):
        for change, answers in made.items():
            yield from (Labelled(answer, gold, label, change) for answer in answers)


def value_of(number: re.Match[str]) -> Fraction:
    sign, digits, part, exponent = number.groups()
    value = Fraction(digits.replace(",", "") + (part or "").rstrip(".")) * Fraction(10) ** int(
        exponent or 0
    )
    return -value if sign == "-" else value


def _right_numbers(number: re.Match[str]) -> dict[str, list[str]]:
    gold, value = number[0], value_of(number)
    made = {
        "x =": [f"x = {gold}", f"\\text{{Answer}} = {gold}"],
        "money": [f"\\${gold}", f"€{gold}"],
        "unit": [
            f"{gold} dollars",
            f"{gold} apples",
            f"{gold}\\text{{ cm}}",
            f"{gold}\\,\\mathrm{{kg}}",
            f"{gold}^\\circ",
        ],
        "percent": [f"{gold}\\%", f"{gold} percent"],
        "parentheses": [f"\\left({gold}\\right)", f"{{{gold}}}"],
        "true equation": [f"{_decimal(value - 3)}+3={gold}" if _is_short(value) else f"x={gold}"],
        "fraction": [f"\\dfrac{{{value.numerator}}}{{{value.denominator}}}"]
        if 1 < value.denominator < 10**9
        else [],
        "scientific": _scientific(value),
    }
    if value.denominator == 1 and "e" not in gold and not number[3]:
        made["decimal zeros"] = [f"{gold}.0", f"{gold}.00"]
    if abs(value) >= 1000 and value.denominator == 1 and "e" not in gold:
        grouped = f"{int(value):,}"
        made["thousands"] = [
            grouped,
            *(grouped.replace(",", mark) for mark in ("{,}", ",\\!", "\\,")),
        ]
    return made


def _wrong_numbers(number: re.Match[str]) -> dict[str, list[str]]:
    gold, value = number[0], value_of(number)
    sign, digits, part, exponent = number.groups()
    plain = sign + digits.replace(",", "")
    tail = f"e{exponent}" if exponent else ""
    unit = Fraction(1, 10 ** len((part or ".")[1:])) * Fraction(10) ** int(exponent or 0)
    whole = value.denominator == 1 and not exponent and not part
    made = {
        "off by one": [_decimal(value + unit), _decimal(value - unit)],
        "sign": [_decimal(-value)] if value else [],
        "power of ten": [_decimal(value * 10), _decimal(value / 10)] if value else [],
        "longer digits": [f"{plain}{part or '.'}1{tail}"],
        "shorter digits": [f"{plain}{part[:-1]}{tail}"]
        if part and len(part) > 1 and part[-1] != "0"
        else [],
        "left to compute": [
            f"{_decimal(value - 3)}+3",
            f"{_decimal(value + 7)}-7",
            f"2\\times{_decimal(value / 2)}",
        ],
        "false equation": [f"{_decimal(2 * value)}={gold}" if value else f"1={gold}"],
        "two answers": [f"{gold}, {_decimal(value + 1)}", f"{gold} or {_decimal(value + 1)}"],
        "variable": [f"{gold}x", f"{gold}\\pi"] if value else [],
        "interval": [f"[{gold}, {_decimal(value + 1)}]"],
        "words": [f"{gold} squared" if value not in (0, 1) else f"{gold} or more", "no answer"],
    }
    if exponent:
        made["other exponent"] = [
            f"{plain}{part or ''}e{int(exponent) + 1}",
            f"{plain}{part or ''}\\times10^{{{-int(exponent)}}}",
        ]
    if whole and value > 9:
        made["base"] = [f"{plain}_{{{12}}}"]
        made["space"] = [f"{plain[0]} {plain[1:]}"]
        made["other percent"] = [f"{_decimal(value * 10)}\\%"]
        swapped = plain[:-2] + plain[-1] + plain[-2]
        made["digits swapped"] = [swapped] if swapped != plain else []
    if whole and value >= 1000 and "," not in gold:
        made["list"] = [f"{plain[:-3]}, {plain[-3:]}"]
    return made


def _right_expressions(gold: str) -> dict[str, list[str]]:
    made = {
        "spaces": [gold.replace("+", " + ").replace(",", ", ")],
        "dfrac": [gold.replace("\\frac", "\\dfrac")],
    }
    made["left and right"] = (
        [gold.replace("(", "\\left(").replace(")", "\\right)")] if "\\left" not in gold else []
    )
    if is_expression(gold):
        made["parentheses"] = [f"\\left({gold}\\right)"]
        made["name"] = [f"Q = {gold}"]
        made["added zero"] = [f"{gold}+0"]
    return made


def _wrong_expressions(gold: str) -> dict[str, list[str]]:
    made: dict[str, list[str]] = {"words": ["no answer"], "a number": ["12345"]}
    if is_expression(gold):
        made["plus one"] = [f"{gold}+1"]
        made["sign"] = [f"-\\left({gold}\\right)"]
        made["factor"] = [f"2\\left({gold}\\right)"]
        made["other variable"] = [f"{gold}+w"]
    if digit := re.search(r"\d", gold):
        made["other digit"] = [
            gold[: digit.start()] + str((int(digit[0]) + 1) % 10) + gold[digit.end() :]
        ]
    return made


def is_expression(gold: str) -> bool:
    """Return whether the gold is one term or sum, which can be multiplied and added to."""
    return (
        not any(
            mark in gold
            for mark in (
                "=",
                "<",
                ">",
                ",",
                "\\{",
                "[",
                "]",
                "\\text",
                "\\cup",
                "\\pm",
                "\\ge",
                "\\le",
                "_3",
                "_2",
            )
        )
        and not (gold.isalpha() and len(gold) > 1)
        and "begin" not in gold
        and "%" not in gold
        and "\\infty" not in gold
    )


def _scientific(value: Fraction) -> list[str]:
    if not value:
        return []
    digits, exponent = f"{float(abs(value)):.12e}".split("e")
    digits = digits.rstrip("0").rstrip(".")
    if Fraction(digits) * Fraction(10) ** int(exponent) != abs(value):
        return []
    sign, power = "-" if value < 0 else "", int(exponent)
    times = (
        f"\\times10^{{{power}}}",
        f" \\times {{10}}^{{{power}}}",
        f"\\cdot 10^{{{power}}}",
        f"e{power}",
    )
    return [f"{sign}{digits}{each}" for each in times]


def _is_short(value: Fraction) -> bool:
    return abs(value) < 10**9 and (value * 10**6).denominator == 1


def _decimal(value: Fraction) -> str:
    """Format a value with exact digits; in scientific notation if it is very large or small."""
    if value.denominator == 1 and abs(value) < 10**15:
        return str(value.numerator)
    if 1e-6 <= abs(value) < 1e15:
        return f"{float(value):.12f}".rstrip("0").rstrip(".")
    digits, exponent = f"{float(value):.12e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}\\times10^{{{int(exponent)}}}"
