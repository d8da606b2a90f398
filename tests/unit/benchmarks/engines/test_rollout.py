import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import make_work
from benchmarks.engines import rollout
from benchmarks.engines.shapes import SHAPES, forward_flops, tensor_shapes
from benchmarks.engines.updates import versions
from rollout.engines.engine import make_engine
from storage.weights import manifests

SHAPE = SHAPES["tiny"]
WORK = make_work(6, 512, 0.8, seed=0, prompt_tokens=(2, 4), median=6, longest=12)


def arguments(**changes: Any) -> argparse.Namespace:
    given = {
        "shape": "tiny", "device": "cpu", "threads": 1, "concurrency": 3, "repeats": 1, "seed": 0,
        "seconds": 0.01, "interval_s": 0.01, "changed": 0.01, "kv_cache": ["keep", "drain"],
        "sglang_python": "", "peak_tflops": None, "engines": [],
    }  # fmt: skip
    return argparse.Namespace(**given | changes)


def test_new_versions_reach_the_first_token_through_a_store(tmp_path: Path) -> None:
    async def measure() -> Any:
        with versions(tmp_path, tensor_shapes(SHAPE.config), 0.01, seed=0) as stream:
            first = await stream.publish()
            engine = make_engine(rollout.configurations(arguments(), 16)["torch"], SHAPE.config)
            try:
                row = await rollout.measured(engine, stream, WORK, arguments())
            finally:
                await engine.close()
            return first, row, engine.version, stream.run

    first, row, version, run = asyncio.run(measure())
    assert first.version == 0
    assert version >= 1
    assert manifests.read_manifest(run, "model", 1).kind == "delta"
    assert row["updates"] >= 1
    assert 0 < row["load_s"] < row["first_token_s"]
    assert row["tokens_per_s"] > 0
    assert row["share_with_updates"] == pytest.approx(
        row["tokens_per_s_with_updates"] / row["tokens_per_s"]
    )
    assert row["cores"].keys() == {"quiet", "updates"}


def test_the_cores_of_a_pass_are_those_of_this_process() -> None:
    clock = rollout._Clock(frozenset())
    start_s = time.process_time()
    while time.process_time() < start_s + 0.1:  # the system counts in ticks of 0.01 s
        pass
    cost = clock.cost()
    assert cost.engine_cores * cost.seconds > 0.05


def test_an_engine_has_a_slot_for_the_request_that_asks_for_the_first_token() -> None:
    rows = rollout.configurations(arguments(device="cuda", sglang_python="python"), 280)
    assert list(rows) == ["torch", "sglang, keep", "sglang, drain"]
    for config in rows.values():
        assert (config.max_concurrent, config.max_tokens, config.dtype) == (4, 280, "bfloat16")
    assert rows["sglang, drain"].sglang.kv_cache == "drain"


def test_engines_are_chosen_by_the_beginning_of_their_row() -> None:
    assert rollout.is_chosen("torch, 2 ranks", [])
    assert rollout.is_chosen("torch, 2 ranks", ["sglang", "torch"])
    assert not rollout.is_chosen("deepspeed, 2 ranks", ["torch"])


def test_an_engine_that_cannot_start_has_the_reason_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollout, "baseline", lambda work, arguments: {"tokens_per_s": 10.0})
    given = arguments(kv_cache=["keep"], sglang_python="/nowhere/python")
    rows = rollout.compared(given, WORK, 16, lambda words: None)["engines"]
    assert rows["torch"]["of_baseline"] == rows["torch"]["tokens_per_s"] / 10
    assert "/nowhere/python" in rows["sglang, keep"]["missing"]
    without = rollout.compared(
        arguments(kv_cache=["keep"], engines=["sglang"]), WORK, 16, lambda words: None
    )
    assert list(without["engines"]) == ["generate", "sglang, keep"]
    assert "--sglang-python" in without["engines"]["sglang, keep"]["missing"]


def test_mfu_counts_the_arithmetic_of_all_tokens() -> None:
    rows: Any = {"generate": {"tokens_per_s": 50.0}, "torch": {"tokens_per_s": 100.0}}
    rollout._add_ratios(rows, WORK, arguments(peak_tflops=1e-6))
    lengths = [len(prompt) + n for prompt, n in zip(WORK.prompts, WORK.lengths, strict=True)]
    flops = forward_flops(SHAPE.config, lengths, sum(WORK.lengths))
    assert rows["torch"]["of_baseline"] == 2.0
    assert rows["torch"]["mfu"] == pytest.approx(flops / sum(WORK.lengths) * 100.0 / 1e6)


def test_the_table_says_why_the_target_was_missed(capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "tokens_per_s": 1000.0, "of_baseline": 2.0, "tokens_per_s_with_updates": 900.0,
        "share_with_updates": 0.9, "updates": 3, "load_s": 0.25, "first_token_s": None,
        "cores": {"quiet": {"engine": 1.0, "all": 1.5}, "updates": {"engine": 1.2, "all": 2.0}},
    }  # fmt: skip
    rows = {
        "generate": {"tokens_per_s": 500.0, "of_baseline": 1.0},
        "torch": row,
        "sglang, keep": {"missing": "no environment"},
    }
    rollout.show({"requests": 6, "tokens": 60, "engines": rows})
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].split() == ["generate", "500", "1.00", "–"]
    assert lines[4].split() == ["torch", "1,000", "2.00", "–", "900", "90.0%", "3", "0.250", "–"]
    assert lines[5].endswith("missing: no environment")
    assert "torch: below the target of 95%" in lines[-1]
    assert "by all programs 1.50; with updates 1.20 and 2.00" in lines[-1]
