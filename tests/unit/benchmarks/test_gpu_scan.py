import json

import pytest
import torch

from benchmarks import gpu_scan


@pytest.mark.parametrize("elements", [50_000, 1_700_000_000, 8_200_000_000])
def test_a_model_has_the_requested_number_of_weights(elements: int) -> None:
    result = gpu_scan.sizes(elements)
    assert sum(result.values()) == elements
    assert len(result) == 32 * 9 + 2
    assert min(result.values()) > 0
    assert 0.09 * elements < result["embedding"] < 0.2 * elements


def test_a_measurement_on_the_cpu_uses_the_same_scan_and_is_exact() -> None:
    result = gpu_scan.measure(0.002, torch.device("cpu"), lr=1e-6, repeats=2, seed=0)
    assert result["bit_exact"]
    assert 0.01 < result["changed"] < 0.1
    assert result["bytes_crossed"]["whole"] == 2_000_000
    assert result["bytes_crossed"]["scan"] == pytest.approx(
        6 * 1_000_000 * result["changed"], rel=0.05
    )
    assert all(seconds > 0 for seconds in result["seconds"].values())
    assert result["device_memory_bytes"] == {
        "masters": 4_000_000,
        "whole": 0,
        "scan": 0,
        "kept": 2_000_000,
    }


def test_without_a_gpu_the_error_has_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_scan"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit) as ended:
        gpu_scan.main()
    assert ended.value.code == 2
    assert "torch does not have cuda here: use a machine with a GPU" in capsys.readouterr().err


def test_the_whole_command_runs_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_scan, "WARM_GB", 0.0002)
    command = ["gpu_scan", "--device", "cpu", "--gb", "0.0002", "0.0004", "--repeats", "1"]
    monkeypatch.setattr("sys.argv", [*command, "--json"])
    gpu_scan.main()
    output = json.loads(capsys.readouterr().out)
    assert [each["gb"] for each in output["models"]] == [0.0002, 0.0004]
    monkeypatch.setattr("sys.argv", command)
    gpu_scan.main()
    assert "bit exact: True" in capsys.readouterr().out
