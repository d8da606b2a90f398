"""Episodes of an evaluation as traces: what each trace and its spans say.

    evaluation + sample ──▶ EpisodeTrace ⊃ EpisodeSpan (one for each turn)
                              └── a turn: consecutive tokens that one policy sampled

Text of episodes is untrusted: it is cut, and its control characters are escaped. Every value is
JSON, every number finite. Times are derived from stored ones, so that an episode gives the same
trace whenever it is read. This module does not use MLflow (`mlflow_traces.py`).
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, Literal

import numpy as np

from storage.records.rollouts import NOT_SAMPLED, Episode, Prompt, Sequence
from storage.run.evaluation_samples import EvaluationSample
from storage.run.evaluations import Evaluation
from tasks.terminal_text import visible

TEXT_MAX = 10_000
"""Characters of one text; of a longer one, the middle is left out."""
TOKENS_MAX = 4_000
"""Tokens of one text that are decoded: the first and the last ones."""
NAME_MAX = 100
"""Characters of a name or of a tag's value."""
FIELDS_MAX = 20
"""Fields of a prompt that are shown, and metrics of an episode."""
SPANS_MAX = 200
"""Spans of one trace; the first ones."""
ALL_SPANS_MAX = 5_000
"""Spans of the traces of one evaluation; later traces have none."""
TIME_MAX_S = 4_102_444_800.0
"""The year 2100: MLflow's nanoseconds are 64-bit integers. A later time is shown as this one."""
SECONDS_MAX = 1e6
LEFT_OUT = " … "

Texts = Callable[[str, list[int]], str]
"""(policy, consecutive tokens) → their text."""


@dataclass(frozen=True, kw_only=True)
class EpisodeSpan:
    """A whole episode (`AGENT`), one turn (`LLM`), or text that the workflow added (`TOOL`)."""

    name: str
    kind: Literal["AGENT", "LLM", "TOOL"]
    start_s: float
    end_s: float
    inputs: Mapping[str, Any] | None
    outputs: str
    attributes: Mapping[str, Any]
    usage: tuple[int, int] = (0, 0)
    """Tokens of the context before the turn, and sampled tokens."""


@dataclass(frozen=True, kw_only=True)
class EpisodeTrace:
    """One episode."""

    identity: str
    """Of the episode within its run; the trace's id is derived from it."""
    error: str
    """Why the episode failed; empty for a success."""
    tags: Mapping[str, str]
    """What MLflow's filters find the trace by."""
    root: EpisodeSpan
    """The episode: the fields of its prompt, and the text that was sampled last."""
    spans: tuple[EpisodeSpan, ...]
    """Its parts, in their order."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """Consecutive tokens of a sequence that one policy sampled, or that none did. A small sample
    may have two million.
    """

    sequence: Sequence
    owner: int
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def policy(self) -> str:
        return "" if self.owner == NOT_SAMPLED else self.sequence.policies[self.owner]

    @property
    def tokens(self) -> list[int]:
        tokens: list[int] = self.sequence.tokens[self.start : self.end].tolist()
        return tokens


def episode_traces(
    run_id: str, evaluation: Evaluation, sample: EvaluationSample, texts: Texts
) -> Iterator[EpisodeTrace]:
    """Yield a trace of each episode of the sample, in its order."""
    spans_left = ALL_SPANS_MAX
    for place, group in enumerate(sample.groups):
        for number, episode in enumerate(group.episodes):
            identity = f"{place}/{number}"
            spans_max = min(SPANS_MAX, spans_left)
            trace = _trace(run_id, evaluation, group.prompt, episode, identity, spans_max, texts)
            spans_left -= len(trace.spans)
            yield trace


def _trace(
    run_id: str,
    evaluation: Evaluation,
    prompt: Prompt,
    episode: Episode,
    place: str,
    spans_max: int,
    texts: Texts,
) -> EpisodeTrace:
    start_s = min(max(evaluation.created_s - evaluation.seconds, 0.0), TIME_MAX_S)
    seconds = min(max(episode.seconds, 0.0), SECONDS_MAX) if math.isfinite(episode.seconds) else 0.0
    turns = [turn for sequence in episode.sequences for turn in _turns(sequence)]
    sampled = [turn for turn in turns if turn.policy]
    about = {
        "dataset": _name(evaluation.dataset),
        "workflow": _name(evaluation.workflow),
        "prompt_id": _name(prompt.id),
    }
    return EpisodeTrace(
        identity=f"{_vector(evaluation.versions)}/{place}",
        error=_text(episode.error or ""),
        tags={
            **{f"astraflow.{name}": value for name, value in about.items()},
            "astraflow.run_id": _name(run_id),
            "astraflow.version": str(max(evaluation.versions.values(), default=0)),
            "astraflow.reward": f"{episode.reward:g}",
            "astraflow.result": _result(episode),
        },
        root=EpisodeSpan(
            name=_name(evaluation.workflow) or "episode",
            kind="AGENT",
            start_s=start_s,
            end_s=start_s + seconds,
            inputs=_fields(prompt.fields),
            outputs=_decoded(sampled[-1], texts) if sampled else "",
            attributes={
                **about,
                **_measured(episode),
                "evaluated_versions": dict(evaluation.versions),
                "policies": sorted({turn.policy for turn in sampled}),
                "spans_left_out": max(sum(map(_is_shown, turns)) - spans_max, 0),
            },
            usage=(sum(turn.start for turn in sampled), sum(map(len, sampled))),
        ),
        spans=tuple(islice(_spans(turns, start_s, seconds, texts), spans_max)),
    )


def _measured(episode: Episode) -> dict[str, Any]:
    metrics = islice(episode.metrics.items(), FIELDS_MAX)
    return {
        "reward": _number(episode.reward),
        "success": _success(episode),
        "failure_kind": episode.failure_kind and str(episode.failure_kind),
        "metrics": {_name(name): _number(value) for name, value in metrics},
    }


def _turns(sequence: Sequence) -> Iterator[_Turn]:
    """Yield the parts of a sequence: a part ends where the tokens' owner changes."""
    owners = sequence.owners
    bounds = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
    for start, end in pairwise(bounds):
        if start < end:
            yield _Turn(sequence, int(owners[start]), start, end)


def _is_shown(turn: _Turn) -> bool:
    """Whether the part has a span: all but the prompt of a sequence have one."""
    return bool(turn.policy or turn.start)


def _context(before: _Turn | None, turn: _Turn) -> _Turn | None:
    """Return the part before a turn, if it is of the same sequence and no policy sampled it."""
    is_context = before is not None and before.sequence is turn.sequence and not before.policy
    return before if is_context else None


def _spans(
    turns: list[_Turn], start_s: float, seconds: float, texts: Texts
) -> Iterator[EpisodeSpan]:
    """Yield the spans. The time of a turn is the episode's in proportion to its sampled tokens:
    times of turns are not stored.
    """
    total = max(sum(len(turn) for turn in turns if turn.policy), 1)
    last_ends = {id(turn.sequence): turn.end for turn in turns if turn.policy}
    sampled = 0
    with_before = zip([None, *turns], turns, strict=False)
    shown = ((before, turn) for before, turn in with_before if _is_shown(turn))
    for before, turn in shown:
        begin_s = start_s + seconds * sampled / total
        if turn.policy:
            sampled += len(turn)
            yield _turn_span(
                turn,
                _context(before, turn),
                turn.end == last_ends[id(turn.sequence)],
                begin_s,
                start_s + seconds * sampled / total,
                texts,
            )
        else:
            yield EpisodeSpan(
                name="observation",
                kind="TOOL",
                start_s=begin_s,
                end_s=begin_s,
                inputs=None,
                outputs=_decoded(turn, texts),
                attributes={"tokens": len(turn)},
            )


def _turn_span(
    turn: _Turn, before: _Turn | None, is_last: bool, start_s: float, end_s: float, texts: Texts
) -> EpisodeSpan:
    sequence = turn.sequence
    versions = sequence.versions[turn.start : turn.end]
    logprobs = sequence.logprobs[turn.start : turn.end]
    return EpisodeSpan(
        name=_name(sequence.name) or "turn",
        kind="LLM",
        start_s=start_s,
        end_s=end_s,
        inputs={"context": _decoded(before, texts) if before else ""},
        outputs=_decoded(turn, texts),
        attributes={
            "policy": turn.policy,
            "version_min": int(versions.min()),
            "version_max": int(versions.max()),
            "tokens": len(turn),
            "logprob_mean": _number(float(logprobs.mean(dtype=np.float64))),
            "reward": _number(sequence.reward),
            "temperature": sequence.temperature,
            "finish_reason": sequence.finish_reason if is_last else None,
        },
        usage=(turn.start, len(turn)),
    )


def _decoded(turn: _Turn, texts: Texts) -> str:
    tokens = turn.tokens
    policy = turn.policy or next(iter(turn.sequence.policies), "")
    if len(tokens) <= TOKENS_MAX:
        return _text(texts(policy, tokens))
    half = TOKENS_MAX // 2
    return _text(texts(policy, tokens[:half]) + LEFT_OUT + texts(policy, tokens[-half:]))


def _success(episode: Episode) -> bool | None:
    """Whether the final answer was right, as in the evaluation's accuracy; None for a failure."""
    if episode.error is not None:
        return None
    return episode.metrics.get("final", float(episode.reward > 0)) > 0.5


def _result(episode: Episode) -> str:
    success = _success(episode)
    return "failed" if success is None else "right" if success else "wrong"


def _vector(versions: Mapping[str, int]) -> str:
    return "_".join(f"{policy}-{versions[policy]}" for policy in sorted(versions))


def _fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first fields of a prompt; what is neither text nor a number is shown as JSON."""
    return {
        _name(name): _text(value if isinstance(value, str) else json.dumps(value))
        for name, value in islice(fields.items(), FIELDS_MAX)
    }


def _name(text: str) -> str:
    return visible(text[:NAME_MAX])[:NAME_MAX]


def _text(text: str) -> str:
    """Return the text with control characters escaped, and without the middle of a long one."""
    half = TEXT_MAX // 2
    if len(text) > TEXT_MAX:
        text = text[:half] + LEFT_OUT + text[-half:]
    return visible(text)


def _number(value: float) -> float | str:
    """Return the number; as text if JSON cannot represent it."""
    return value if math.isfinite(value) else str(value)
