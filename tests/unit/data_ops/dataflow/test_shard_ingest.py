from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from data_ops.algorithms.advantages import AdvantageConfig
from data_ops.algorithms.custom import CustomFilter
from data_ops.algorithms.policy_groups import ModelLimits, PolicyGroup
from data_ops.config import DataConfig
from data_ops.dataflow.shard_ingest import IngestedGroups, all_rows, ingest_shard
from storage import layout
from storage.errors import ConfigError, ConflictError, NotFoundError
from storage.records.rollouts import Shard
from storage.run import shards
from storage.store.object_store import ObjectStore, open_store
from tests.support.runs.builders import episode, group, sequence, shard

CONFIG = DataConfig.model_validate(
    {"prompts": {"builtin": "chained_addition"}, "samples_per_prompt": 2}
)


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory) -> ObjectStore:
    return open_store(f"memory://{tmp_path_factory.mktemp('run').name}")


def ingest(run: ObjectStore, answer: Shard, **changes: object) -> IngestedGroups:
    shards.create(run, answer)
    return ingest_shard(
        run, answer.order, CONFIG.model_copy(update=changes), ["solver"], {}
    ).policies["solver"]


def test_a_group_has_advantages_on_trained_tokens_only(run: ObjectStore) -> None:
    # rewards 1 and 0: mean 0.5, std with one degree of freedom sqrt(0.5) = 0.70710678
    ingested = ingest(
        run, shard(group(episode(sequence(reward=1.0)), episode(sequence(reward=0.0))))
    )
    value = 0.5 / (0.7071067811865476 + 1e-5)
    np.testing.assert_allclose(ingested.rows[0].advantages, [0, 0, value, value, value], rtol=1e-6)
    np.testing.assert_allclose(
        ingested.rows[1].advantages, [0, 0, -value, -value, -value], rtol=1e-6
    )
    assert ingested.rows[0].advantages.dtype == np.float32


def test_advantages_are_those_of_the_recipe_also_after_a_restart(run: ObjectStore) -> None:
    changes = {"advantage": AdvantageConfig(divide_by_std=False)}
    rows = ingest(run, shard(), **changes).rows
    loaded = all_rows(
        shards.read(run, 0), "solver", CONFIG.model_copy(update=changes), limits=ModelLimits()
    )
    for found in (rows, tuple(loaded.values())):
        assert [row.advantages[-1] for row in found] == [0.5, -0.5]


class Undecided:
    """A filter that returns what its argument says."""

    def __init__(self, value: object) -> None:
        self.value = value

    def keep(self, group: PolicyGroup) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def undecided(run: ObjectStore, value: object) -> IngestedGroups:
    name = f"{__name__}:Undecided"
    return ingest(run, shard(), filter=(CustomFilter(name=name, args={"value": value}),))


@pytest.mark.parametrize("value", [None, 1, "yes", np.array([True])])
def test_a_filter_that_returns_no_decision_is_named(run: ObjectStore, value: object) -> None:
    expected = rf"data\.filter: keep of Undecided failed: it returned a {type(value).__name__}, not True or False"
    with pytest.raises(ConfigError, match=expected):
        undecided(run, value)


def test_a_filter_that_raises_is_named(run: ObjectStore) -> None:
    expected = r"^data\.filter: keep of Undecided failed: KeyError: 'oops'$"
    with pytest.raises(ConfigError, match=expected):
        undecided(run, KeyError("oops"))


class Writes:
    """A filter that writes into an array of the rows."""

    def __init__(self, name: str) -> None:
        self.name = name

    def keep(self, group: PolicyGroup) -> bool:
        getattr(group.rows[0], self.name)[:1] = 0
        return True


@pytest.mark.parametrize("name", ["tokens", "loss_mask", "logprobs", "versions", "advantages"])
def test_a_filter_that_writes_into_rows_is_named(run: ObjectStore, name: str) -> None:
    writes = CustomFilter(name=f"{__name__}:Writes", args={"name": name})
    expected = r"^data\.filter: keep of Writes failed: assignment destination is read-only$"
    with pytest.raises(ConfigError, match=expected):
        ingest(run, shard(), filter=(writes,))


def test_a_conflict_that_a_filter_raises_is_none_with_another_dataflow(run: ObjectStore) -> None:
    with pytest.raises(ConfigError, match=r"keep of Undecided failed: ConflictError: mine"):
        undecided(run, ConflictError("mine"))


@pytest.mark.parametrize(("value", "num_rows"), [(np.True_, 2), (np.False_, 0)])
def test_a_filter_may_decide_by_numpys_booleans(
    run: ObjectStore, value: object, num_rows: int
) -> None:
    assert len(undecided(run, value).rows) == num_rows


def test_a_group_with_equal_rewards_is_filtered_and_counts_in_the_reward_metrics(
    run: ObjectStore,
) -> None:
    same = group(episode(), episode())
    ingested = ingest(run, shard(same, group(), order=4))
    assert [(entry.key, entry.reason) for entry in ingested.entries] == [
        ((4, 0, 0, 0), "zero_advantage"),
        ((4, 0, 1, 0), "zero_advantage"),
    ]
    assert [row.key for row in ingested.rows] == [(4, 1, 0, 0), (4, 1, 1, 0)]
    assert ingested.rewards.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert (ingested.num_groups, ingested.num_groups_kept) == (2, 1)


def test_the_rest_of_a_group_with_a_failed_episode_is_kept_by_default(
    run: ObjectStore,
) -> None:
    answer = shard(group(episode(error="ValueError: no"), episode(), episode(reward=0.0)))
    assert [row.key for row in ingest(run, answer).rows] == [(0, 0, 1, 0), (0, 0, 2, 0)]
    dropped = ingest(run, answer, keep_partial_groups=False)
    assert dropped.rows == ()
    assert [entry.reason for entry in dropped.entries] == ["partial_group", "partial_group"]


def test_a_complete_group_is_kept_when_partial_groups_are_dropped(run: ObjectStore) -> None:
    assert len(ingest(run, shard(), keep_partial_groups=False).rows) == 2


def test_a_row_without_trained_tokens_is_filtered_and_counts_in_the_group_mean(
    run: ObjectStore,
) -> None:
    masked = replace(sequence(reward=0.0), loss_mask=np.zeros(5, dtype=np.bool_))
    ingested = ingest(run, shard(group(episode(masked), episode(sequence(reward=1.0)))))
    assert [entry.reason for entry in ingested.entries] == ["no_trained_token"]
    assert ingested.rows[0].advantages[-1] == pytest.approx(0.5 / (0.7071067811865476 + 1e-5))


def test_each_sequence_of_a_policy_has_exactly_one_fate(run: ObjectStore) -> None:
    answer = shard(
        group(episode(sequence(), error="x"), episode()), group(), group(episode(), episode())
    )
    ingested = ingest(run, answer)
    keys = [row.key for row in ingested.rows] + [entry.key for entry in ingested.entries]
    assert sorted(keys) == [
        (0, 0, 0, 0),
        (0, 0, 1, 0),
        (0, 1, 0, 0),
        (0, 1, 1, 0),
        (0, 2, 0, 0),
        (0, 2, 1, 0),
    ]


def test_a_restart_gives_the_same_rows_bit_for_bit(run: ObjectStore) -> None:
    answer = shard(group(), group(episode(), episode()))
    kept = ingest(run, answer).rows
    loaded = all_rows(shards.read(run, 0), "solver", CONFIG, ModelLimits())
    assert len(loaded) == 4
    for row in kept:
        assert loaded[row.key].advantages.tobytes() == row.advantages.tobytes()


def test_unreadable_bytes_give_a_result_that_names_the_key(run: ObjectStore) -> None:
    run.create(layout.shard(5), b"torn")
    ingested = ingest_shard(run, 5, CONFIG, ["solver"], {})
    assert (ingested.shard, ingested.episodes, ingested.num_groups) == (None, (), 0)
    assert "shards/00000005.arrow" in ingested.problem
    assert dict(ingested.policies) == {}


def test_a_missing_shard_raises_an_error(run: ObjectStore) -> None:
    with pytest.raises(NotFoundError):
        ingest_shard(run, 9, CONFIG, ["solver"], {})
