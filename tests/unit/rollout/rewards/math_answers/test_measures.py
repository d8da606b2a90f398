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


@pytest.mark.parametrize("text", ["", "apples", "cm apples", "million dollars", "cm+m", "deg"])
def test_a_word_outside_the_table_is_no_unit(text: str) -> None:
    assert measure_of(text) is None


@pytest.mark.parametrize(
    ("one", "other", "worth"),
    [
        ("km", "m", 1000),
        ("m", "cm^2", 1),
        ("m", "s", 1),
        ("hours", "min", 60),
        ("km", "apples", 1),
        ("cents", "dollars", Fraction(1, 100)),
    ],
)
def test_only_units_of_the_same_kind_are_compared(one: str, other: str, worth: Fraction) -> None:
    assert ratio(measure_of(one), measure_of(other)) == worth
