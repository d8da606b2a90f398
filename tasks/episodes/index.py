"""The index of a run's episodes: a stream over all shards, without their tokens.

    shards/*.arrow ──read──▶ IndexedShard ⊃ PlayedEpisode ⊃ PlayedSequence (with its fate)

A few shards are in memory at once, however long the run is. A shard that cannot be read, or that is
in quarantine, is named in `problems` and left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from storage import layout
from storage.errors import UNREADABLE, ConfigError, NotFoundError
from storage.records.batches import SequenceKey
from storage.records.rollouts import NOT_RECORDED, Episode, Group, Sequence, Shard
from storage.run import shards
from storage.run.quarantine import is_set_aside, read_quarantine
from storage.store.object_store import ObjectStore
from storage.store.ordered_map import ordered_map
from tasks.episodes.sequence_fates import READERS, OrderFates, RunFates, SequenceFate


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedSequence:
    """One sequence as one policy has it: what the policy sampled in it, and its fate."""

    place: int
    """Index of the sequence in its episode."""
    name: str
    policy: str
    tokens: int
    """Tokens that the policy sampled."""
    min_version: int
    max_version: int
    """Oldest and newest version that sampled one of them."""
    reward: float
    fate: SequenceFate


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEpisode:
    """One episode of a shard."""

    order: int
    group: int
    episode: int
    prompt_id: str
    region: str
    worker: str
    reward: float
    failure: str
    """Failure kind; `not_recorded` for a failed episode of a shard without kinds; else empty."""
    seconds: float
    sequences: tuple[PlayedSequence, ...]

    @property
    def id(self) -> str:
        """Order, index of the prompt and of the sample, as `--episode` takes them: `7.2.5`."""
        return f"{self.order}.{self.group}.{self.episode}"

    def versions(self) -> dict[str, tuple[int, int]]:
        """Return policy → oldest and newest version that sampled a token."""
        ranges: dict[str, tuple[int, int]] = {}
        for each in self.sequences:
            low, high = ranges.get(each.policy, (each.min_version, each.max_version))
            ranges[each.policy] = min(low, each.min_version), max(high, each.max_version)
        return ranges


@dataclass(frozen=True, eq=False)
class IndexedShard:
    """A shard, and its episodes as the index has them."""

    shard: Shard
    episodes: tuple[PlayedEpisode, ...]
    """Of all groups, in the shard's order."""


class EpisodeIndex:
    """All episodes of a run, as of the time at which the index was made."""

    def __init__(self, run: ObjectStore) -> None:
        self._run = run
        self._fates = RunFates(run)
        self.problems: list[str] = list(self._fates.problems)
        """Batches and shards that cannot be read; those of shards are added by `shards`."""
        quarantined = read_quarantine(run)
        self.orders: list[int] = []
        """Orders whose shard is read, ascending."""
        for number in layout.numbers(run.list(f"{layout.SHARDS}/"), layout.shard):
            if is_set_aside(quarantined, number):
                self.problems.append(f"{layout.shard(number)} is in quarantine")
            else:
                self.orders.append(number)

    def shards(self, newest_first: bool = False) -> Iterator[IndexedShard]:
        """Yield every shard that can be read."""
        numbers = self.orders[::-1] if newest_first else self.orders
        with ordered_map(self._read, numbers, threads=READERS, budget=2 * READERS) as results:
            for found in results:
                if isinstance(found, str):
                    self.problems.append(found)
                else:
                    yield found

    def shard(self, order: int) -> IndexedShard:
        """Return the shard of one order; ConfigError when there is none that can be read."""
        if order not in self.orders:
            raise ConfigError(f"{self._run.url} has no readable shard of order {order}")
        found = self._read(order)
        if isinstance(found, str):
            raise ConfigError(f"the shard of order {order} cannot be read: {found}")
        return found

    def episodes(self, newest_first: bool = False) -> Iterator[PlayedEpisode]:
        """Yield the episodes of every shard that can be read."""
        for indexed in self.shards(newest_first):
            yield from indexed.episodes

    def _read(self, number: int) -> "IndexedShard | str":
        """Return the shard, or why it cannot be read."""
        try:
            shard = shards.read(self._run, number)
        except (NotFoundError, *UNREADABLE) as error:
            return str(error)
        return IndexedShard(shard, tuple(indexed_episodes(shard, self._fates.of_order(number))))


def indexed_episodes(shard: Shard, fates: OrderFates) -> Iterator[PlayedEpisode]:
    """Yield the episodes of a shard with the fates of their sequences."""
    for g, group in enumerate(shard.groups):
        for e, episode in enumerate(group.episodes):
            yield _episode(shard, (g, e), group, episode, fates)


def _episode(
    shard: Shard, place: tuple[int, int], group: Group, episode: Episode, fates: OrderFates
) -> PlayedEpisode:
    return PlayedEpisode(
        order=shard.order,
        group=place[0],
        episode=place[1],
        prompt_id=group.prompt.id,
        region=shard.region,
        worker=shard.worker,
        reward=episode.reward,
        failure="" if episode.error is None else str(episode.failure_kind or NOT_RECORDED),
        seconds=episode.seconds,
        sequences=tuple(
            played
            for s, sequence in enumerate(episode.sequences)
            for played in _sequences(SequenceKey(shard.order, *place, s), sequence, fates)
        ),
    )


def _sequences(key: SequenceKey, sequence: Sequence, fates: OrderFates) -> Iterator[PlayedSequence]:
    """Yield the sequence for each policy that sampled a token in it."""
    for policy, is_own in sequence.sampled_by():
        versions = sequence.versions[is_own]
        yield PlayedSequence(
            place=key.sequence,
            name=sequence.name,
            policy=policy,
            tokens=int(versions.size),
            min_version=int(versions.min()),
            max_version=int(versions.max()),
            reward=sequence.reward,
            fate=fates.of(policy, key),
        )
