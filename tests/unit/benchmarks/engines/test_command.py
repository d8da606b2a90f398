"""`python -m benchmarks.engines`: its arguments, its targets, its table."""

import json
from typing import Any

import pytest
import torch

from benchmarks.engines import __main__ as command

LOGPROBS = {
    "peak_bytes": 6e8, "peak_share": 0.2, "seconds": 2.5, "cpu_s": 5.0, "cpu_share": 1.25,
    "error": 1e-6,
}  # fmt: skip


def test_sizes_follow_the_shape_unless_they_are_given() -> None:
    assert command.parse([]).answer_tokens_max == 256
    assert command.parse(["--shape", "8b"]).answer_tokens_max == 2048
    assert command.parse(["--shape", "8b", "--answer-tokens-max", "64"]).answer_tokens_max == 64
    assert command.parse([]).only == ["rollout", "train", "logprobs"]


def test_the_environment_of_sglang_is_that_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAFLOW_TEST_SGLANG_PYTHON", "/there/python")
    assert command.parse([]).sglang_python == "/there/python"
    assert command.parse(["--sglang-python", "/here/python"]).sglang_python == "/here/python"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cuda"], "use a machine with a GPU"),
        (["--interval-s", "0"], "--interval-s is 0.0; it must be above 0"),
        (["--rows", "300"], "--rows 300 is more than --requests 192"),
        (["--changed", "1"], "not between 0 and 1"),
    ],
)
def test_impossible_arguments_are_refused_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit) as ended:
        command.parse(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_targets_are_those_of_the_parts_that_were_measured() -> None:
    rows = {"generate": {}, "torch": {"share_with_updates": 0.96}, "sglang, keep": {"missing": "x"}}
    met = command.targets({"rollout": {"engines": rows}})
    assert met == {"torch: at least 95% of its throughput with updates": True}
    results = {"logprobs": {"ways": {"ours": {"peak_share": 0.26}}}}
    assert list(command.targets(results).values()) == [False]


def test_the_command_prints_one_json_object_of_the_chosen_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: dict[str, Any] = {
        "tokens": 2048, "hidden": 512, "vocabulary": 151_936, "device": "cpu", "threads": 2,
        "torch": "2.13", "logits_bytes": 1.2e9, "head_gradient_bytes": 3e8,
        "ways": {"naive": LOGPROBS | {"peak_share": 1.0}, "ours": LOGPROBS},
    }  # fmt: skip
    monkeypatch.setattr(command.logprobs, "compared", lambda arguments: measured)
    monkeypatch.setattr("sys.argv", ["engines", "--only", "logprobs", "--json"])
    command.main()
    found = json.loads(capsys.readouterr().out)
    assert found["logprobs"] == measured
    assert found["parameters"] == 853_376
    assert found["targets"] == {"log-probabilities: at most a quarter of the naive memory": True}
    assert "rollout" not in found
    command.show(found)
    assert capsys.readouterr().out.splitlines()[-1].startswith("met ")
