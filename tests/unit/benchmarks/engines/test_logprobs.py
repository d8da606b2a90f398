import json

import pytest
import torch

from benchmarks.engines import logprobs

SMALL = ["logprobs", "--tokens", "64", "--hidden", "8", "--vocabulary", "20000"]


def test_every_way_computes_the_same_logprobs_and_a_peak(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for way in logprobs.WAYS:
        monkeypatch.setattr("sys.argv", [*SMALL, "--way", way])
        logprobs.main()
        found[way] = json.loads(capsys.readouterr().out)
        assert found[way]["seconds"] > 0
        assert found[way]["peak_bytes"] >= 0  # of this process, which was larger before
    assert found.keys() == {"naive", "checkpointed", "ours"}
    for way in found.values():
        assert way["logprobs"] == pytest.approx(found["naive"]["logprobs"], abs=1e-5)
        assert len(way["logprobs"]) == 64


def test_the_table_has_each_way_relative_to_the_naive_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    naive = {
        "peak_bytes": 3e9, "peak_share": 1.0, "seconds": 2.0, "cpu_s": 4.0, "cpu_share": 1.0,
        "error": 0.0,
    }  # fmt: skip
    ours = {
        "peak_bytes": 6e8, "peak_share": 0.2, "seconds": 2.5, "cpu_s": 5.0, "cpu_share": 1.25,
        "error": 1e-6,
    }  # fmt: skip
    results = {
        "tokens": 2048, "hidden": 512, "vocabulary": 151_936, "device": "cpu", "threads": 2,
        "torch": "2.13", "logits_bytes": 1.2e9, "head_gradient_bytes": 3e8,
        "ways": {"naive": naive, "ours": ours},
    }  # fmt: skip
    logprobs.show(results)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split() == ["ours", "600", "0.20", "2.50", "5.00", "1.25", "1.0e-06"]
    assert lines[-2].split()[:3] == ["naive", "3000", "1.00"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--device", "cuda"], "use a machine with a GPU"), (["--tokens", "0"], "start at 1")],
)
def test_impossible_arguments_are_refused_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["logprobs", *arguments])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit) as ended:
        logprobs.main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
