"""The output of `astraflow episodes`: tables, one episode, a prompt's groups side by side, JSON."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, islice
from typing import Any

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from storage.records.rollouts import Episode, Prompt
from tasks.episodes.index import PlayedEpisode, PlayedSequence
from tasks.episodes.prompt_plays import PromptPlay
from tasks.episodes.token_view import ViewedSequence, ViewedToken
from tasks.monitoring.training_curves import sample
from tasks.terminal_text import LINE_MAX, one_line, quoted_line, visible

PLAYS_SHOWN_MAX = 6
"""Columns of the table of a prompt; of more plays an even sample is shown."""
TOKEN_COLUMNS: Mapping[str, JustifyMethod] = {
    "token": "right", "text": "left", "owner": "left", "id": "right", "version": "right",
    "probability": "right", "in loss": "left", "advantage": "right",
}  # fmt: skip
FATES_SHOWN = 50
"""Different fates that are named of one episode."""
ANSWER_SHOWN = 60
"""Last characters that are shown of an answer."""


def episodes_table(episodes: Iterable[PlayedEpisode]) -> Table:
    """Return a row for each episode."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for header in ("episode", "prompt", "region", "reward", "failure", "sampled by, and fate"):
        table.add_column(
            header,
            justify="right" if header == "reward" else "left",
            no_wrap=header in ("episode", "reward", "failure"),
            overflow="fold",
        )
    for each in episodes:
        table.add_row(
            each.id,
            one_line(each.prompt_id),
            one_line(each.region),
            f"{each.reward:g}",
            each.failure or "–",
            fates_words(each.sequences) or "–",
        )
    return table


def fates_words(sequences: Sequence[PlayedSequence]) -> str:
    """Return who sampled, with which versions, and what became of it.

    Example: `solver v3–4 trained in batch 5; verifier v2 filtered: zero_advantage`.
    """
    words = [f"{each.policy} {_versions(each)} {fate_words(each)}" for each in sequences]
    counts = Counter(words)
    shown = [f"{word} (×{n})" if n > 1 else word for word, n in islice(counts.items(), FATES_SHOWN)]
    more = [f"and {len(counts) - FATES_SHOWN:,} more"] if len(counts) > FATES_SHOWN else []
    return "; ".join(shown + more)


def fate_words(sequence: PlayedSequence) -> str:
    """Return the fate of a sequence. Example: `trained in batch 5, replayed in batch 7`."""
    fate, reason, batch, replays = sequence.fate
    if fate == "trained":
        words = f"trained in batch {batch}"
    else:
        words = f"{fate}: {one_line(reason)}" if reason else fate
    again = ", ".join(str(step) for step in replays)
    return f"{words}, replayed in batch {again}" if again else words


def _versions(sequence: PlayedSequence) -> str:
    low, high = sequence.min_version, sequence.max_version
    return f"v{low}" if low == high else f"v{low}–{high}"


def episode_picture(
    played: PlayedEpisode,
    episode: Episode,
    prompt: Prompt,
    turns: Sequence[ViewedSequence],
    shard: str,
) -> RenderableType:
    """Return one episode with all its turns and tokens."""
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    rows = [
        ("episode", f"{played.id} (order, prompt, sample)"),
        ("prompt", one_line(played.prompt_id)),
        ("worker", one_line(f"{played.worker} in {played.region}")),
        ("reward", f"{played.reward:g}"),
        ("seconds", f"{played.seconds:.2f}"),
        ("shard", shard),
    ]
    if episode.error is not None:
        rows.append(("failure", visible(f"{played.failure}: {episode.error}")))
    rows += [(name, f"{value:g}") for name, value in episode.metrics.items()]
    rows += [(name, visible(str(value))) for name, value in prompt.fields.items()]
    for name, value in rows:
        facts.add_row(Text(one_line(name), style="dim"), Text(value, overflow="fold"))
    return Group(facts, *(part for turn in turns for part in _turn(turn)))


def _turn(turn: ViewedSequence) -> tuple[RenderableType, ...]:
    title = (
        f"{turn.place}: {visible(turn.name)}, reward {turn.reward:g}, {turn.num_tokens} tokens, "
        f"temperature {turn.temperature:g}, ended by {turn.finish_reason}; "
        f"{fates_words(turn.played) or 'nobody sampled in it'}"
    )
    heading = Text(one_line(title), style="bold", overflow="fold")
    return Text(""), heading, _tokens_table(turn.tokens)


def _tokens_table(tokens: Sequence[ViewedToken]) -> Table:
    """Return a row for each sampled token; tokens between them share a row."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for header, justify in TOKEN_COLUMNS.items():
        table.add_column(header, justify=justify, no_wrap=header != "text", overflow="fold")
    for (place, owner), run in _runs(tokens):
        if not owner:
            text = quoted_line("".join(token.text for token in run))
            last = place + len(run) - 1
            table.add_row(f"{place}–{last}" if len(run) > 1 else str(place), text, "–")
            continue
        for offset, token in enumerate(run):
            table.add_row(
                str(place + offset),
                quoted_line(token.text),
                token.owner,
                str(token.token),
                str(token.version),
                f"{_probability(token.logprob):.3g}",
                "yes" if token.is_in_loss else "no",
                "–" if token.advantage is None else f"{token.advantage:+.3f}",
            )
    return table


def _probability(logprob: float) -> float:
    return math.nan if math.isnan(logprob) else math.exp(min(logprob, 0.0))


def _runs(
    tokens: Sequence[ViewedToken],
) -> Iterable[tuple[tuple[int, str], Sequence[ViewedToken]]]:
    """Yield (index of the first token, owner) and the tokens of each run of one owner."""
    place = 0
    for owner, group in groupby(tokens, key=lambda token: token.owner):
        run = list(group)
        yield (place, owner), run
        place += len(run)


def prompt_picture(prompt: Prompt, plays: Sequence[PromptPlay]) -> RenderableType:
    """Return the groups of one prompt side by side: a column for each order that has it."""
    shown = [plays[index] for index in sample(len(plays), PLAYS_SHOWN_MAX)]
    table = Table(box=None, header_style="dim", padding=(0, 3, 0, 0))
    table.add_column("sample", justify="right")
    for play in shown:
        versions = "\n".join(
            f"{policy} v{low}" if low == high else f"{policy} v{low}–{high}"
            for policy, (low, high) in play.versions().items()
        )
        table.add_column(
            f"order {play.order}\n{versions}\nmean reward {play.mean_reward():.3g}", overflow="fold"
        )
    numbers = sorted({each.episode for play in shown for each in play.episodes})
    for number in numbers:
        table.add_row(str(number), *(_cell(play, number) for play in shown))
    fields = "\n".join(
        f"{one_line(name)}: {visible(str(value))}" for name, value in prompt.fields.items()
    )
    left_out = len(plays) - len(shown)
    note = f"\n{left_out} more orders have this prompt" if left_out else ""
    return Group(Text(f"{one_line(prompt.id)}\n{fields}{note}\n"), table)


def _cell(play: PromptPlay, number: int) -> Text:
    """Return reward, fate and the end of the answer of one sample of one play."""
    episode = next((each for each in play.episodes if each.episode == number), None)
    if episode is None:
        return Text("")
    answer = visible(play.answers.get(number, "")).replace("\n", "⏎")
    words = episode.failure or f"{episode.reward:g}"
    fates = ", ".join(dict.fromkeys(each.fate.fate for each in episode.sequences))
    return Text(f"{words}  {fates}\n{answer[-ANSWER_SHOWN:]}\n", overflow="fold")


def episodes_json(episodes: Iterable[PlayedEpisode]) -> list[dict[str, Any]]:
    """Return the output of `astraflow episodes --json` (docs/schemas.md)."""
    return [episode_json(each) for each in episodes]


def episode_json(episode: PlayedEpisode) -> dict[str, Any]:
    """Return one episode as JSON."""
    return {
        "id": episode.id,
        "prompt": episode.prompt_id[:LINE_MAX],
        "region": episode.region,
        "worker": episode.worker,
        "reward": episode.reward,
        "failure": episode.failure or None,
        "seconds": episode.seconds,
        "sequences": [_sequence_json(each) for each in episode.sequences],
    }


def turns_json(
    played: PlayedEpisode,
    episode: Episode,
    prompt: Prompt,
    turns: Sequence[ViewedSequence],
    shard: str,
) -> dict[str, Any]:
    """Return the output of `astraflow episodes --episode ID --json` (docs/schemas.md)."""
    return {
        **episode_json(played),
        "fields": prompt.fields,
        "metrics": dict(episode.metrics),
        "error": episode.error,
        "shard": shard,
        "turns": [
            {
                "sequence": turn.place,
                "name": turn.name,
                "reward": turn.reward,
                "temperature": turn.temperature,
                "finish_reason": turn.finish_reason,
                "tokens": [_token_json(token) for token in turn.tokens],
            }
            for turn in turns
        ],
    }


def _sequence_json(sequence: PlayedSequence) -> dict[str, Any]:
    return {
        "sequence": sequence.place,
        "name": sequence.name,
        "policy": sequence.policy,
        "tokens": sequence.tokens,
        "min_version": sequence.min_version,
        "max_version": sequence.max_version,
        "reward": sequence.reward,
        "fate": sequence.fate.fate,
        "reason": sequence.fate.reason or None,
        "batch": sequence.fate.batch or None,
        "replays": list(sequence.fate.replays),
    }


def _token_json(token: ViewedToken) -> Mapping[str, Any]:
    if not token.owner:
        return {"text": token.text, "id": token.token, "owner": None}
    return {
        "text": token.text,
        "id": token.token,
        "owner": token.owner,
        "version": token.version,
        "logprob": token.logprob,
        "mask": token.is_in_loss,
        "advantage": token.advantage,
    }
