import json
import signal
import subprocess
import sys

import pytest

from benchmarks.math_judge.pairs import EQUAL, UNEQUAL
from rollout.rewards import math_judge
from rollout.rewards.math_judge import REFERENCES_MAX, algebraically_equal, judge
from tests.support.patience import PATIENCE_S

STUCK_IN_C = """
from itertools import repeat
from rollout.rewards import math_judge
math_judge.judge = lambda *_: sum(repeat(1))
math_judge.main()
"""
"""A judge whose every comparison is one endless call in C, inside which Python runs no signal
handler.
"""

IDLE = """
import time
from rollout.rewards import math_judge
math_judge.judge = lambda *_: time.sleep(1.0) or True
math_judge.main()
"""
"""A judge whose comparisons take a second in which they use no CPU, as on a machine that is busy
with something else.
"""

WITHOUT_THE_LIBRARY = """
import sys
sys.modules["math_verify"] = None
from rollout.rewards import math_judge
math_judge.main()
"""

WITH_ANOTHER_PARSER = """
from latex2sympy2_extended import latex2sympy2
del latex2sympy2._Latex2Sympy.convert_postfix_list
from rollout.rewards import math_judge
math_judge.main()
"""

GREEDY = """
from rollout.rewards import math_judge
math_judge.RESIDENT_BYTES_MAX = 256 << 20
math_judge.equal = lambda answer, *_: len(b"x" * (int(answer) << 20)) > 0
math_judge.main()
"""
"""A judge whose comparisons need as many MiB as the answer says."""


def question(answer: str) -> dict[str, object]:
    return {"answer": answer, "reference": "1", "timeout_s": 60.0}


def answers_of(code: str, *questions: object) -> subprocess.CompletedProcess[str]:
    lines = "".join(json.dumps(question) + "\n" for question in questions)
    return subprocess.run(
        [sys.executable, "-c", code],
        input=lines,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.parametrize(("answer", "reference"), EQUAL)
def test_different_spellings_of_the_same_value_are_equal(answer: str, reference: str) -> None:
    assert judge(answer, reference)


@pytest.mark.parametrize(("answer", "reference"), UNEQUAL)
def test_different_values_are_not_equal(answer: str, reference: str) -> None:
    assert not judge(answer, reference)


@pytest.mark.parametrize(
    "answer",
    ["", "}{", "\\frac{1}{", "\\frac{1}{0}", "???", "$$", "\\undefined{3}", "(" * 500, "(" * 20],
)
def test_an_unreadable_answer_equals_nothing(answer: str) -> None:
    assert not judge(answer, "1")
    assert not judge(answer, "x+1")


@pytest.mark.parametrize(
    ("answer", "reference", "equal"),
    [
        ("1.41421", "\\sqrt{2}", True),
        ("1.4142", "\\sqrt{2}", False),
        ("\\sqrt{2}", "1.414214", True),
        ("1414.21", "1000\\sqrt{2}", True),
        ("1.6\\times10^{-19}x", "9.1\\times10^{-31}x", False),
        ("xy<1.6\\times10^{-19}", "xy<9.1\\times10^{-31}", False),
        ("|x|<1.6\\times10^{-19}", "|x|<9.1\\times10^{-31}", False),
        ("|x|<2", "|x|<2.0", True),
        (
            "2\\begin{pmatrix}1.6\\times10^{-19}\\\\0\\end{pmatrix}",
            "\\begin{pmatrix}9.1\\times10^{-31}\\\\0\\end{pmatrix}",
            False,
        ),
        (
            "2\\begin{pmatrix}1\\\\0\\end{pmatrix}",
            "\\begin{pmatrix}2\\\\0\\end{pmatrix}",
            True,
        ),
        ("1.6\\times10^{-19}x", "1.60\\times10^{-19}x", True),
        ("3\\times10^{5}x", "300000x", True),
        ("x", "x+10^{-9}", False),
        ("2x-x", "x", True),
        ("x", "2x-y", False),
        ("2y=4x+6", "y=2x+3", True),
        ("2y=4x+7", "y=2x+3", False),
        ("\\frac{2}{3} E_{1}+\\frac{2}{3} E_{2}", "\\frac{1}{3} E_{1}+\\frac{2}{3} E_{2}", False),
    ],
)
def test_values_are_compared_relative_to_their_size(
    answer: str, reference: str, equal: bool
) -> None:
    assert algebraically_equal(answer, reference) is equal


def test_a_reference_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    parse = math_judge._parsed
    monkeypatch.setattr(math_judge, "_parsed", lambda text: parsed.append(text) or parse(text))
    math_judge._parsed_reference.cache_clear()
    for answer in ("z+1", "1+z", "z+2"):
        judge(answer, "1+z+0")
    assert parsed.count("1+z+0") == 1
    assert math_judge._parsed_reference.cache_info().maxsize == REFERENCES_MAX


def test_a_comparison_over_its_cpu_limit_is_killed_by_the_kernel_even_inside_c() -> None:
    child = answers_of(STUCK_IN_C, {"answer": "1", "reference": "1", "timeout_s": 0.1})
    assert child.returncode == -signal.SIGPROF
    assert child.stdout == '{"ready": true}\n'


def test_time_without_cpu_does_not_count() -> None:
    child = answers_of(IDLE, {"answer": "1", "reference": "1", "timeout_s": 0.3})
    assert child.returncode == 0
    assert child.stdout == '{"ready": true}\n{"equal": true}\n'


def test_each_comparison_has_the_full_time_limit() -> None:
    code = "from rollout.rewards import math_judge\nmath_judge.judge = lambda *_: sum(range(6_000_000)) > 0\nmath_judge.main()"
    child = answers_of(
        code, *[{"answer": "1", "reference": "1", "timeout_s": 1.0}] * 20
    )  # about 2 s of CPU in total
    assert child.stdout.count('{"equal": true}') == 20


@pytest.mark.parametrize(
    ("answers", "replies"),
    [
        (["1", "2"], [{"equal": True}, {"equal": True}]),
        (["300", "1"], [{"equal": True, "last": True}]),
        (["1", "300", "1"], [{"equal": True}]),
        (["5000", "1"], [{"equal": False, "last": True}]),
        (["1", "5000", "1"], [{"equal": True}]),
    ],
)
def test_only_a_new_child_answers_a_question_that_fills_its_memory(
    answers: list[str], replies: list[dict[str, bool]]
) -> None:
    child = answers_of(GREEDY, *map(question, answers))
    assert child.returncode == 0
    assert [json.loads(line) for line in child.stdout.splitlines()] == [{"ready": True}, *replies]


def test_without_math_verify_the_child_reports_it_and_exits() -> None:
    child = answers_of(WITHOUT_THE_LIBRARY)
    assert child.returncode == 0
    assert "math_verify" in json.loads(child.stdout)["failed"]


def test_another_parser_than_expected_is_a_failure_and_no_wrong_answers() -> None:
    child = answers_of(WITH_ANOTHER_PARSER)
    assert child.returncode == 0
    assert "convert_postfix_list" in json.loads(child.stdout)["failed"]


def test_each_pair_of_the_table_is_written_once() -> None:
    assert len(set(EQUAL)) == len(EQUAL) >= 60
    assert len(set(UNEQUAL)) == len(UNEQUAL) >= 60
    assert not set(EQUAL) & set(UNEQUAL)


@pytest.mark.parametrize(
    ("answer", "reference"),
    [("e^{-1000}", "e^{-1001}"), ("\\sqrt2\\cdot 10^{-400}", "\\sqrt3\\cdot 10^{-400}")],
)
def test_numbers_below_the_range_of_float64_are_different(answer: str, reference: str) -> None:
    assert not judge(answer, reference)
    assert judge(answer, answer.replace("000", "000+0").replace("\\cdot", "\\times"))


@pytest.mark.parametrize(
    ("answer", "reference"),
    [("\\max(a+bi,1)", "\\max(1,a+bi)"), ("\\lfloor ix\\rfloor", "\\lfloor xi\\rfloor")],
)
def test_equal_expressions_without_a_value_are_equal(answer: str, reference: str) -> None:
    assert algebraically_equal(answer, reference)
