"""Real problem sets judged against their own reference answers. They lie beside the repository, where they are there at all."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from rollout.math_judge import equal
from rollout.rewards import MathReward, Score, last_box
from storage.records import Json, Prompt

DATA = Path(__file__).parents[3] / "shared" / "data" / "math_eval"

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"no problem sets in {DATA}")


@pytest.fixture
def reward() -> Iterator[MathReward]:
    made = MathReward(timeout_s=20.0)
    yield made
    made.close()


def rows(name: str) -> list[Json]:
    return [json.loads(line) for line in (DATA / name / "test.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("name", "column", "count"), [("aime24", "answer", 30), ("amc23", "answer", 40), ("svamp", "Answer", 1000)]
)
async def test_numbers_written_in_other_ways_are_right_and_the_next_number_is_wrong(
    reward: MathReward, name: str, column: str, count: int
) -> None:
    references = [row[column] for row in rows(name)]
    assert len(references) == count
    for reference in references:
        prompt = Prompt(name, {"question": "?", "answer": reference})
        value = float(reference)
        for written in (f"{value:,.2f}", f"{value:f}", f"${value:.3f}$"):
            assert await reward.score(f"\\boxed{{{written}}}", prompt) == Score(1.0)
        assert await reward.score(f"\\boxed{{{value + 1:.2f}}}", prompt) == Score(0.0)
    assert reward._judges._idle == []


@pytest.mark.slow
def test_references_in_latex_equal_themselves_and_not_their_neighbours() -> None:
    references = [last_box(row["solution"]) or "" for row in rows("minerva_math")][::4]
    assert len(references) == 68
    assert [reference for reference in references if not equal(reference, reference)] == []
    neighbours = [(a, b) for a, b in pairwise(references) if "".join(a.split()) != "".join(b.split())]
    assert [pair for pair in neighbours if equal(*pair)] == []
