from typing import Any

import pytest

from rollout.engines.engine import EngineFailedError, Generation, SamplingParams
from rollout.engines.sglang import answers
from rollout.engines.sglang.answers import request_body
from storage.errors import ConfigError

SAMPLED = SamplingParams(max_new_tokens=4, stop_ids=(2,))
VOCAB = 8


def read_answer(
    answer: dict[str, Any], sampling: SamplingParams, limit: int, engine_id: str
) -> Generation:
    return answers.read_answer(answer, sampling, limit, engine_id, vocab=VOCAB)


def answer(**changes: Any) -> dict[str, Any]:
    info = {
        "finish_reason": {"type": "stop", "matched": 2},
        "output_token_logprobs": [[-0.5, 7, None], [-1.5, 2, None]],
        "weight_versions": [
            {"version": "abc-3", "start": 0, "end": 1},
            {"version": "abc-4", "start": 1, "end": 2},
        ],
    }
    output = changes.pop("output_ids", [7, 2])
    return {"output_ids": output, "meta_info": {**info, **changes}}


def test_an_answer_becomes_a_generation() -> None:
    generation = read_answer(answer(), SAMPLED, 4, "abc")
    assert generation.tokens.tolist() == [7, 2]
    assert generation.logprobs.tolist() == [-0.5, -1.5]
    assert [(s.version, s.start, s.end) for s in generation.spans] == [(3, 0, 1), (4, 1, 2)]
    assert generation.finish_reason == "stop"


def test_greedy_tokens_have_log_probability_zero() -> None:
    greedy = SamplingParams(temperature=0, stop_ids=(2,))
    assert read_answer(answer(), greedy, 4, "abc").logprobs.tolist() == [0.0, 0.0]


def test_restricted_sampling_uses_the_log_probabilities_over_the_kept_tokens() -> None:
    restricted = SamplingParams(top_p=0.9, stop_ids=(2,))
    generation = read_answer(
        answer(output_token_sampling_logprobs=[-0.25, -1.0]), restricted, 4, "abc"
    )
    assert generation.logprobs.tolist() == [-0.25, -1.0]


def test_an_answer_without_spans_has_one_version() -> None:
    old = answer(weight_versions=None, weight_version="abc-9")
    generation = read_answer(old, SAMPLED, 4, "abc")
    assert [(s.version, s.start, s.end) for s in generation.spans] == [(9, 0, 2)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_token_logprobs": [[-0.5, 7, None]]}, "those of other tokens"),
        ({"output_token_logprobs": [[-0.5, 8, None], [-1.5, 2, None]]}, "those of other tokens"),
        ({"output_token_logprobs": [[None, 7, None], [-1.5, 2, None]]}, "log-probabilities"),
        ({"output_token_logprobs": [[0.5, 7, None], [-1.5, 2, None]]}, "above 0"),
        ({"weight_versions": [{"version": "abc-3", "start": 0, "end": 1}]}, "do not cover 2"),
        (
            {"weight_versions": [{"version": "abc-3", "start": 1, "end": 2}]},
            "do not cover 2",
        ),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 2}]}, "never loaded it"),
        ({"weight_versions": [{"version": "abd-3", "start": 0, "end": 2}]}, "never loaded it"),
        ({"finish_reason": {"type": "surprise"}}, "'surprise'"),
        ({"finish_reason": None}, "not one"),
        ({"output_ids": []}, "other tokens"),
        ({"output_ids": [7, 2**40]}, "not one"),
        (
            {"output_ids": [8, 2], "output_token_logprobs": [[-0.5, 8, None], [-1.5, 2, None]]},
            "whole numbers from 0 to 7",
        ),
        ({"output_ids": [7, -2]}, "whole numbers"),
        ({"output_token_logprobs": [[-1e39, 7, None], [-1.5, 2, None]]}, "log-probabilities"),
        (
            {"weight_versions": [{"version": "abc-1000000000", "start": 0, "end": 2}]},
            "never loaded it",
        ),
    ],
)
def test_an_answer_that_cannot_be_true_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineFailedError, match=message):
        read_answer(answer(**changes), SAMPLED, 4, "abc")


@pytest.mark.parametrize(
    "ids", [[7.9, 2], ["7", "2"], [[7], [2]], [True, 2], [-7, 2], [8, 2], {"7": 2}]
)
def test_tokens_that_are_no_ids_are_refused_where_no_log_probability_shows_it(ids: Any) -> None:
    greedy = SamplingParams(temperature=0, stop_ids=(2,))
    with pytest.raises(EngineFailedError, match="whole numbers"):
        read_answer(answer(output_ids=ids), greedy, 4, "abc")


def test_a_refusal_quotes_no_more_than_a_line_of_the_answer() -> None:
    for changes in (
        {"finish_reason": {"type": "x" * 10_000}},
        {"weight_versions": _label("\x1b")},
        {"weight_versions": [{"version": "abc-1", "start": 0, "end": 2}] * 10_000},
    ):
        with pytest.raises(EngineFailedError) as refused:
            read_answer(answer(**changes), SAMPLED, 4, "abc")
        assert len(str(refused.value)) < 600
        assert str(refused.value).isprintable()


def _label(text: str) -> list[dict[str, Any]]:
    return [{"version": text * 10_000, "start": 0, "end": 2}]


def test_a_request_that_was_aborted_while_it_waited_has_no_tokens() -> None:
    waiting = answer(output_ids=[], finish_reason={"type": "abort"})
    del waiting["meta_info"]["output_token_logprobs"]
    generation = read_answer(waiting, SamplingParams(top_p=0.5), 4, "abc")
    assert (len(generation.tokens), generation.spans) == (0, ())
    assert generation.finish_reason == "abort"


def test_more_tokens_than_asked_for_are_refused() -> None:
    with pytest.raises(EngineFailedError, match="2 tokens, and 1 were asked for"):
        read_answer(answer(), SAMPLED, 1, "abc")


def test_a_stop_at_a_token_that_is_no_stop_id_is_refused() -> None:
    with pytest.raises(EngineFailedError, match="stopped after token 2"):
        read_answer(answer(), SamplingParams(stop_ids=(3,)), 4, "abc")


def body_of(sampling: SamplingParams, vocab: int = 1000) -> dict[str, Any]:
    return request_body("r", (1, 2), 4, sampling, vocab=vocab, prefix_key="abc-3")


def test_a_request_names_its_stop_ids_seed_and_limit() -> None:
    body = body_of(SamplingParams(temperature=0.5, stop_ids=(2, 9), seed=11))
    assert body["sampling_params"] == {
        "temperature": 0.5,
        "max_new_tokens": 4,
        "stop_token_ids": [2, 9],
        "sampling_seed": 11,
        "skip_special_tokens": False,
    }
    assert "return_sampling_mask" not in body


@pytest.mark.parametrize(
    ("sampling", "vocab", "top_p", "top_k"),
    [
        (SamplingParams(top_p=0.9), 1000, 0.9, 1000),
        (SamplingParams(top_p=0.9), 200_000, 0.9, 4096),
        (SamplingParams(top_k=5), 1000, 1.0, 5),
    ],
)
def test_restricted_sampling_asks_for_the_kept_tokens(
    sampling: SamplingParams, vocab: int, top_p: float, top_k: int
) -> None:
    body = body_of(sampling, vocab)
    assert body["return_sampling_mask"] is True
    assert (body["sampling_params"]["top_p"], body["sampling_params"]["top_k"]) == (top_p, top_k)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (SamplingParams(top_p=0.9, top_k=5), "top_p and top_k together"),
        (SamplingParams(top_k=5000), "top_k is 5000"),
    ],
)
def test_sampling_that_sglang_computes_otherwise_is_refused(
    sampling: SamplingParams, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        body_of(sampling)
