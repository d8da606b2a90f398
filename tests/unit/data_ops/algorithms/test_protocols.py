from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from data_ops.algorithms import CURATORS, FILTERS, SAMPLERS, curators, filters, samplers
from data_ops.algorithms.curators import AcceptAll
from data_ops.algorithms.custom import CustomAlgorithm, CustomCurator, CustomFilter, CustomSampler
from data_ops.algorithms.filters import ZeroAdvantage
from data_ops.algorithms.policy_groups import route
from data_ops.algorithms.samplers import Draft, Edf, Fifo
from data_ops.config import DataConfig
from storage.errors import ConfigError
from storage.records.batches import BatchRow, SequenceKey
from storage.records.rollouts import Prompt
from tests.support.runs.builders import episode, group, row, sequence, shard


def keeps(*rewards: float) -> bool:
    answer = shard(group(*(episode(sequence(reward=reward)) for reward in rewards)))
    ((_, zero_advantage),) = filters([ZeroAdvantage()])
    return zero_advantage.keep(route(answer, ["solver"], {})["solver"][0])


def draft(*versions: int) -> Draft:
    rows = tuple(
        row(SequenceKey(0, 0, place, 0), version=version) for place, version in enumerate(versions)
    )
    return Draft(
        policy="solver",
        step=9,
        size=2,
        rows=rows,
        replays=(),
        trained=lambda count: (),
        draw=np.random.default_rng(0),
    )


def places(rows: tuple[BatchRow, ...]) -> list[int]:
    return [kept.key.episode for kept in rows]


def test_accept_all_accepts_and_needs_no_shards() -> None:
    (curator,) = curators([AcceptAll()])
    assert curator.accept(Prompt("p", {"question": "?"}), np.random.default_rng(0))
    assert not curator.needs_shards


def test_zero_advantage_keeps_a_group_only_when_its_rewards_differ() -> None:
    assert keeps(1.0, 0.0)
    assert keeps(0.5, 0.5, 0.5, 0.6)
    assert not keeps(1.0, 1.0)
    assert not keeps(0.0, 0.0, 0.0)


def test_zero_advantage_drops_rewards_that_differ_by_rounding() -> None:
    assert not keeps(0.3, 0.1 + 0.2)
    assert not keeps(1000.0, 1000.00006, 1000.0)
    assert keeps(1.0, 1.00001)


def test_zero_advantage_drops_a_group_of_one() -> None:
    assert not keeps(1.0)


def test_edf_takes_the_oldest_first_and_breaks_ties_by_arrival() -> None:
    assert places(Edf().arrange(draft(5, 3, 4, 3)).rows) == [1, 3, 2, 0]


def test_fifo_keeps_the_order_of_arrival() -> None:
    assert places(Fifo().arrange(draft(5, 3, 4, 3)).rows) == [0, 1, 2, 3]


def test_the_tables_have_each_algorithm_by_its_name() -> None:
    assert {"accept_all": AcceptAll, "custom": CustomCurator} == CURATORS
    assert {"zero_advantage": ZeroAdvantage, "custom": CustomFilter} == FILTERS
    assert {"edf": Edf, "fifo": Fifo, "custom": CustomSampler} == SAMPLERS


def test_a_recipe_writes_a_name_or_an_import_path_alone_or_in_a_section() -> None:
    written = {
        "curate": [
            "accept_all",
            {"name": "accept_all"},
            "a.b:C",
            {"name": "a.b:C", "args": {"x": 1}},
        ],
        "filter": [{"name": "zero_advantage"}, "a.b:D"],
        "sample": ["fifo", "edf", "a.b:E"],
    }
    config = DataConfig.model_validate({"prompts": {"builtin": "chained_addition"}, **written})
    assert config.curate == [
        AcceptAll(),
        AcceptAll(),
        CustomCurator(name="a.b:C"),
        CustomCurator(name="a.b:C", args={"x": 1}),
    ]
    assert config.filter == [ZeroAdvantage(), CustomFilter(name="a.b:D")]
    assert config.sample == [Fifo(), Edf(), CustomSampler(name="a.b:E")]
    assert DataConfig.model_validate(config.model_dump(mode="json")) == config


def test_arguments_of_a_built_in_algorithm_that_takes_none_are_refused() -> None:
    for name in ("accept_all", "zero_advantage", "edf"):
        place = {"accept_all": "curate", "zero_advantage": "filter", "edf": "sample"}[name]
        with pytest.raises(ValidationError, match="args"):
            DataConfig.model_validate(
                {"prompts": {"builtin": "chained_addition"}, place: [{"name": name, "args": {}}]}
            )


def test_a_class_without_the_required_methods_is_refused_before_the_run() -> None:
    with pytest.raises(
        ConfigError, match=rf"data\.sample\.0: {__name__}:EveryOther has no arrange; a sampler is"
    ):
        samplers([CustomSampler(name=f"{__name__}:EveryOther", args={"remainder": 1})])


def test_a_curator_without_needs_shards_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=rf"data\.curate\.1: {__name__}:Silent has no needs_shards"
    ):
        curators([AcceptAll(), CustomCurator(name=f"{__name__}:Silent")])


class Silent:
    def observe(self, order: object, shard: object) -> None: ...

    def accept(self, prompt: Prompt, draw: np.random.Generator) -> bool:
        return True


def test_a_curator_whose_needs_shards_raises_is_named() -> None:
    name = f"{__name__}:Computed"
    with pytest.raises(
        ConfigError, match=rf"^data\.curate\.0: needs_shards of {name} failed: KeyError: 'x'$"
    ):
        curators([CustomCurator(name=name)])


class Computed(Silent):
    @property
    def needs_shards(self) -> bool:
        raise KeyError("x")


class Picky:
    """Refuses its argument's value."""

    def __init__(self, share: float) -> None:
        raise ValueError("share must be at most 1")

    def keep(self, group: object) -> bool:
        return True


def test_an_error_names_the_place_and_the_reason() -> None:
    with pytest.raises(
        ConfigError,
        match=r"data\.filter\.0: .*:Picky refuses \{'share': 2\}: share must be at most 1$",
    ):
        filters([CustomFilter(name=f"{__name__}:Picky", args={"share": 2})])
    with pytest.raises(
        ConfigError,
        match=r"data\.filter\.0: .*:Broken refuses \{\}: KeyError: 'x'$",
    ):
        filters([CustomFilter(name=f"{__name__}:Broken")])


class Broken:
    def __init__(self) -> None:
        raise KeyError("x")

    def keep(self, group: object) -> bool:
        return True


class Half:
    """Has one method of a curator and none of another place."""

    def accept(self, prompt: Prompt, draw: np.random.Generator) -> bool:
        return True


def test_each_required_method_of_each_place_is_checked() -> None:
    with pytest.raises(ConfigError, match="observe"):
        curators([CustomCurator(name=f"{__name__}:Half")])
    with pytest.raises(ConfigError, match="keep"):
        filters([CustomFilter(name=f"{__name__}:Half")])
    with pytest.raises(ConfigError, match="arrange"):
        samplers([CustomSampler(name=f"{__name__}:Half")])


def test_each_built_in_sampler_has_its_name() -> None:
    (edf,), (fifo,) = samplers([Edf()]), samplers([Fifo()])
    assert places(edf.arrange(draft(5, 3, 4)).rows) == [1, 2, 0]
    assert places(fifo.arrange(draft(5, 3, 4)).rows) == [0, 1, 2]


def test_a_filter_has_its_name_in_the_config() -> None:
    longest = CustomFilter(name=f"{__name__}:Longest")
    assert [name for name, _ in filters([ZeroAdvantage(), longest])] == [
        "zero_advantage",
        f"{__name__}:Longest",
    ]


class Longest:
    def keep(self, group: object) -> bool:
        return True


def test_the_settings_of_a_custom_algorithm_are_read_without_importing_it() -> None:
    assert issubclass(CustomFilter, CustomAlgorithm)
    with pytest.raises(
        ConfigError, match=r"data\.filter\.0: nowhere\.at_all:Name cannot be imported"
    ):
        filters([CustomFilter(name="nowhere.at_all:Name")])


class EveryOther:
    """A curator found by import path, with an argument."""

    needs_shards = False

    def __init__(self, remainder: int) -> None:
        self.remainder = remainder

    def observe(self, order: object, shard: object) -> None:
        raise AssertionError("it needs no shards")

    def accept(self, prompt: Prompt, draw: np.random.Generator) -> bool:
        return int(prompt.id) % 2 == self.remainder


class Replay:
    """The sampler `latest` of the literature, which shows that the interface suffices: a share of
    the batch is replayed.
    """

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio

    def arrange(self, draft: Draft) -> Draft:
        return replace(draft, replays=draft.trained(int(draft.size * self.ratio)))


def test_an_import_path_selects_a_custom_class() -> None:
    (curator,) = curators([CustomCurator(name=f"{__name__}:EveryOther", args={"remainder": 1})])
    draw = np.random.default_rng(0)
    assert [curator.accept(Prompt(str(index), {}), draw) for index in range(4)] == [
        False,
        True,
        False,
        True,
    ]


def test_a_replay_algorithm_is_a_sampler() -> None:
    (replay,) = samplers([CustomSampler(name=f"{__name__}:Replay", args={"ratio": 0.5})])
    old = row(SequenceKey(0, 7, 0, 0))
    asked = replace(draft(5, 3), trained=lambda count: (old,) * count)
    assert replay.arrange(asked).replays == (old,)
