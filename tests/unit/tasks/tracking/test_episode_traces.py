"""What the traces of an evaluation's episodes say, and the limits of text and numbers in them."""

import json
import math
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from storage.records.rollouts import Episode, FailureKind, Group, Prompt, Sequence
from storage.run.evaluation_samples import EvaluationSample
from tasks.tracking import episode_traces as module
from tasks.tracking.episode_traces import EpisodeTrace, episode_traces
from tests.support.runs import builders
from tests.support.runs.evaluations import evaluation

VERSIONS = {"solver": 3, "verifier": 5}


def text(policy: str, tokens: list[int]) -> str:
    return f"{policy}:" + ",".join(map(str, tokens))


def traces(*groups: Group, **changes: Any) -> list[EpisodeTrace]:
    played = replace(evaluation(VERSIONS), created_s=100.0, seconds=40.0, **changes)
    sample = EvaluationSample(versions=VERSIONS, groups=groups)
    return list(episode_traces("tiny-1", played, sample, text))


def trace_of(episode: Episode, **changes: Any) -> EpisodeTrace:
    (trace,) = traces(builders.group(episode), **changes)
    return trace


def with_observation() -> Sequence:
    """A prompt, two answers with three tokens of a tool between them, and one token at the end."""
    owners = [-1, -1, 0, 0, -1, -1, -1, 0, -1]
    sampled = np.array(owners) >= 0
    return replace(
        builders.sequence(),
        tokens=np.arange(10, 19, dtype=np.int32),
        loss_mask=sampled,
        logprobs=np.where(sampled, [0, 0, -1, -2, 0, 0, 0, -4, 0], 0).astype(np.float32),
        owners=np.array(owners, np.int8),
        versions=np.where(sampled, 3, -1).astype(np.int32),
        finish_reason="length",
    )


def test_a_trace_has_the_prompt_the_answer_and_what_was_measured() -> None:
    attempt = builders.sequence(version=3)
    verdict = builders.sequence(
        (1,), (9, 8), policy="verifier", version=5, name="verdict", starts_episode=False
    )
    trace = trace_of(builders.episode(attempt, verdict, reward=0.75, first_attempt=0.0, final=1.0))
    assert trace.identity == "solver-3_verifier-5/0/0"
    assert trace.error == ""
    assert trace.tags == {
        "astraflow.run_id": "tiny-1",
        "astraflow.dataset": "held_out",
        "astraflow.workflow": "actor_and_verify",
        "astraflow.version": "5",
        "astraflow.reward": "0.75",
        "astraflow.result": "right",
        "astraflow.prompt_id": "chained_addition/train/17",
    }
    root = trace.root
    assert (root.kind, root.name) == ("AGENT", "actor_and_verify")
    assert (root.inputs, root.outputs) == ({"question": "7+8-3=?", "answer": "12"}, "verifier:9,8")
    assert (root.start_s, root.end_s) == (60.0, 60.25)
    assert root.attributes == {
        "dataset": "held_out",
        "workflow": "actor_and_verify",
        "prompt_id": "chained_addition/train/17",
        "reward": 0.75,
        "success": True,
        "failure_kind": None,
        "metrics": {"first_attempt": 0.0, "final": 1.0},
        "evaluated_versions": VERSIONS,
        "policies": ["solver", "verifier"],
        "spans_left_out": 0,
    }
    assert root.usage == (3, 5)


def test_each_turn_is_a_span_with_its_tokens_and_versions() -> None:
    first, tool, second, rest = trace_of(builders.episode(with_observation())).spans
    assert (first.kind, first.name, first.inputs, first.outputs) == (
        "LLM",
        "attempt",
        {"context": "solver:10,11"},
        "solver:12,13",
    )
    assert first.attributes == {
        "policy": "solver",
        "version_min": 3,
        "version_max": 3,
        "tokens": 2,
        "logprob_mean": -1.5,
        "reward": 1.0,
        "temperature": 1.0,
        "finish_reason": None,
    }
    assert first.usage == (2, 2)
    assert (tool.kind, tool.name, tool.outputs) == ("TOOL", "observation", "solver:14,15,16")
    assert (second.inputs, second.outputs) == ({"context": tool.outputs}, "solver:17")
    assert (second.attributes["logprob_mean"], second.attributes["finish_reason"]) == (
        -4.0,
        "length",
    )
    assert second.usage == (7, 1)
    assert (rest.kind, rest.outputs, rest.attributes) == ("TOOL", "solver:18", {"tokens": 1})


def test_the_time_of_a_turn_is_a_share_of_the_episodes_by_its_tokens() -> None:
    episode = replace(builders.episode(with_observation()), seconds=30.0)
    times = [(span.start_s, span.end_s) for span in trace_of(episode).spans]
    assert times == [(60.0, 80.0), (80.0, 80.0), (80.0, 90.0), (90.0, 90.0)]


def test_versions_within_a_turn_are_shown_as_a_range() -> None:
    sequence = builders.sequence()
    changed = replace(sequence, versions=np.array([-1, -1, 4, 2, 3], np.int32))
    (span,) = trace_of(builders.episode(changed)).spans
    assert (span.attributes["version_min"], span.attributes["version_max"]) == (2, 4)


def test_neighbouring_turns_of_two_policies_are_two_spans() -> None:
    changed = replace(builders.sequence(), owners=np.array([-1, -1, 0, 1, 1], np.int8))
    spans = trace_of(builders.episode(changed)).spans
    assert [(span.attributes["policy"], span.outputs) for span in spans] == [
        ("solver", "solver:40"),
        ("verifier", "verifier:41,2"),
    ]
    assert spans[1].inputs == {"context": ""}


@pytest.mark.parametrize(
    ("episode", "result", "success"),
    [
        (builders.episode(final=1.0, reward=0.0), "right", True),
        (builders.episode(final=0.0, reward=1.0), "wrong", False),
        (builders.episode(reward=0.1), "right", True),
        (builders.episode(reward=0.0), "wrong", False),
        (
            builders.episode(error="timeout after 60 s", failure_kind=FailureKind.TIMEOUT),
            "failed",
            None,
        ),
    ],
)
def test_the_result_is_that_of_the_evaluation(
    episode: Episode, result: str, success: bool | None
) -> None:
    trace = trace_of(episode)
    assert trace.tags["astraflow.result"] == result
    assert trace.root.attributes["success"] is success


def test_a_failed_episode_without_a_sequence_has_its_error_and_no_spans() -> None:
    failed = builders.episode(error="ToolError: \x1b[2J", failure_kind=FailureKind.TOOL, reward=0.0)
    trace = trace_of(failed)
    assert (trace.error, trace.root.outputs, trace.spans) == ("ToolError: \\x1b[2J", "", ())
    assert trace.root.attributes["failure_kind"] == "tool"


def test_episodes_have_different_identities() -> None:
    found = traces(builders.group(), builders.group(builders.episode()))
    assert [trace.identity.partition("/")[2] for trace in found] == ["0/0", "0/1", "1/0"]


def test_control_characters_are_escaped_and_long_texts_are_cut() -> None:
    long = "a" * 6_000 + "b" * 6_000
    fields = {"question": "\x1b[31m\u202e", "long": long, "list": [1, {"x": "\x07"}], "n": 3}
    group = Group(Prompt("p\x00" + "x" * 500, fields), (builders.episode(),))
    (trace,) = traces(group, dataset="d\x1b", workflow="w" * 500)
    inputs = trace.root.inputs
    assert inputs is not None
    assert inputs["question"] == "\\x1b[31m\\u202e"
    assert inputs["long"] == "a" * 5_000 + " … " + "b" * 5_000
    assert (inputs["list"], inputs["n"]) == ('[1, {"x": "\\u0007"}]', "3")
    assert trace.tags["astraflow.prompt_id"] == ("p\\x00" + "x" * 500)[:100]
    assert trace.tags["astraflow.dataset"] == "d\\x1b"
    assert trace.root.name == "w" * 100


def test_the_middle_of_many_tokens_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOKENS_MAX", 4)
    of_four, of_five = (
        trace_of(builders.episode(builders.sequence(answer=range(number)))).root.outputs
        for number in (4, 5)
    )
    assert of_four == "solver:0,1,2,3"
    assert of_five == "solver:0,1 … solver:3,4"


def test_spans_fields_and_metrics_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SPANS_MAX", 3)
    monkeypatch.setattr(module, "FIELDS_MAX", 2)
    episode = builders.episode(with_observation(), a=1.0, b=2.0, c=3.0)
    (trace,) = traces(Group(Prompt("p", {"x": "1", "y": "2", "z": "3"}), (episode,)))
    assert [span.kind for span in trace.spans] == ["LLM", "TOOL", "LLM"]
    assert trace.root.attributes["spans_left_out"] == 1
    assert trace.root.inputs == {"x": "1", "y": "2"}
    assert trace.root.attributes["metrics"] == {"a": 1.0, "b": 2.0}


def test_the_spans_of_all_traces_of_an_evaluation_are_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ALL_SPANS_MAX", 5)
    episode = builders.episode(with_observation())
    given = list(traces(Group(Prompt("p", {}), (episode,) * 3)))
    whole = len(given[0].spans)
    assert whole == 4
    assert [len(trace.spans) for trace in given] == [4, 1, 0]
    assert [trace.root.attributes["spans_left_out"] for trace in given] == [0, 3, 4]


def test_a_trace_of_very_many_turns_takes_few_bytes_for_each() -> None:
    num_turns = 2**15
    owners = (np.arange(num_turns) % 2 - 1).astype(np.int8)
    sequence = builders.sequence((), [7] * num_turns, version=3)
    episode = builders.episode(replace(sequence, owners=owners))
    tracemalloc.start()
    trace = trace_of(episode)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert trace.root.attributes["spans_left_out"] == num_turns - 1 - module.SPANS_MAX
    assert peak_bytes < 150 * num_turns


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_have_are_text(value: float) -> None:
    sequence = replace(
        builders.sequence(reward=value), logprobs=np.array([0, 0, value, 0, 0], np.float32)
    )
    episode = replace(builders.episode(sequence, reward=value, final=value), seconds=value)
    trace = trace_of(episode)
    for span in (trace.root, *trace.spans):
        json.dumps(span.attributes, allow_nan=False)
        assert span.start_s == span.end_s == 60.0
    assert trace.root.attributes["reward"] == str(value)
    assert trace.spans[0].attributes["logprob_mean"] == str(value)


@pytest.mark.parametrize(
    ("created_s", "seconds", "start_s"),
    [(253_402_214_400.0, 0.0, 4_102_444_800.0), (5.0, 7.0, 0.0)],
)
def test_times_out_of_range_are_moved_into_it(
    created_s: float, seconds: float, start_s: float
) -> None:
    played = replace(evaluation(VERSIONS), created_s=created_s, seconds=seconds)
    episode = replace(builders.episode(), seconds=1e300)
    sample = EvaluationSample(versions=VERSIONS, groups=(builders.group(episode),))
    (trace,) = episode_traces("tiny-1", played, sample, text)
    assert (trace.root.start_s, trace.root.end_s) == (start_s, start_s + 1e6)


def test_the_parts_of_a_sequence_are_found_once_however_many_turns_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Sequence] = []
    turns = module._turns
    monkeypatch.setattr(
        module, "_turns", lambda sequence: calls.append(sequence) or turns(sequence)
    )
    trace = trace_of(builders.episode(with_observation()))
    assert [span.kind for span in trace.spans] == ["LLM", "TOOL", "LLM", "TOOL"]
    assert len(calls) == 1
