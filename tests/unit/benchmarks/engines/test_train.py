import argparse
from typing import Any

import pytest

from benchmarks.engine import make_work
from benchmarks.engines import train
from benchmarks.engines.plain_training import PlainTraining
from benchmarks.engines.shapes import SHAPES, random_weights, tensor_shapes
from trainer.engines.engine import make_engine

SHAPE = SHAPES["tiny"]
WORK = make_work(6, 512, 0.8, seed=0, prompt_tokens=(2, 4), median=6, longest=12)


def arguments(**changes: Any) -> argparse.Namespace:
    given = {
        "shape": "tiny", "device": "cpu", "threads": 1, "micro_batch_tokens": 40, "rows": 6,
        "steps": 1, "seed": 0, "peak_tflops": None, "engines": [],
    }  # fmt: skip
    return argparse.Namespace(**given | changes)


def test_a_batch_has_the_requests_as_rows() -> None:
    batch = train.make_batch(WORK, 512, seed=0)
    assert [int(row.loss_mask.sum()) for row in batch.rows] == WORK.lengths
    assert [row.tokens[~row.loss_mask].tolist() for row in batch.rows] == WORK.prompts


@pytest.mark.parametrize("name", ["torch", "torch, packed"])
def test_the_baseline_does_the_same_work_as_the_engines(name: str) -> None:
    batch, weights = train.make_batch(WORK, 512, 0), random_weights(tensor_shapes(SHAPE.config), 0)
    losses = []
    for make, row in ((PlainTraining, train.BASELINE), (make_engine, name)):
        engine: Any = make(train.settings_of(row, arguments()), SHAPE.config, 0)
        engine.set_weights(weights)
        metrics = engine.step(batch)
        assert metrics["trainer/tokens"] == sum(WORK.lengths)
        losses.append(metrics["trainer/loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert abs(losses[0]) > 1e-3


def test_a_measurement_has_the_fastest_step_after_the_first() -> None:
    class Engine:
        def __init__(self) -> None:
            self.steps: list[int] = []

        def step(self, batch: Any) -> dict[str, float]:
            self.steps.append(batch.step)
            return {"trainer/loss": float(batch.step)}

    engine = Engine()
    result = train.measured(engine, train.make_batch(WORK, 512, 0), steps=2)
    assert engine.steps == [1, 2, 3]
    assert result["loss"] == 1.0
    assert result["step_s"] > 0
    assert result["first_s"] > 0


def test_a_row_that_cannot_run_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        train, "ROWS", {"torch, 2 ranks": {"ranks": 2, "optimizer": {"name": "muon"}}}
    )
    said: list[str] = []
    row = train.compared(arguments(), WORK, said.append)["engines"]["torch, 2 ranks"]
    assert said == ["train: torch, 2 ranks"]
    assert "muon cannot be used with train.ranks" in row["missing"]


def test_a_row_on_gpus_computes_in_bf16_and_with_checkpointing() -> None:
    config = train.settings_of("deepspeed, 2 ranks, stage 3", arguments(shape="8b", device="cuda"))
    assert (config.precision, config.activation_checkpointing, config.ranks) == ("bf16", True, 2)
    assert config.deepspeed.stage == 3


def test_the_table_has_each_row_or_why_it_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "step_s": 0.5, "of_baseline": 2.0, "tokens_per_s": 1000.0, "cpu_s": 0.75, "loss": -0.01,
        "mfu": 0.421, "peak_bytes": 42e9, "estimated_bytes": 40e9,
    }  # fmt: skip
    rows = {"torch": row, "torch, 2 ranks": {"missing": "one GPU"}}
    train.show({"rows": 6, "tokens": 500, "engines": rows})
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].split() == [
        "torch", "0.500", "2.00", "1,000", "0.75", "42.1%", "42.0", "40.0", "-0.01000",
    ]  # fmt: skip
    assert lines[-1].split("missing: ") == ["torch, 2 ranks".ljust(30), "one GPU"]
