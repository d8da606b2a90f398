"""Reference answers of real problem sets, judged as answers. Those in DATA are beside the
repository, if present; OWN are always available.
"""

import json
from collections import Counter
from itertools import pairwise

import pytest

from benchmarks.math_judge.labels import Labelled, labelled
from rollout.rewards.box import last_box
from rollout.rewards.math_answers.comparison import equal
from rollout.rewards.math_judge import judge
from tests.support.checkout import DATA

OWN = [
    "12",
    "0",
    "7",
    "1,200",
    "1080",
    "27.0",
    "-3",
    "0.25",
    "-0.875",
    "4.5e33",
    "1.6e-19",
    "24.310",
    "41585",
    "3600",
    "1e-5",
    "100",
]
LATEX = [
    "\\frac{3}{4}",
    "2\\sqrt{3}",
    "\\frac{x+1}{2}",
    "x^2-4x+7",
    "\\frac{\\pi}{6}",
    "(1, 2)",
    "[0, 5)",
    "\\{1, 2\\}",
    "y=2x+1",
]

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no problem sets in {DATA}")


def rows(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def wrongly_judged(golds: list[str]) -> tuple[list[tuple[Labelled, bool | None]], int]:
    """The labelled answers that the quick comparison decides against their label, and the number of
    all.
    """
    pairs = [pair for gold in golds for pair in labelled(gold)]
    verdicts = [equal(pair.answer, pair.gold) for pair in pairs]
    return [
        (pair, found)
        for pair, found in zip(pairs, verdicts, strict=True)
        if found is (not pair.right)
    ], len(pairs)


def test_rewritten_numbers_are_right_and_changed_ones_wrong() -> None:
    wrong, count = wrongly_judged(OWN)
    assert wrong == []
    assert count > 500


@pytest.mark.slow
def test_rewritten_expressions_are_right_and_changed_ones_wrong() -> None:
    pairs = [pair for gold in LATEX for pair in labelled(gold)]
    assert [pair for pair in pairs if judge(pair.answer, pair.gold) != pair.right] == []
    assert len(pairs) > 100


def test_each_change_does_what_its_label_names() -> None:
    made = {(pair.change, pair.answer, pair.right) for pair in labelled("1200")}
    assert {
        ("thousands", "1{,}200", True),
        ("scientific", "1.2\\times10^{3}", True),
        ("unit", "1200 apples", True),
        ("off by one", "1201", False),
        ("left to compute", "1197+3", False),
        ("list", "1, 200", False),
        ("base", "1200_{12}", False),
        ("false equation", "2400=1200", False),
    } <= made
    labels = Counter(pair.right for pair in labelled("1200"))
    assert min(labels[True], labels[False]) >= 15


@needs_data
@pytest.mark.parametrize(
    ("name", "column", "count"),
    [
        ("math_eval/aime24/test.jsonl", "answer", 30),
        ("math_eval/amc23/test.jsonl", "answer", 40),
        ("math_eval/svamp/test.jsonl", "Answer", 1000),
        ("gsm8k/test.jsonl", "answer", 1319),
    ],
)
def test_reference_answers_of_real_problem_sets_are_judged_as_labelled(
    name: str, column: str, count: int
) -> None:
    golds = [str(row[column]).rpartition("####")[2].strip() for row in rows(name)]
    assert len(golds) == count
    wrong, _ = wrongly_judged(sorted(set(golds))[::4])
    assert wrong == []


@needs_data
def test_scientific_reference_answers_are_decided_by_the_quick_comparison() -> None:
    golds = sorted(
        {last_box(str(row["solution"])) or "" for row in rows("math_eval/minerva_math/test.jsonl")}
    )
    scientific = [gold for gold in golds if "e" in gold and gold[0].isdigit() and "\\" not in gold]
    assert len(scientific) > 50
    wrong, _ = wrongly_judged(scientific)
    assert wrong == []


@needs_data
@pytest.mark.slow
def test_references_in_latex_equal_themselves_and_no_similar_ones() -> None:
    references = [
        last_box(str(row["solution"])) or "" for row in rows("math_eval/minerva_math/test.jsonl")
    ][::4]
    assert len(references) == 68
    assert [reference for reference in references if not judge(reference, reference)] == []
    neighbours = [
        (a, b) for a, b in pairwise(references) if "".join(a.split()) != "".join(b.split())
    ]
    assert [pair for pair in neighbours if judge(*pair)] == []
