from fractions import Fraction

import pytest

from rollout.rewards.math_answers.measures import Measure, measure_of, ratio


def test_a_unit_is_read_as_a_product_of_powers() -> None:
    assert measure_of("cm^2") == Measure(frozenset({("length", 2)}), Fraction(1, 10_000))
    assert (
        measure_of("square feet")
        == measure_of("ft^{2}")
        == Measure(frozenset({("length", 2)}), Fraction(381, 1250) ** 2)
    )
    assert measure_of("kilometers per hour") == measure_of("kph") == measure_of("km/h")
    assert measure_of("km/h") == Measure(frozenset({("length", 1), ("time", -1)}), Fraction(5, 18))
    assert measure_of("kg m/s^2") == Measure(
        frozenset({("mass", 1), ("length", 1), ("time", -2)}), Fraction(1000)
    )


def test_a_text_without_words_is_no_unit() -> None:
    assert measure_of("") is None
    assert measure_of("each") is None


@pytest.mark.parametrize(
    "text", ["apples", "cm apples", "million dollars", "cm+m", "deg", "miles north"]
)
def test_a_word_outside_the_table_is_a_kind_of_its_own(text: str) -> None:
    measure = measure_of(text)
    assert measure is not None
    assert not measure.is_known
    assert ratio(measure, measure_of(text)) == 1
    assert ratio(measure, measure_of("pears")) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("apples", "Apple"),
        ("boxes", "box"),
        ("cities", "city"),
        ("Meters", "m"),
        ("Mph", "miles per hour"),
        ("KG", "kg"),
        ("degrees Celsius", "deg C"),
        ("μm", "micrometers"),
        ("kilojoules", "kJ"),
        ("square units", "units^2"),
    ],
)
def test_a_unit_has_several_spellings(one: str, other: str) -> None:
    assert measure_of(one) == measure_of(other)


@pytest.mark.parametrize(
    ("one", "other", "worth"),
    [
        ("km", "m", 1000),
        ("m", "cm^2", 1),
        ("m", "s", 1),
        ("hours", "min", 60),
        ("km", "apples", None),
        ("Mg", "mg", None),
        ("rad", "deg", None),
        ("gallons", "liters", None),
        ("cents", "dollars", Fraction(1, 100)),
        ("kJ", "J", 1000),
        ("keV", "eV", 1000),
        ("MHz", "GHz", Fraction(1, 1000)),
        ("mW", "MW", Fraction(1, 10**9)),
        ("kPa", "Pa", 1000),
        ("bits", "bytes", Fraction(1, 8)),
    ],
)
def test_units_of_the_same_kind_are_compared_and_unknown_words_differ(
    one: str, other: str, worth: Fraction | None
) -> None:
    assert ratio(measure_of(one), measure_of(other)) == worth
