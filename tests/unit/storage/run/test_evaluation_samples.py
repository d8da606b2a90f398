"""Samples of evaluations: stored once, and refused beyond their limits."""

from dataclasses import replace

import pytest

from storage.errors import ConflictError, CorruptError, NotFoundError, ObjectTooLargeError
from storage.records.rollouts import FailureKind
from storage.run import evaluation_samples, shards
from storage.run.evaluation_samples import EvaluationSample
from storage.store.object_store import ObjectStore
from tests.property.same_bits import same_bits
from tests.support.runs import builders
from tests.support.stores.damaging_store import damages_first_reads

KEY = "eval_samples/solver-00000004_verifier-00000007.arrow"
VERSIONS = {"verifier": 7, "solver": 4}


def sample(solver: int = 4, verifier: int = 7) -> EvaluationSample:
    """An answer that the verifier read, and a failed episode."""
    attempt = builders.sequence((1, 2), (3, 4, 5), version=solver, logprob=-0.25)
    verdict = builders.sequence(
        (1, 2, 3), (9,), policy="verifier", version=verifier, name="verdict", starts_episode=False
    )
    failed = builders.episode(error="timeout after 60 s", failure_kind=FailureKind.TIMEOUT)
    return EvaluationSample(
        versions=VERSIONS,
        groups=(
            builders.group(builders.episode(attempt, verdict, final=1.0), prompt_id="a"),
            builders.group(failed, prompt_id="b"),
        ),
    )


def test_a_sample_is_read_back_with_every_value(memory_store: ObjectStore) -> None:
    evaluation_samples.create(memory_store, sample())
    assert memory_store.list() == [KEY] == evaluation_samples.keys(memory_store)
    back = evaluation_samples.read(memory_store, {"solver": 4, "verifier": 7})
    assert same_bits(back, sample())
    assert back.num_episodes == 2


def test_the_first_sample_of_the_same_versions_is_kept(memory_store: ObjectStore) -> None:
    evaluation_samples.create(memory_store, sample())
    with pytest.raises(ConflictError):
        evaluation_samples.create(memory_store, replace(sample(), groups=()))
    assert evaluation_samples.read(memory_store, VERSIONS).num_episodes == 2


def test_an_evaluation_without_a_sample_has_none(memory_store: ObjectStore) -> None:
    with pytest.raises(NotFoundError):
        evaluation_samples.read(memory_store, VERSIONS)


@pytest.mark.parametrize("changed", [{"solver": 3}, {"verifier": 8}])
def test_a_token_of_another_version_than_the_evaluated_one_is_corrupt(
    memory_store: ObjectStore, changed: dict[str, int]
) -> None:
    evaluation_samples.create(memory_store, sample(**changed))
    (policy,) = changed
    with pytest.raises(
        CorruptError,
        match=rf"{KEY}: a token of {policy} was sampled with another version than "
        f"{VERSIONS[policy]}",
    ):
        evaluation_samples.read(memory_store, VERSIONS)


def test_a_token_of_a_policy_that_was_not_evaluated_is_corrupt(memory_store: ObjectStore) -> None:
    evaluation_samples.create(memory_store, replace(sample(), versions={"solver": 4}))
    with pytest.raises(CorruptError, match="a token of verifier was sampled with another version"):
        evaluation_samples.read(memory_store, {"solver": 4})


def test_the_sample_of_other_versions_than_in_its_key_is_corrupt(memory_store: ObjectStore) -> None:
    memory_store.put("eval_samples/solver-00000004.arrow", evaluation_samples.encode(sample()))
    with pytest.raises(
        CorruptError, match=r"^eval_samples/solver-00000004\.arrow holds the sample"
    ):
        evaluation_samples.read(memory_store, {"solver": 4})


def test_a_sample_of_no_policy_is_corrupt(memory_store: ObjectStore) -> None:
    none = replace(sample(), versions={}, groups=())
    memory_store.put("eval_samples/.arrow", evaluation_samples.encode(none))
    with pytest.raises(CorruptError, match=r"^eval_samples/\.arrow: .*versions"):
        evaluation_samples.read(memory_store, {})


def test_a_shard_in_the_place_of_a_sample_is_corrupt(memory_store: ObjectStore) -> None:
    memory_store.put(KEY, shards.encode(builders.shard()))
    with pytest.raises(CorruptError, match=rf"^{KEY}: a evaluation_sample file of format 1 was"):
        evaluation_samples.read(memory_store, VERSIONS)


def test_a_sample_that_arrives_damaged_once_is_read_again(memory_store: ObjectStore) -> None:
    evaluation_samples.create(memory_store, sample())
    again = evaluation_samples.read(damages_first_reads(memory_store), VERSIONS)
    assert again.num_episodes == 2


@pytest.mark.parametrize(("limit", "message"), [(2, None), (1, "2 episodes are more than")])
def test_more_episodes_than_a_sample_may_have_are_corrupt(
    monkeypatch: pytest.MonkeyPatch, limit: int, message: str | None
) -> None:
    monkeypatch.setattr(evaluation_samples, "KEPT_EPISODES_MAX", limit)
    check(evaluation_samples.encode(sample()), message)


@pytest.mark.parametrize(("limit", "message"), [(9, None), (8, "9 tokens are more than")])
def test_more_tokens_than_a_sample_may_have_are_corrupt(
    monkeypatch: pytest.MonkeyPatch, limit: int, message: str | None
) -> None:
    monkeypatch.setattr(evaluation_samples, "TOKENS_MAX", limit)
    check(evaluation_samples.encode(sample()), message)


def check(body: bytes, message: str | None) -> None:
    if message is None:
        assert evaluation_samples.decode(body).num_episodes == 2
    else:
        with pytest.raises(CorruptError, match=message):
            evaluation_samples.decode(body)


def test_a_sample_of_too_many_bytes_is_neither_written_nor_read(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = evaluation_samples.encode(sample())
    monkeypatch.setattr(evaluation_samples, "BYTES_MAX", len(body) - 1)
    with pytest.raises(ObjectTooLargeError, match="are more than the limit"):
        evaluation_samples.create(memory_store, sample())
    assert memory_store.list() == []
    with pytest.raises(CorruptError, match="bytes are more than the limit"):
        evaluation_samples.decode(body)
    monkeypatch.setattr(evaluation_samples, "BYTES_MAX", len(body))
    assert evaluation_samples.decode(body).num_episodes == 2
