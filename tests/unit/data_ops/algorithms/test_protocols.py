from dataclasses import replace

import numpy as np
import pytest

from data_ops.algorithms.policy_groups import route
from data_ops.algorithms.protocols import curators, filters, samplers
from data_ops.algorithms.samplers import Draft, Edf, Fifo
from data_ops.config import Algorithm
from storage.errors import ConfigError
from storage.records.batches import Row, SequenceKey
from storage.records.rollouts import Prompt
from tests.builders import episode, group, row, sequence, shard


def algorithm(name: str, **args: object) -> list[Algorithm]:
    return [Algorithm(name=name, args=args)]


def keeps(*rewards: float) -> bool:
    answer = shard(group(*(episode(sequence(reward=reward)) for reward in rewards)))
    ((_, zero_advantage),) = filters(algorithm("zero_advantage"))
    return zero_advantage.keep(route(answer, ["solver"])["solver"][0])


def draft(*versions: int) -> Draft:
    rows = tuple(row(SequenceKey(0, 0, place, 0), version=version) for place, version in enumerate(versions))
    return Draft("solver", 9, 2, rows, (), lambda count: (), np.random.default_rng(0))


def places(rows: tuple[Row, ...]) -> list[int]:
    return [kept.key.episode for kept in rows]


def test_accept_all_accepts_and_needs_no_shards() -> None:
    (curator,) = curators(algorithm("accept_all"))
    assert curator.accept(Prompt("p", {"question": "?"}), np.random.default_rng(0))
    assert not curator.needs_shards


def test_zero_advantage_keeps_a_group_only_when_its_rewards_differ() -> None:
    assert keeps(1.0, 0.0)
    assert keeps(0.5, 0.5, 0.5, 0.6)
    assert not keeps(1.0, 1.0)
    assert not keeps(0.0, 0.0, 0.0)


def test_zero_advantage_drops_rewards_that_differ_by_rounding_alone() -> None:
    assert not keeps(0.3, 0.1 + 0.2)
    assert not keeps(1000.0, 1000.00006, 1000.0)
    assert keeps(1.0, 1.00001)


def test_zero_advantage_drops_a_group_of_one() -> None:
    assert not keeps(1.0)


def test_edf_takes_the_oldest_first_and_breaks_ties_by_arrival() -> None:
    assert places(Edf().arrange(draft(5, 3, 4, 3)).rows) == [1, 3, 2, 0]


def test_fifo_keeps_the_order_of_arrival() -> None:
    assert places(Fifo().arrange(draft(5, 3, 4, 3)).rows) == [0, 1, 2, 3]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="edf, fifo"):
        samplers(algorithm("lifo"))


def test_wrong_arguments_name_the_place_and_the_algorithm() -> None:
    with pytest.raises(ConfigError, match=r"data\.filter\.0: zero_advantage does not take args \{'epsilon': 1\}"):
        filters(algorithm("zero_advantage", epsilon=1))


def test_a_class_without_the_verbs_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match=rf"data\.sample\.0: {__name__}:EveryOther has no arrange; a sampler is"):
        samplers(algorithm(f"{__name__}:EveryOther", remainder=1))


def test_a_curator_that_does_not_say_whether_it_needs_shards_is_refused() -> None:
    with pytest.raises(ConfigError, match=rf"data\.curate\.1: {__name__}:Silent has no needs_shards"):
        curators([*algorithm("accept_all"), *algorithm(f"{__name__}:Silent")])


class Silent:
    def observe(self, order: object, shard: object) -> None: ...

    def accept(self, prompt: Prompt, draw: np.random.Generator) -> bool:
        return True


class Picky:
    """Refuses its argument's value."""

    def __init__(self, share: float) -> None:
        raise ValueError("share must be at most 1")

    def keep(self, group: object) -> bool:
        return True


def test_a_refused_value_names_the_place_and_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"data\.filter\.0: .* does not take args \{'share': 2\} \(share must be at most 1\)"):
        filters(algorithm(f"{__name__}:Picky", share=2))


class Half:
    """Has one verb of a curator and no other of any place."""

    def accept(self, prompt: Prompt, draw: np.random.Generator) -> bool:
        return True


def test_every_verb_of_every_place_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="observe"):
        curators(algorithm(f"{__name__}:Half"))
    with pytest.raises(ConfigError, match="keep"):
        filters(algorithm(f"{__name__}:Half"))
    with pytest.raises(ConfigError, match="arrange"):
        samplers(algorithm(f"{__name__}:Half"))


def test_each_built_in_sampler_has_its_name() -> None:
    (edf,), (fifo,) = samplers(algorithm("edf")), samplers(algorithm("fifo"))
    assert places(edf.arrange(draft(5, 3, 4)).rows) == [1, 2, 0]
    assert places(fifo.arrange(draft(5, 3, 4)).rows) == [0, 1, 2]


def test_a_filter_goes_by_the_name_in_the_config() -> None:
    assert [name for name, _ in filters(algorithm("zero_advantage"))] == ["zero_advantage"]


class EveryOther:
    """A curator of somebody else: found by import path, with an argument."""

    needs_shards = False

    def __init__(self, remainder: int) -> None:
        self.remainder = remainder

    def observe(self, order: object, shard: object) -> None:
        raise AssertionError("it needs no shards")

    def accept(self, prompt: Prompt, draw: np.random.Generator) -> bool:
        return int(prompt.id) % 2 == self.remainder


class Replay:
    """`latest` of the literature, to prove that the interface is wide enough: a share of the batch comes back."""

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio

    def arrange(self, draft: Draft) -> Draft:
        return replace(draft, replays=draft.trained(int(draft.size * self.ratio)))


def test_an_import_path_plugs_in_a_class_of_ones_own() -> None:
    (curator,) = curators(algorithm(f"{__name__}:EveryOther", remainder=1))
    draw = np.random.default_rng(0)
    assert [curator.accept(Prompt(str(index), {}), draw) for index in range(4)] == [False, True, False, True]


def test_a_replay_algorithm_needs_no_other_interface() -> None:
    (replay,) = samplers(algorithm(f"{__name__}:Replay", ratio=0.5))
    old = row(SequenceKey(0, 7, 0, 0))
    asked = replace(draft(5, 3), trained=lambda count: (old,) * count)
    assert replay.arrange(asked).replays == (old,)
