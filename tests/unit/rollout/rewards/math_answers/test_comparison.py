"""Decisions about an answer without algebra, on the event loop."""

import re
import time
from types import ModuleType

import pytest

from benchmarks.math_judge.pairs import EQUAL, UNEQUAL
from rollout.rewards import box
from rollout.rewards.math_answers import (
    comparison,
    equations,
    inequalities,
    measures,
    numbers,
    operators,
    scalars,
    spelling,
    structure,
    tokens,
    units,
    words,
)
from rollout.rewards.math_answers.comparison import CHARS_MAX, NESTING_MAX, equal
from rollout.rewards.math_answers.spelling.tidying import tidy
from rollout.rewards.math_answers.structure import (
    ITEMS_MAX,
    SIDES_MAX,
    Collection,
    assignments,
    collection,
    parts_of_union,
    sides,
    without_brackets,
)


@pytest.mark.parametrize(("answer", "reference"), EQUAL)
def test_the_quick_comparison_never_refuses_an_equal_answer(answer: str, reference: str) -> None:
    assert equal(answer, reference) is not False


@pytest.mark.parametrize(("answer", "reference"), UNEQUAL)
def test_the_quick_comparison_never_accepts_a_different_answer(answer: str, reference: str) -> None:
    assert equal(answer, reference) is not True


def test_the_quick_comparison_decides_most_pairs() -> None:
    decided = [pair for pair in EQUAL + UNEQUAL if equal(*pair) is not None]
    assert len(decided) >= 0.75 * len(EQUAL + UNEQUAL)


@pytest.mark.parametrize(
    ("answer", "reference", "verdict"),
    [
        ("12", "12", True),
        ("12", "13", False),
        ("3", "-3", False),
        ("+7", "7", True),
        ("007", "7", True),
        ("12.0", "12", True),
        (".5", "0.50", True),
        ("0.33", "0.333", False),
        ("1,234,567.5", "1234567.50", True),
        ("1{,}200", "1200", True),
        ("1,\\!200", "1200", True),
        ("1\\,000", "1000", True),
        ("1 200", "1200", False),
        ("5 12", "12", False),
        ("12,00", "1200", False),
        (" 12 ", "12", True),
        ("x + 1", "x+1", True),
        ("\\frac{1}{2}", "0.5", True),
        ("3\\times10^{5}", "300000", True),
        ("7+8-3=", "12", False),
        ("10/3=3.33", "3.33", True),
        ("10/3=3.35", "3.35", False),
        ("x \\approx 3.3", "3.3", True),
        ("0.5=50\\%", "0.5", True),
        ("x=y=5", "5", True),
        ("x=2+3=5", "x=5", True),
        ("x=2+2=5", "x=5", False),
        ("\\log_2 8", "3", None),
        ("\\log_{10} 100", "2", None),
        ("3!+2", "8", False),
        ("\\frac{1}{4}+\\frac{1}{4}", "\\frac{1}{2}", True),
        ("x+1", "1+x", None),
        ("१२", "12", None),
        ("A", "a", False),
        ("\\text{A}", "a", True),
        ("Evelyn", "evelyn", True),
        ("144,216,300", "144216300", True),
        ("144,216, 300", "144,216, 300", True),
        ("144,216, 30", "30, 144216", True),
        ("ab", "AB", None),
        ("ab", "ba", None),
        ("abc", "cba", None),
        ("stop", "pots", False),
        ("on", "no", False),
        ("1, 600", "1,600", False),
        ("x=3", "3=x", True),
        ("2x=8", "x=8", False),
        ("2, 1", "x=1, y=2", False),
        ("1, 2", "x=1, y=2", True),
        ("y=2, x=1", "(1, 2)", True),
        ("y=1, x=2", "(1, 2)", False),
        ("(x,y)=(1,2)", "(1, 2)", True),
        ("(x,y,z)=(1,2)", "(1, 2)", False),
        ("\\{1, \\{2\\}\\}", "\\{\\{2\\}, 1\\}", True),
        ("\\{1, 2\\}", "\\{1, \\{2\\}\\}", False),
        ("3>x>1", "(1,3)", True),
        ("3>x>1", "(3,1)", False),
        ("x\\ge1 \\text{ and } x\\le3", "[1,3]", True),
        ("y\\ge1 \\text{ and } y\\le3", "1\\le x\\le3", False),
        ("\\text{two words}", "two other words", False),
        ("1, \\sqrt{2}", "\\sqrt2, 1", None),
        ("1, x+1", "1+x, 1", None),
        ("2, x+1", "1+x, 1", False),
        ("2, 3", "1+x, 1", False),
        ("(1, x+1)", "(1, 1+x)", None),
        ("(2, x+1)", "(1, 1+x)", False),
        ("1,2,2", "2,1", False),
        ("2,1,2", "1,2,2", True),
        ("\\{1,2,2\\}", "2,1", True),
        ("\\begin{pmatrix}1&2\\end{pmatrix}", "\\begin{bmatrix}1.0&2\\end{bmatrix}", True),
        ("\\begin{pmatrix}1&2\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", False),
        ("\\begin{pmatrix}1&x\\end{pmatrix}", "\\begin{pmatrix}2&x+0\\end{pmatrix}", False),
        ("[1,2,3]", "(1,2,3)", True),
        ("[1,2]", "(1,2)", False),
        ("(1,2)", "1,2", True),
        ("(2,1)", "1,2", False),
        ("1,2", "[1,2]", False),
        ("\\{1,2,3\\}", "(1,2,3)", False),
        ("(40,000)", "40,000", True),
        ("[40,000]", "40,000", False),
        ("(40,000]", "40000", False),
        (r"\{40,000\}", "40000", False),
        ("[40,000]", "[40, 0]", True),
        ("1,200, 3,400", "3400, 1200", True),
        ("\\langle 1,2\\rangle", "(1,2)", True),
        ("\\{5\\}", "5", True),
        ("((5))", "5", True),
        ("x=2, y=3", "2, 3", True),
        ("MR=SRMC", "MR=SRMC", True),
        ("SRMC=MR", "MR=SRMC", True),
        ("MR=SMRC", "MR=SRMC", False),
        ("\\infty=-10", "-10", False),
        ("x\\le -3=99.9", "99.9", False),
        ("x<7=5", "5", False),
        ("\\lim_{x\\to\\infty} \\frac{1}{x}=0", "0", True),
        ("((1,2),3)", "((1,2),3)", True),
        ("((1,2),4)", "((1,2),3)", False),
        ("", "", False),
        ("", "12", False),
        ("$$", "$$", False),
    ],
)
def test_pairs_that_need_no_algebra_are_decided(
    answer: str, reference: str, verdict: bool | None
) -> None:
    assert equal(answer, reference) is verdict


def test_algebra_compares_single_expressions_in_normalized_spelling() -> None:
    requested: list[tuple[str, str]] = []

    def algebra(answer: str, gold: str) -> bool:
        requested.append((answer, gold))
        return True

    assert equal("$(1,200x,\\ 2\\sqrt3\\text{ cm})$", "\\left(1200y, z\\right)", algebra)
    assert requested == [("1200x", "1200y"), ("2\\sqrt3", "z")]


def test_a_wrong_item_of_a_tuple_ends_the_comparison() -> None:
    def algebra(answer: str, gold: str) -> bool:
        raise AssertionError("nothing is left to ask")

    assert equal("(1, x)", "(2, x+0)", algebra) is False


def test_an_answer_of_nested_groups_is_compared_by_spelling_only() -> None:
    deep = "{" * NESTING_MAX + "x+1" + "}" * NESTING_MAX
    assert equal(deep, "1+x") is None
    assert equal("{" + deep + "+}", "1+x") is False
    assert equal("{" + deep + "+}", "{" + deep + "+}") is True


def test_a_relation_of_many_sides_is_compared_by_spelling_only() -> None:
    chain, longer = ("=".join("abcdfghjk"[:count]) for count in (SIDES_MAX, SIDES_MAX + 1))
    assert equal(chain[::-1], chain) is True
    assert equal(longer, longer) is True
    assert equal(longer[::-1], longer) is False


def test_the_parts_of_a_long_union_are_not_paired() -> None:
    parts = [f"a_{{{index}}}" for index in range(ITEMS_MAX + 1)]
    assert equal("\\cup ".join(reversed(parts[1:])), "\\cup ".join(parts[1:])) is True
    assert equal("\\cup ".join(reversed(parts)), "\\cup ".join(parts)) is None


def test_a_longer_answer_is_compared_by_spelling_only() -> None:
    long = "1" * (CHARS_MAX + 1)
    assert equal(long, long) is True
    assert equal(long, "+" + long) is False
    assert equal(long[1:], "+" + long[2:]) is None
    assert equal(" " * (CHARS_MAX + 1), " " * (CHARS_MAX + 1)) is False


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("$\\left(\\dfrac12,\\ 1{,}200\\right)$.", "(\\frac{1}{2}, 1200)"),
        ("\\[ 5 \\].", "5"),
        ("5\\,\\mathrm{~km}", "5\\text{km}"),
        ("1{,}5", "1{,}5"),
        ("1\\ 2", "1 2"),
        ("a \\\\ b", "a\\\\b"),
        ("90°", "90^\\circ"),
        ("x \\geqslant 3", "x\\ge 3"),
        ("0.5...", "0.5..."),
        ("√12", "\\sqrt{12}"),
        ("2√2.5x", "2\\sqrt{2.5}x"),
        ("\\frac\\pi4", "\\frac{\\pi}{4}"),
        ("\\dfrac \\pi 4", "\\frac{\\pi}{4}"),
        ("\\frac{46}a", "\\frac{46}{a}"),
        ("\\frac1\\alpha", "\\frac{1}{\\alpha}"),
        ("\\frac ab", "\\frac{a}{b}"),
        ("\\binom52", "\\binom{5}{2}"),
        ("$12$$5$", "12 5"),
        ("\\$5\\$6", "5 6"),
        ("5\\hspace{1cm}6", "5 6"),
        ("$x$, $y$", "x, y"),
    ],
)
def test_spellings_are_normalized(text: str, written: str) -> None:
    assert tidy(text) == written


def test_collections_are_split_into_items() -> None:
    assert collection("\\{1, 2\\}") == Collection("\\{", "\\}", ("1", "2"))
    assert collection("(0, 1]") == Collection("(", "]", ("0", "1"))
    assert collection("1,200") is None
    assert collection("1,200", 2) == Collection("", "", ("1", "200"))
    assert collection("(1,200)") == Collection("(", ")", ("1", "200"))
    assert collection("(1,200)", 1) is None
    assert collection("f(1, 2)") is None
    assert collection("1\\pm x") == Collection("", "", ("1+ x", "1- x"))
    assert collection("\\{\\{1, 2\\}\\}") == Collection("\\{", "\\}", ("\\{1, 2\\}",))
    assert assignments("(x, y) = (1, 2)") == "x=1, y=2"
    assert assignments("(x, y) = (1, 2, 3)") is None
    assert assignments("f(x, y) = (1, 2)") == "f(x, y) = (1, 2)"
    assert collection("x=1, y=2").names == ("x", "y")  # type: ignore[union-attr]  # two items are a collection
    assert collection("x_1=1, x_2=2").names == ()  # type: ignore[union-attr]  # two items are a collection
    assert collection(", ".join("1" * ITEMS_MAX)) == Collection("", "", ("1",) * ITEMS_MAX)
    assert collection(", ".join("1" * (ITEMS_MAX + 1))) is None
    assert parts_of_union("(0,1)\\cup[2,3]") == ("(0,1)", "[2,3]")
    assert sides("f(x=1) = 2 \\approx 3") == ["f(x=1)", "2", "3"]
    assert without_brackets("(((((5)))))") == "(5)"
    assert without_brackets("(1)(2)") == "(1)(2)"


NASTY = [
    "1",
    "1,",
    "1,234",
    "{,}",
    "1 ",
    " ",
    "\\",
    "\\text{",
    "\\text{}",
    "{",
    "(",
    "[",
    "a",
    "a1",
    "\\frac",
    "\\frac{1}",
    "^",
    "-",
    "=",
]
NASTY += [
    "\\frac{d",
    "\\frac{dx}{d",
    "x'",
    "\\prime",
    "\\ddot{",
    "(A)",
    "<",
    "x<1 or ",
    "\\text{and}",
    "cm^2/",
    "\\{x:",
]
NASTY += [
    ".",
    "$",
    "\\infty",
    "\\left",
    "\\overline{",
    "x\\in",
    " or ",
    "_",
    "\\text {a}^2",
    "1_1",
    "é",
]


def patterns(module: ModuleType) -> list[re.Pattern[str]]:
    return [value for value in vars(module).values() if isinstance(value, re.Pattern)]


@pytest.mark.parametrize("part", NASTY)
def test_the_time_of_each_pattern_is_linear_in_the_length_of_the_text(
    part: str,
) -> None:
    modules = (
        box,
        comparison,
        equations,
        inequalities,
        measures,
        numbers,
        operators,
        scalars,
        spelling,
        structure,
        tokens,
        units,
        words,
    )
    results = list(dict.fromkeys(pattern for module in modules for pattern in patterns(module)))
    assert len(results) > 40
    count = 10_000 // len(part)
    for pattern in results:
        assert any(_takes_linear_time(pattern, part, count) for _ in range(3)), pattern.pattern


def _takes_linear_time(pattern: re.Pattern[str], part: str, count: int) -> bool:
    short_s, long_s = (_scan_s(pattern, part * n) for n in (count, 4 * count))
    return long_s < 10 * max(short_s, 0.001)


def _scan_s(pattern: re.Pattern[str], text: str) -> float:
    start_s = time.process_time()
    pattern.sub("", text)
    pattern.fullmatch(text)
    return time.process_time() - start_s


@pytest.mark.parametrize("part", NASTY)
def test_the_quick_comparison_is_bounded_for_any_answer(part: str) -> None:
    text = (part * CHARS_MAX)[:CHARS_MAX]
    start_s = time.process_time()
    for reference in ("12", "1, 2", "(1,2)", "x+1", "\\text{no}"):
        equal(text, reference)
    assert time.process_time() - start_s < 0.5  # CPU time: 20 to 100 times the usual one
