from fractions import Fraction

import pytest

from rollout.rewards.math_answers.number_parser import (
    BITS_MAX,
    Reading,
    TooLargeError,
)
from rollout.rewards.math_answers.numbers import (
    CHARS_MAX,
    is_long_decimal,
    read_number,
    rounds,
    same_number,
)


def read(text: str) -> Reading:
    reading = read_number(text)
    assert reading is not None, text
    return reading


@pytest.mark.parametrize(
    ("text", "reading"),
    [
        ("12", Reading(value=Fraction(12), plain=True)),
        ("0.50", Reading(value=Fraction(1, 2), plain=True, decimals=2, digits=2)),
        ("-.5", Reading(value=Fraction(-1, 2), plain=True, decimals=1, digits=1)),
        ("12.", Reading(value=Fraction(12), plain=True, decimals=0, digits=2)),
        ("1,200", Reading(value=Fraction(1200), plain=True)),
        ("1.50e3", Reading(value=Fraction(1500), plain=True, decimals=-1, digits=3)),
        ("3e-2", Reading(value=Fraction(3, 100), plain=True, decimals=2, digits=1)),
        ("1.5\\times10^{3}", Reading(value=Fraction(1500), plain=True, decimals=-2, digits=2)),
        ("5\\times{10}^{-3}", Reading(value=Fraction(1, 200), plain=True, decimals=3, digits=1)),
        ("10^3", Reading(value=Fraction(1000), plain=True, decimals=-3, digits=1)),
        ("50%", Reading(value=Fraction(50), plain=True, percent=True)),
        ("\\frac{1}{2}", Reading(value=Fraction(1, 2))),
        ("3 1/2", Reading(value=Fraction(7, 2))),
        ("-3\\frac{1}{2}", Reading(value=Fraction(-7, 2))),
        ("2^{10}", Reading(value=Fraction(1024))),
        ("-2^2", Reading(value=Fraction(-4))),
        ("\\sqrt{\\frac{9}{4}}", Reading(value=Fraction(3, 2))),
        ("121_3", Reading(value=Fraction(16), base=3)),
        ("-1A_{16}", Reading(value=Fraction(-26), base=16)),
        ("0.1\\overline{6}", Reading(value=Fraction(1, 6))),
        ("0.1666...", Reading(value=Fraction(1, 6))),
        ("-0.333\\dots", Reading(value=Fraction(-1, 3))),
        ("(121)_3", Reading(value=Fraction(16), base=3)),
        ("121_{\\text{three}}", Reading(value=Fraction(16), base=3)),
        ("FF_{16}", Reading(value=Fraction(255), base=16)),
        ("3/4 of an hour", Reading(value=Fraction(3, 4))),
        ("18/hour", Reading(value=Fraction(18), plain=True)),
        ("4 dozen", Reading(value=Fraction(48), plain=True)),
        ("5 hundred thousand", Reading(value=Fraction(500_000), plain=True)),
        ("5 millions", Reading(value=Fraction(5_000_000), plain=True)),
        ("5 crore rupees", Reading(value=Fraction(50_000_000), plain=True)),
        ("5 months", Reading(value=Fraction(5), plain=True)),
        ("5 square units", Reading(value=Fraction(5), plain=True)),
        ("5 apples per day", Reading(value=Fraction(5), plain=True)),
        ("7+8-3", Reading(value=Fraction(12), evaluated=False)),
        ("(7+8)/3", Reading(value=Fraction(5), evaluated=False)),
        ("15/(1+2)", Reading(value=Fraction(5), evaluated=False)),
        ("10^2\\cdot10^3", Reading(value=Fraction(100000), evaluated=False)),
        ("2\\times10^3\\times10^4", Reading(value=Fraction(20000000), evaluated=False)),
        ("2\\times10^{2+3}", Reading(value=Fraction(200000), evaluated=False)),
        ("2e3\\times10^4", Reading(value=Fraction(20000000), evaluated=False)),
        ("3\\times4", Reading(value=Fraction(12), evaluated=False)),
        ("2(6)", Reading(value=Fraction(12), evaluated=False)),
        ("\\frac{20+4}{2}", Reading(value=Fraction(12), evaluated=False)),
        ("24/2", Reading(value=Fraction(12))),
        ("10^3\\times5", Reading(value=Fraction(5000), evaluated=False)),
        ("1/2 dollars", Reading(value=Fraction(1, 2))),
        ("18 dollars", Reading(value=Fraction(18), plain=True)),
        ("€18", Reading(value=Fraction(18), plain=True)),
        ("45^\\circ", Reading(value=Fraction(45), plain=True)),
        ("3\\text{cm}^2", Reading(value=Fraction(3), plain=True)),
        ("3 million", Reading(value=Fraction(3_000_000), plain=True)),
        ("5 m", Reading(value=Fraction(5), plain=True)),
        ("60 km/h", Reading(value=Fraction(60), plain=True)),
        ("20 percent", Reading(value=Fraction(20), plain=True, percent=True)),
    ],
)
def test_a_number_is_read_exactly(text: str, reading: Reading) -> None:
    assert read_number(text) == reading


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "5x", "5m", "5 x", "1 2", "1 200", "12,00", "1,2", "(5", "5)", "\\frac{1}{0}", "\\frac{1}",
        "\\sqrt{2}", "\\sqrt{-4}", "2^{1/2}", "5 or 6", "5 squared", "5\\text{or more}", "0^{-1}", "\\pi", "5!", "€€5", "1_1",
        "5 eighths", "1 ninth", "5 millionths", "1 million five hundred thousand", "2 hundred five", "5 score",
        "5 point two", "5 below zero", "5 remainder three", "5 feet six inches", "5 doubled", "5 very tasty red apples",
        "3 / ", "5 ab", "twelve", "१२",
        "0.33...", "3.14159...", "19_8", "x_{12}", "(12_3", "5/m", "3/4 of 12", "3/4 of a half", "3/4 of the dozen",
    ],
)  # fmt: skip
def test_text_with_more_or_less_than_a_number_is_not_read(text: str) -> None:
    assert read_number(text) is None


def test_a_letter_after_a_reference_is_a_variable() -> None:
    assert read_number("\\frac{37}{4} m", letters_are_units=False) is None
    assert read_number("37 kg", letters_are_units=False) == Reading(value=Fraction(37), plain=True)


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9^{9}}}",
        f"2^{{{BITS_MAX}}}",
        f"1^{{{BITS_MAX + 1}}}",
        "1e9999",
        "*".join(["9^{999}"] * (BITS_MAX // 3000 + 1)),
    ],
)
def test_a_value_beyond_the_limits_is_not_computed(text: str) -> None:
    with pytest.raises(TooLargeError):
        read_number(text)


def test_long_and_deeply_nested_texts_are_not_read_as_numbers() -> None:
    assert read_number("1" * CHARS_MAX) == Reading(value=Fraction(int("1" * CHARS_MAX)), plain=True)
    assert read_number("1" * (CHARS_MAX + 1)) is None
    assert read_number("(" * 12 + "1" + ")" * 12) == Reading(value=Fraction(1), plain=True)
    assert read_number("(" * 13 + "1" + ")" * 13) is None


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        ("50%", "0.5", True),
        ("50%", "50", True),
        ("0.5", "50%", True),
        ("0.5%", "50%", False),
        ("5000", "50%", False),
        ("\\frac{50}{3}%", "16.6667%", True),
        ("0.166667", "\\frac{50}{3}%", True),
        ("7+5", "12", False),
        ("\\frac{1}{4}+\\frac{1}{4}", "\\frac{1}{2}", True),
        ("121", "121_3", True),
        ("13", "20_3", False),  # 3 is no digit in base 3, and 1·3 + 3 is not the value
        ("3", "10_3", False),
        ("20", "100_2", False),
        ("100", "100_2", True),
        ("-121", "121_3", False),
        ("12.1", "121_3", False),
        ("121_4", "121_3", False),
        ("1111_2", "15", False),
        ("15_{10}", "15", True),
        ("1111_2", "1111", False),
        ("500 cm", "5 m", True),
        ("5 cm", "5 m", False),
        ("36 km/h", "10\\text{ m/s}", True),
        ("5 m", "5 s", True),
        ("5 m", "5", True),
        ("5 apples", "5", True),
        ("5 apples", "5 pears", False),
        ("25%\\text{loss}", "25%\\text{gain}", False),
        ("25%\\text{loss}", "25%", True),
        ("5 Hours", "5 minutes", False),
        ("5 million dollars", "5000000 dollars", True),
        ("5\\mu\\text{m}", "0.005\\text{mm}", True),
    ],
)
def test_numbers_are_equal_by_value_and_form(answer: str, gold: str, same: bool) -> None:
    assert same_number(read(answer), read(gold)) is same


@pytest.mark.parametrize(
    ("decimal", "value", "stands_for"),
    [
        ("0.333333", Fraction(1, 3), True),
        ("0.33333", Fraction(1, 3), False),
        ("0.666667", Fraction(2, 3), True),
        ("0.666666", Fraction(2, 3), True),
        ("0.666668", Fraction(2, 3), False),
        ("0.333334", Fraction(1, 3), False),
        ("-0.333334", Fraction(-1, 3), False),
        ("-0.666667", Fraction(-2, 3), True),
        ("-0.666666", Fraction(-2, 3), True),
        ("33333.3", Fraction(100_000, 3), True),
        ("3.33333e-20", Fraction(1, 3 * 10**19), True),
        ("3.33335e-20", Fraction(1, 3 * 10**19), False),
    ],
)
def test_a_decimal_of_six_digits_equals_the_value_it_rounds(
    decimal: str, value: Fraction, stands_for: bool
) -> None:
    assert is_long_decimal(read(decimal), value) is stands_for


def test_a_decimal_equals_values_within_one_unit_of_its_last_digit() -> None:
    assert rounds(read("0.5"), Fraction(59, 100))
    assert not rounds(read("0.5"), Fraction(6, 10))
    assert not rounds(read("1/2"), Fraction(1, 2))
