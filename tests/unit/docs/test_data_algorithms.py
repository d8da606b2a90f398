"""`docs/extending/data_algorithms.md`: its example runs as written."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from data_ops.algorithms import CURATORS, FILTERS, SAMPLERS
from data_ops.config import TASK_RUNNERS, DataConfig
from storage.store.object_store import ObjectStore
from storage.verify.verify import verify
from tasks.recipes.run_terms import run_terms
from tests.support.checkout import ROOT
from tests.support.runs.dataflow_world import world

PAGE = (ROOT / "docs" / "extending" / "data_algorithms.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The example's recipe, with its module on the import path."""
    (tmp_path / "my_algorithms.py").write_text(blocks("python")[0], encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    config: dict[str, Any] = yaml.safe_load(blocks("yaml")[-1])["data"]
    return config


def test_the_example_runs_unchanged(memory_store: ObjectStore, example: dict[str, Any]) -> None:
    simulation = world(memory_store, **example)
    dataflow = simulation.dataflow()
    for turn in range(400):
        dataflow.round()
        if dataflow.done:
            break
        simulation.play(simulation.open_orders()[:2])
        simulation.train("solver")
        simulation.train("verifier")
        if turn % 3 == 0:
            dataflow = simulation.dataflow()  # a restart affects none of the three
    assert verify(simulation.run, run_terms(simulation.run)).violations == ()
    first, *later = simulation.batches("solver")
    assert not any(row.replay for row in first.rows)
    for before, batch in zip([first, *later], later, strict=False):
        assert [row.replay for row in batch.rows] == [True] + [False] * 5  # int(6 · 0.25) = 1 of 6
        newest = next(row for row in before.rows if not row.replay)
        assert batch.rows[0].key == newest.key
        for array in ("tokens", "loss_mask", "logprobs", "versions", "advantages"):
            np.testing.assert_array_equal(getattr(batch.rows[0], array), getattr(newest, array))
    seen = [row.key for batch in [first, *later] for row in batch.rows if not row.replay]
    assert len(seen) == len(set(seen))
    assert simulation.batches("solver")[-1].metrics["dataflow/replayed"] == 1.0


def test_a_filter_of_the_example_has_its_name_in_the_ledger(
    memory_store: ObjectStore, example: dict[str, Any]
) -> None:
    choosy = {
        **example,
        "filter": [{"name": "my_algorithms:LongEnough", "args": {"mean_tokens": 4}}],
        "sample": ["fifo"],
    }
    simulation = world(memory_store, **choosy)
    dataflow = simulation.dataflow()
    dataflow.round()
    simulation.play(simulation.open_orders()[:1])
    dataflow.round()
    assert dataflow.progress().closed_below == 1
    assert dataflow.progress().waiting["solver"] == 0
    (solver, _) = dataflow._assemblies
    reasons = [entry.reason for entry in solver.ledger.entries]
    assert (
        reasons == ["my_algorithms:LongEnough"] * 4
    )  # two groups of two answers of three tokens each


def test_the_page_names_every_built_in_and_the_defaults() -> None:
    for name in {*CURATORS, *FILTERS, *SAMPLERS, *TASK_RUNNERS} - {"custom"}:
        assert f"`{name}`" in PAGE
    assert set(yaml.safe_load(blocks("yaml")[0])["data"]) == {"curate", "filter", "sample"}
    settings = {"prompts": {"builtin": "chained_addition"}}
    shown = yaml.safe_load(blocks("yaml")[1])["data"]
    assert DataConfig.model_validate({**settings, **shown}) == DataConfig.model_validate(settings)
