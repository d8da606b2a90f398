import json
import signal
import subprocess
import sys

import pytest

from rollout.math_judge import equal

STUCK_IN_C = """
from itertools import repeat
from rollout import math_judge
math_judge.equal = lambda *_: sum(repeat(1))
math_judge.main()
"""
"""A judge whose every comparison is one endless call in C, inside which Python runs no signal handler."""

EQUAL = [
    ("\\frac{1}{2}", "0.5"),
    ("\\frac12", "\\frac{1}{2}"),
    ("\\dfrac{2}{4}", "\\tfrac{1}{2}"),
    ("1/2", "\\frac{1}{2}"),
    ("-\\frac{3}{4}", "\\frac{-3}{4}"),
    ("2\\sqrt{3}", "\\sqrt{12}"),
    ("\\frac{1}{\\sqrt{2}}", "\\frac{\\sqrt{2}}{2}"),
    ("x^2+2x+1", "(x+1)^2"),
    ("1+x", "x+1"),
    ("x=12", "12"),
    ("3\\times 10^{5}", "300000"),
    ("2^{10}", "1024"),
    ("\\pi/2", "\\frac{\\pi}{2}"),
    ("\\{2, 1\\}", "\\{1, 2\\}"),
    ("[0, 1)", "[0,1)"),
    ("(1, 2)", "\\left(1,2\\right)"),
    ("(-\\infty, 3]", "\\left(-\\infty,3\\right]"),
    ("50\\%", "50"),
    ("12\\text{ cm}", "12"),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
]
DIFFERENT = [
    ("\\frac{1}{2}", "0.51"),
    ("\\frac{1}{3}", "0.33"),
    ("\\frac{2}{1}", "\\frac{1}{2}"),
    ("\\frac{3}{4}", "-\\frac{3}{4}"),
    ("\\sqrt{3}", "\\sqrt{2}"),
    ("\\sqrt{4}", "-2"),
    ("x^2+1", "(x+1)^2"),
    ("x+1", "y+1"),
    ("x=12", "13"),
    ("3\\times 10^{4}", "300000"),
    ("2^{10}", "1000"),
    ("\\pi", "3.14"),
    ("\\{1, 2\\}", "\\{1, 3\\}"),
    ("\\{1\\}", "\\{1, 2\\}"),
    ("[0, 1]", "[0, 1)"),
    ("(2, 1)", "(1, 2)"),
    ("(-\\infty, 3)", "(-\\infty, 3]"),
    ("50\\%", "51"),
    ("\\begin{pmatrix} 2 \\\\ 1 \\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
    ("\\text{no solution}", "0"),
]


@pytest.mark.parametrize(("answer", "reference"), EQUAL)
def test_different_words_for_the_same_thing_are_equal(answer: str, reference: str) -> None:
    assert equal(answer, reference)


@pytest.mark.parametrize(("answer", "reference"), DIFFERENT)
def test_what_is_not_the_same_thing_is_not_equal(answer: str, reference: str) -> None:
    assert not equal(answer, reference)


@pytest.mark.parametrize("answer", ["", "}{", "\\frac{1}{", "\\frac{1}{0}", "???", "$$", "\\undefined{3}"])
def test_what_cannot_be_read_equals_nothing(answer: str) -> None:
    assert not equal(answer, "1")


def test_a_judge_that_no_python_signal_reaches_is_ended_by_the_kernel() -> None:
    question = json.dumps({"answer": "1", "reference": "1", "timeout_s": 0.1}) + "\n"
    child = subprocess.run(
        [sys.executable, "-c", STUCK_IN_C], input=question, capture_output=True, text=True, timeout=60, check=False
    )
    assert child.returncode == -signal.SIGPROF
    assert child.stdout == '{"ready": true}\n'
