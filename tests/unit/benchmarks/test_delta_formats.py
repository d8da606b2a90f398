"""The formats that the codec is compared with give the new bits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import codec
from benchmarks.delta_formats import ROW, AstraFlowFormat, AstraFlowWorker, PulseFormat
from tests.unit.storage.weights.codec.test_deltas import trained

OLD, NEW = trained(3 * ROW + 100, 1e-5)


def formats(folder: Path) -> list[Any]:
    return [AstraFlowFormat(), AstraFlowWorker(folder), PulseFormat()]


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize(
    "new", [NEW, OLD, OLD ^ 0xFFFF, np.where(np.arange(len(OLD)) == len(OLD) - 1, NEW + 1, OLD)]
)
def test_each_format_gives_the_new_bits_of_changed_and_unchanged_elements(
    which: int, new: Any, tmp_path: Path
) -> None:
    format, bits = formats(tmp_path)[which], OLD.copy()
    format.apply(bits, format.encode(OLD, new.astype(np.uint16)))
    assert (bits == new).all()


def test_an_index_and_a_value_take_six_bytes_per_change(tmp_path: Path) -> None:
    num_changes = int((OLD != NEW).sum())
    plain, worker, pulse = (sum(map(len, format.encode(OLD, NEW))) for format in formats(tmp_path))
    assert (plain, worker) == (6 * num_changes, 6 * num_changes + 16)
    assert pulse < plain


def test_the_benchmark_reports_every_format_as_bit_exact(tmp_path: Path) -> None:
    result = codec.report({"a": (OLD, NEW), "b": (OLD, OLD)}, lambda: None, tmp_path)
    assert result["bit_exact"]
    assert list(result["bytes_per_change"]) == [
        "ours",
        "astraflow_format",
        "pulse_format",
        "ours_2_threads",
        "astraflow_worker",
    ]
    assert result["bytes_per_change"]["astraflow_format"] == 6
