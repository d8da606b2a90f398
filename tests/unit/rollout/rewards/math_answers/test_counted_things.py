"""Things in several words after a number, and phrases that look like them and change its value."""

import pytest

from rollout.rewards.math_answers.comparison import equal
from rollout.rewards.math_judge import judge

# fmt: off
COUNTED = [
    "cups of flour", "pieces of candy", "bottle caps", "liters of water", "red apples per day", "chocolate chip cookies",
    "boxes of oatmeal cookies", "boys in each group", "degrees of freedom", "push-ups", "T-shirts", "t-shirts", "white T-shirts",
    "jumping-jacks", "kW-hours", "hours a week", "cups of coffee a day", "people per square mile", "pairs of shoes", "pairs",
]
CHANGED = [
    # more or less than another number
    "less than y", "more than twice x", "short of 20", "short of total", "short of the goal", "shy of goal", "fewer", "fewer apples",
    "greater", "plus change", "points below average", "above par value", "dollars off and more", "before tax deduction",
    "dollars short of target", "without counting extras", "out of place",
    # ratios and fractions
    "ways out of 10", "ways out of ten", "in 10", "in ten", "in 2", "out of 5", "quarters", "quarters of pizza", "tenths of a mile",
    "two-thirds", "half-hours", "half full bottles", "percent of students", "parts per million", "basis points", "nickels in dozen",
    # a part of a group
    "of them", "hours of a day", "of 12", "of students in class", "of the 5 boys", "slices of the cake", "cups of", "cups of of flour", "number of n",
    # factors
    "lots of 4", "lots of 3", "lots of four", "groups of 3", "sets of 12", "bags of 10", "bags of two", "packs of a dozen",
    "red dozen", "dozen-packs of eggs", "tens of people", "boxes times cost", "times the number", "quintillion", "giga", "increased tenfold",
    # powers and bases
    "to the fourth power", "fourth power", "power n", "cubed", "squared apples", "in hex", "in binary notation",
    # another quantity after the first
    "feet tall and 3 inches", "feet 2 inches", "feet tall three inches", "apples 3", "apples and pears", "apples-2", "apples - 2",
    "boys - girls", "total - tax", "imaginary units", "theta", "complex conjugate",
    # four and more words
    "very tasty red apples",
]
# fmt: on


def verdicts(answer: str, gold: str) -> set[bool | None]:
    """Return the verdicts of the event loop and of the child."""
    return {equal(answer, gold), judge(answer, gold)}


@pytest.mark.parametrize("words", COUNTED)
def test_a_counted_thing_in_several_words_is_dropped(words: str) -> None:
    assert verdicts(f"5 \\text{{ {words}}}", "5") == {True}
    assert verdicts(f"\\text{{5 {words}}}", "5") == {True}
    assert verdicts(f"5 \\text{{ {words}}}", "6") == {False}
    assert verdicts("5", f"5 \\text{{ {words}}}") == {True}


@pytest.mark.parametrize("words", CHANGED)
def test_a_phrase_that_may_change_the_number_is_not_dropped(words: str) -> None:
    assert True not in verdicts(f"5 \\text{{ {words}}}", "5")
    assert True not in verdicts(f"5 {words}", "5")
    assert True not in verdicts("5", f"5 \\text{{ {words}}}")


@pytest.mark.parametrize(
    "answer",
    [
        "5\\text{ boys}-\\text{girls}",
        "5\\text{ apples} - 2",
        "5 n-sides",
        "5x-cost",
        "5-pound bags",
    ],
)
def test_a_sign_between_words_is_no_hyphen(answer: str) -> None:
    assert True not in verdicts(answer, "5")


def test_the_words_of_both_sides_are_compared() -> None:
    assert verdicts("3 red apples", "3 \\text{ red apples}") == {True}
    assert verdicts("3 green apples", "3 red apples") == {False}
    assert verdicts("3 cups of flour", "3 cups of sugar") == {False}
    assert verdicts("3 push-ups", "3 sit-ups") == {False}
    assert verdicts("35 hours a week", "35 hours per week") == {True}


@pytest.mark.parametrize(
    "answer",
    ["5 \\text{N}-\\text{m}", "5 \\text{ m s-2}", "5 \\text{ ft2}", "5 kg m^{-1}", "5 m/s^2"],
)
def test_signs_and_exponents_of_units_are_dropped(answer: str) -> None:
    assert verdicts(answer, "5") == {True}
