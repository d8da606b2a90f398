import time
from collections.abc import Callable

import pytest

from rollout.rewards.box import TEXT_CHARS_MAX, last_box


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("so \\boxed{12}.", "12"),
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{3} and \\boxed{4", "3"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("\\boxed{x \\boxed{5} y", "5"),
        ("}} \\boxed{6} }}", "6"),
        ("{{ \\boxed{7}", "7"),
        ("\\boxed{\\left\\{ 8 \\right.}", "\\left\\{ 8 \\right."),
        ("\\boxed{a \\\\{b}}", "a \\\\{b}"),
        ("\\boxed {9}", "9"),
        ("\\fbox{10}", "10"),
        ("\\\\boxed{11}", "11"),
        ("x \\\\\\boxed{12}", "12"),
        ("\\boxed 5", "5"),
        ("\\boxed 57", "5"),
        ("\\boxed\n x", "x"),
        ("\\boxed\\pi r", "\\pi"),
        ("\\boxed\\{1\\}", "\\{"),
        ("\\boxed-5", "-"),
        ("\\boxed{\\boxed 5}", "5"),
        ("\\boxed{3}, and not \\boxed 4", "4"),
        ("\\boxed 4, and not \\boxed{3}", "3"),
        ("\\boxed \\boxed{5}", "5"),
        ("\\boxed{3} as \\boxed", "3"),
        ("\\boxed{3} as `\\boxed`, in \\boxed notation, \\boxedanswer and \\boxed.", "3"),
        ("\\boxed{3} in \\boxed}", "3"),
        ("\\boxed{}", None),
        ("12", None),
        ("\\boxed{12", None),
        ("", None),
    ],
)
def test_the_last_box_with_balanced_braces_is_the_answer(text: str, found: str | None) -> None:
    assert last_box(text) == found


def test_only_the_end_of_a_very_long_text_is_searched() -> None:
    assert last_box("\\boxed{1}" + "x" * (TEXT_CHARS_MAX - 9)) == "1"
    assert last_box("\\boxed{1}" + "x" * TEXT_CHARS_MAX) is None


def cpu_s(work: Callable[[], object]) -> float:
    """The minimum CPU time of five runs."""
    times = []
    for _ in range(5):
        start_s = time.process_time()
        work()
        times.append(time.process_time() - start_s)
    return min(times)


@pytest.mark.parametrize(
    "part",
    [
        "\\boxed{",
        "\\boxed{{",
        "{",
        "}",
        "\\boxed{}",
        "\\",
        "\\{",
        "\\boxed{x} ",
        "\\boxed ",
        "\\boxed x",
        "a ",
    ],
)
def test_the_search_time_is_linear_in_the_length_of_the_text(part: str) -> None:
    count = 25_000 // len(part)
    short, long = (cpu_s(lambda text=part * n: last_box(text)) for n in (count, 4 * count))  # type: ignore[misc]  # bound early
    assert long < 10 * max(short, 0.001)


def test_an_empty_box_is_not_an_answer() -> None:
    assert last_box("it is \\boxed{5}, in \\boxed{} or \\boxed{ } as you asked") == "5"
