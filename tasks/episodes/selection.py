"""Which episodes a person asks for.

    --reward '<0.5'  --version 3-7  --fate filtered:zero_advantage  --prompt 'chained_addition/*'

Conditions on policy, version and fate must hold for one and the same sequence of an episode.
"""

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

from storage.errors import ConfigError
from storage.plain_names import quoted
from storage.records.batches import Fate
from storage.records.rollouts import NOT_RECORDED, FailureKind
from tasks.episodes.index import PlayedEpisode, PlayedSequence
from tasks.episodes.sequence_fates import REPLAYED, UNKNOWN

ANY, NONE = "any", "none"
FAILURES = (*FailureKind, NOT_RECORDED, ANY, NONE)
FATES: tuple[str, ...] = (*get_args(Fate), UNKNOWN)
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_COMPARED = re.compile(rf"(<=|>=|<|>|=|)\s*({_NUMBER})")
_BETWEEN = re.compile(rf"({_NUMBER})\s*(?:-|\.\.)\s*({_NUMBER})")


@dataclass(frozen=True)
class Interval:
    """Numbers from `low` to `high`, both included."""

    low: float = -math.inf
    high: float = math.inf

    @classmethod
    def parse(cls, text: str, option: str) -> "Interval":
        """Read `<0.5`, `>=3`, `=1`, `1`, `3-7` or `0..0.5`; ConfigError names `option`."""
        if match := _BETWEEN.fullmatch(text.strip()):
            low, high = float(match[1]), float(match[2])
            if low <= high:
                return cls(low, high)
        if match := _COMPARED.fullmatch(text.strip()):
            sign, value = match[1], float(match[2])
            low = value if sign in ("", "=", ">=") else -math.inf
            high = value if sign in ("", "=", "<=") else math.inf
            if sign == ">":
                low = math.nextafter(value, math.inf)
            elif sign == "<":
                high = math.nextafter(value, -math.inf)
            return cls(low, high)
        raise ConfigError(
            f"{option} {quoted(text)} is no condition on a number; write it as '<0.5', '>=3', '1' "
            "or '3-7'"
        )

    def overlaps(self, low: float, high: float) -> bool:
        """Return whether a number from `low` to `high` is in the interval; False for NaN."""
        return low <= self.high and high >= self.low


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Conditions that an episode must meet; a field that is empty or None is no condition."""

    policy: str = ""
    version: Interval | None = None
    """At least one token was sampled by such a version, between the oldest and the newest."""
    reward: Interval | None = None
    failure: str = ""
    """A failure kind, `any` failure, or `none`."""
    region: str = ""
    prompt: str = ""
    """The id, or a pattern with `*`."""
    fate: str = ""
    detail: str = ""
    """Of the fate: its reason, or the number of the batch."""

    @classmethod
    def parse(
        cls,
        *,
        policy: str = "",
        version: str = "",
        reward: str = "",
        failure: str = "",
        region: str = "",
        prompt: str = "",
        fate: str = "",
    ) -> "Selection":
        """Read the options of the command line; ConfigError for an invalid one."""
        fate, _, detail = fate.partition(":")
        for option, word, words in (("--failure", failure, FAILURES), ("--fate", fate, FATES)):
            if word and word not in words:
                raise ConfigError(f"{option} {quoted(word)} is none of {', '.join(words)}")
        return cls(
            policy=policy,
            version=Interval.parse(version, "--version") if version else None,
            reward=Interval.parse(reward, "--reward") if reward else None,
            failure=failure,
            region=region,
            prompt=prompt,
            fate=fate,
            detail=detail,
        )

    def matches(self, episode: PlayedEpisode) -> bool:
        """Return whether the episode meets all conditions."""
        of_episode = (
            self._is_failure(episode.failure)
            and self.region in ("", episode.region)
            and (self.reward is None or self.reward.overlaps(episode.reward, episode.reward))
            and (not self.prompt or _is_like(episode.prompt_id, self.prompt))
        )
        if not of_episode or not (self.policy or self.version or self.fate):
            return of_episode
        return any(self._is_sequence(sequence) for sequence in episode.sequences)

    def _is_failure(self, failure: str) -> bool:
        if self.failure in (ANY, NONE):
            return bool(failure) == (self.failure == ANY)
        return self.failure in ("", failure)

    def _is_sequence(self, sequence: PlayedSequence) -> bool:
        if self.policy not in ("", sequence.policy):
            return False
        if self.version and not self.version.overlaps(sequence.min_version, sequence.max_version):
            return False
        fate, reason, batch, replays = sequence.fate
        if self.fate == REPLAYED:
            return bool(replays) and self.detail in ("", *map(str, replays))
        return self.fate in ("", fate) and self.detail in ("", reason, str(batch))


@lru_cache(maxsize=1)  # all episodes of a prompt have its id, which may have megabytes
def _is_like(prompt_id: str, pattern: str) -> bool:
    """Return whether the id is the pattern, or matches it where it has a `*`.

    Parts are searched from left to right, each once: a regular expression would go back.
    """
    first, *others = pattern.split("*")
    if not others:
        return prompt_id == pattern
    *between, last = others
    start, end = len(first), len(prompt_id) - len(last)
    if start > end or not (prompt_id.startswith(first) and prompt_id.endswith(last)):
        return False
    for part in between:
        found = prompt_id.find(part, start, end)
        if found < 0:
            return False
        start = found + len(part)
    return True
