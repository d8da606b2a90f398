"""The groups of one prompt over the versions of a run, with the answer of each episode."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from storage.records.rollouts import Episode, Prompt
from tasks.episodes.index import IndexedShard, PlayedEpisode
from tasks.episodes.selection import Selection
from tasks.episodes.token_decoder import TokenDecoders

ANSWER_TOKENS = 256
"""Last tokens that are decoded of an answer; a small shard may have millions."""


@dataclass(frozen=True, kw_only=True)
class PromptPlay:
    """One group: the prompt in one order. Only episodes that were asked for are in it."""

    order: int
    prompt: Prompt
    episodes: tuple[PlayedEpisode, ...]
    answers: Mapping[int, str]
    """Index of the episode → the end of what was sampled in its last sequence."""

    def versions(self) -> dict[str, tuple[int, int]]:
        """Return policy → oldest and newest version that sampled a token in the group."""
        ranges: dict[str, tuple[int, int]] = {}
        for episode in self.episodes:
            for policy, (low, high) in episode.versions().items():
                lowest, highest = ranges.get(policy, (low, high))
                ranges[policy] = min(lowest, low), max(highest, high)
        return ranges

    def mean_reward(self) -> float:
        """Return the mean reward of the episodes that did not fail; NaN for none."""
        rewards = [episode.reward for episode in self.episodes if not episode.failure]
        return float(np.mean(rewards)) if rewards else float("nan")


def prompt_plays(
    shards: Iterable[IndexedShard], selection: Selection, decoders: TokenDecoders
) -> Iterator[PromptPlay]:
    """Yield the groups with selected episodes, in the order of `shards`."""
    for indexed in shards:
        selected: dict[int, list[PlayedEpisode]] = {}
        for episode in indexed.episodes:
            if selection.matches(episode):
                selected.setdefault(episode.group, []).append(episode)
        for index, episodes in selected.items():
            group = indexed.shard.groups[index]
            yield PromptPlay(
                order=indexed.shard.order,
                prompt=group.prompt,
                episodes=tuple(episodes),
                answers={
                    each.episode: _answer(group.episodes[each.episode], each, decoders)
                    for each in episodes
                },
            )


def _answer(episode: Episode, played: PlayedEpisode, decoders: TokenDecoders) -> str:
    """Return the end of the text that was sampled in the last sequence."""
    if not played.sequences:
        return ""
    last = played.sequences[-1]
    sequence = episode.sequences[last.place]
    decode = decoders.of(last.policy).token
    sampled = sequence.tokens[sequence.owners >= 0][-ANSWER_TOKENS:]
    return "".join(decode(token) for token in sampled.tolist())
