import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from storage.errors import CorruptError, NotFoundError, ObjectTooLargeError
from storage.formats import arrow_files, arrow_sizes
from storage.formats.json_objects import parse
from storage.records.rollouts import Episode, FailureKind, Sequence, Shard
from storage.records.types import Json
from storage.run import shards
from storage.store import backend
from storage.store.object_store import ObjectStore
from tests.support.runs import builders
from tests.support.stores.damaging_store import damages_first_reads


def round_trip(shard: Shard) -> Shard:
    return shards.decode(shards.encode(shard))


def with_sequence(**changes: object) -> Shard:
    """A shard whose row 1 (the second sequence) is a default one with `changes`."""
    good = builders.sequence()
    bad = replace(good, **changes)  # type: ignore[arg-type]  # the tests choose the fields
    return builders.shard(builders.group(builders.episode(good, bad)))


def header_of_a_failed_episode() -> Json:
    failed = builders.episode(error="timeout after 60 s", failure_kind=FailureKind.TIMEOUT)
    table, header = arrow_files.decode(
        shards.encode(builders.shard(builders.group(failed))), shards.SCHEMA, "shard"
    )
    assert table.num_rows == 0
    return parse(header, "the header")


def without_rows(header: Json) -> bytes:
    """The file of a shard with a header and no sequences."""
    columns = {
        name: arrow_files.list_column([], kind) for name, kind in shards.TOKEN_COLUMNS.items()
    }
    others = {name: [] for name in shards.SCHEMA.names if name not in columns}
    return arrow_files.encode(shards.SCHEMA, columns | others, "shard", header)


def test_a_shard_is_read_back_with_every_value() -> None:
    attempt = builders.sequence((1, 2), (3, 4, 5), version=4, logprob=-0.25, reward=0.5)
    verdict = builders.sequence(
        (1, 2, 3), (9,), policy="verifier", version=7, name="verdict", starts_episode=False
    )
    shard = builders.shard(
        builders.group(
            builders.episode(attempt, verdict, reward=0.5, first_attempt=1.0), prompt_id="a"
        ),
        builders.group(builders.episode(reward=0.0), prompt_id="b"),
        order=7,
        weights={"solver": {4: "sha256:aa", 0: "sha256:bb"}, "verifier": {7: "sha256:cc"}},
    )
    loaded = round_trip(shard)
    assert (loaded.order, loaded.attempt, loaded.worker, loaded.region) == (
        7,
        0,
        "rollout-us-east-0",
        "us-east",
    )
    assert (loaded.started_s, loaded.finished_s) == (1700000000.0, 1700000001.5)
    assert loaded.weights == {
        "solver": {4: "sha256:aa", 0: "sha256:bb"},
        "verifier": {7: "sha256:cc"},
    }
    assert [group.prompt for group in loaded.groups] == [group.prompt for group in shard.groups]
    play = loaded.groups[0].episodes[0]
    assert (play.reward, play.metrics, play.error, play.seconds) == (
        0.5,
        {"first_attempt": 1.0},
        None,
        0.25,
    )
    first, second = play.sequences
    assert first.tokens.tolist() == [1, 2, 3, 4, 5]
    assert first.loss_mask.tolist() == [False, False, True, True, True]
    assert first.logprobs.tolist() == [0.0, 0.0, -0.25, -0.25, -0.25]
    assert first.owners.tolist() == [-1, -1, 0, 0, 0]
    assert first.versions.tolist() == [-1, -1, 4, 4, 4]
    assert (first.reward, first.temperature, first.starts_episode, first.name) == (
        0.5,
        1.0,
        True,
        "attempt",
    )
    assert second.owners.tolist() == [-1, -1, -1, 1]
    assert (second.name, second.starts_episode, second.policies) == (
        "verdict",
        False,
        ("solver", "verifier"),
    )
    assert loaded.groups[1].episodes[0].reward == 0.0


def test_failed_episodes_without_sequences_are_read_back() -> None:
    shard = builders.shard(
        builders.group(
            builders.episode(),
            Episode(sequences=(), reward=0.0, metrics={}, error="timeout after 60 s", seconds=60.0),
            builders.episode(),
        ),
        builders.group(builders.episode(error="ValueError: boom")),
    )
    loaded = round_trip(shard)
    assert [len(episode.sequences) for episode in loaded.groups[0].episodes] == [1, 0, 1]
    assert loaded.groups[0].episodes[1].error == "timeout after 60 s"
    assert loaded.groups[0].episodes[1].seconds == 60.0
    assert loaded.groups[1].episodes[0].error == "ValueError: boom"


def test_the_kind_of_every_failure_is_stored() -> None:
    episodes = [builders.episode(error=f"{kind}!", failure_kind=kind) for kind in FailureKind]
    (loaded,) = round_trip(builders.shard(builders.group(builders.episode(), *episodes))).groups
    assert [(episode.error, episode.failure_kind) for episode in loaded.episodes] == [
        (None, None),
        ("model!", FailureKind.MODEL),
        ("environment!", FailureKind.ENVIRONMENT),
        ("tool!", FailureKind.TOOL),
        ("reward!", FailureKind.REWARD),
        ("timeout!", FailureKind.TIMEOUT),
        ("infrastructure!", FailureKind.INFRASTRUCTURE),
        ("workflow_bug!", FailureKind.WORKFLOW_BUG),
    ]


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (None, "tool", "an episode of a shard has the failure kind tool and no error"),
        ("no", "gremlins", r"groups\.0\.episodes\.0\.failure_kind: Input should be 'model', 'env"),
    ],
)
def test_an_unknown_failure_kind_is_refused(error: str | None, kind: str, message: str) -> None:
    header = header_of_a_failed_episode()
    header["groups"][0]["episodes"][0] |= {"error": error, "failure_kind": kind}
    with pytest.raises(CorruptError, match=message):
        shards.decode(without_rows(header))


def test_a_shard_of_an_earlier_release_has_failures_without_a_kind() -> None:
    header = header_of_a_failed_episode()
    del header["groups"][0]["episodes"][0]["failure_kind"]
    ((episode,),) = [group.episodes for group in shards.decode(without_rows(header)).groups]
    assert (episode.error, episode.failure_kind) == ("timeout after 60 s", None)


def test_a_shard_without_sequences_is_valid() -> None:
    loaded = round_trip(builders.shard(builders.group(builders.episode(error="boom"))))
    assert loaded.groups[0].episodes[0].sequences == ()


def test_sequences_of_other_policies_keep_their_policy_names() -> None:
    pair = builders.sequence(), builders.sequence(policy="critic", policies=("critic",))
    loaded = (
        round_trip(builders.shard(builders.group(builders.episode(*pair))))
        .groups[0]
        .episodes[0]
        .sequences
    )
    assert [sequence.policies for sequence in loaded] == [("solver", "verifier"), ("critic",)]


def test_tokens_of_the_last_of_many_policies_are_found() -> None:
    policies = tuple(f"p{index}" for index in range(128))
    owners = array([-1, 127, 0, 127, -1], np.int8)
    versions = array([-1, 3, 4, 5, -1], np.int32)
    logprobs, mask = array([0, -1, -1, -1, 0], np.float32), array([0, 1, 1, 1, 0], np.bool_)
    sequence = (
        round_trip(
            with_sequence(
                policies=policies,
                owners=owners,
                versions=versions,
                logprobs=logprobs,
                loss_mask=mask,
            )
        )
        .groups[0]
        .episodes[0]
        .sequences[1]
    )
    assert [(policy, own.tolist()) for policy, own in sequence.sampled_by()] == [
        ("p0", [False, False, True, False, False]),
        ("p127", [False, True, False, True, False]),
    ]
    assert sequence.min_version("p127") == 3


def test_log_probabilities_keep_their_bits_nan_and_negative_zero_included() -> None:
    bits = np.array([0x80000000, 0, 0x7FC00001, 0xFF800000, 0x00000001], dtype=np.uint32)
    loaded = round_trip(with_sequence(logprobs=bits.view(np.float32)))
    assert (
        loaded.groups[0].episodes[0].sequences[1].logprobs.view(np.uint32).tolist() == bits.tolist()
    )


def test_an_infinite_reward_of_an_episode_is_read_back() -> None:
    loaded = round_trip(
        builders.shard(builders.group(builders.episode(reward=float("-inf"), speed=float("nan"))))
    )
    assert loaded.groups[0].episodes[0].reward == float("-inf")
    assert np.isnan(loaded.groups[0].episodes[0].metrics["speed"])


def array(values: list[float], kind: type) -> NDArray[Any]:
    return np.array(values, dtype=kind)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tokens": array([1] * 4, np.int32)}, "row 1: loss_mask and tokens differ in length"),
        ({"versions": array([-1] * 6, np.int32)}, "row 1: versions and tokens differ in length"),
        (
            {"owners": array([-1, -1, 0, 0, 2], np.int8)},
            "row 1, token 4: owners name a policy that does not exist",
        ),
        (
            {"owners": array([-2, -1, 0, 0, 0], np.int8)},
            "row 1, token 0: owners name a policy that does not exist",
        ),
        (
            {"loss_mask": array([0, 1, 1, 1, 1], np.bool_)},
            "row 1, token 1: loss_mask is True on a token that was not sampled",
        ),
        (
            {"versions": array([-1, -1, 0, -1, 0], np.int32)},
            "row 1, token 3: versions are negative on a sampled token",
        ),
        (
            {"versions": array([0, -1, 0, 0, 0], np.int32)},
            "row 1, token 0: versions name one on a token that was not sampled",
        ),
        (
            {"logprobs": array([0, -1, -1, -1, -1], np.float32)},
            "row 1, token 1: logprobs are not 0",
        ),
        ({"tokens": array([11, 12, 40, -1, 2], np.int32)}, "row 1, token 3: tokens are negative"),
        (
            {"policies": ("solver", "solver")},
            r"policy set \['solver', 'solver'\] names a policy twice",
        ),
        ({"finish_reason": "bored"}, "unknown finish reason"),
        (
            {"temperature": float("nan")},
            "row 1: the temperature is nan; it is 0, or from 1e-12 to 1e\\+12",
        ),
        ({"temperature": float("inf")}, "row 1: the temperature is inf"),
        ({"temperature": -1.0}, "row 1: the temperature is -1"),
        ({"temperature": 9e-13}, "row 1: the temperature is 9e-13"),
    ],
)
def test_a_sequence_that_violates_its_schema_is_corrupt(
    changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(CorruptError, match=sentence):
        round_trip(with_sequence(**changes))


def test_the_smallest_allowed_values_are_read_back() -> None:
    """Token 0, version 0 and the first policy: the values that a looser or a stricter check would
    treat differently.
    """
    lowest = with_sequence(
        tokens=array([0] * 5, np.int32), versions=array([-1, -1, 0, 0, 0], np.int32)
    )
    loaded = round_trip(lowest).groups[0].episodes[0].sequences[1]
    assert loaded.tokens.tolist() == [0] * 5
    assert loaded.versions.tolist() == [-1, -1, 0, 0, 0]
    assert loaded.owners.tolist() == [-1, -1, 0, 0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e12])
def test_a_temperature_at_a_bound_is_read_back(temperature: float) -> None:
    loaded = round_trip(with_sequence(temperature=temperature))
    assert loaded.groups[0].episodes[0].sequences[1].temperature == temperature


def test_an_order_number_below_0_is_corrupt() -> None:
    with pytest.raises(
        CorruptError,
        match="a shard's header is not a _Header: order: Input should be greater than or equal to 0",
    ):
        round_trip(builders.shard(order=-1))


def test_a_shard_that_arrives_damaged_once_is_read_again(memory_store: ObjectStore) -> None:
    shards.create(memory_store, builders.shard(order=3))
    assert shards.read(damages_first_reads(memory_store), 3).order == 3


def test_a_header_that_does_not_match_the_rows_is_corrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    header = shards._header

    def longer(shard: Shard, sets: tuple[tuple[str, ...], ...]) -> object:
        return header(replace(shard, groups=(*shard.groups, builders.group())), sets)

    monkeypatch.setattr(shards, "_header", longer)
    with pytest.raises(CorruptError, match="a shard has 2 rows; its header lists 4 sequences"):
        round_trip(builders.shard())


def test_rows_in_another_order_than_the_header_are_corrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    header = shards._header
    swapped = builders.shard(
        builders.group(
            builders.episode(), builders.episode(builders.sequence(), builders.sequence())
        )
    )
    monkeypatch.setattr(shards, "_header", lambda shard, sets: header(swapped, sets))
    shard = builders.shard(
        builders.group(
            builders.episode(builders.sequence(), builders.sequence()), builders.episode()
        )
    )
    with pytest.raises(
        CorruptError,
        match=r"row 1 of a shard is group, episode, sequence \[0 0 1\]; expected \[0 1 0\]",
    ):
        round_trip(shard)


def test_the_first_shard_of_an_order_is_the_only_one(memory_store: ObjectStore) -> None:
    assert not shards.exists(memory_store, 0)
    assert shards.create(memory_store, builders.shard(builders.group(prompt_id="first")))
    assert not shards.create(memory_store, builders.shard(builders.group(prompt_id="twin")))
    assert shards.exists(memory_store, 0)
    assert shards.read(memory_store, 0).groups[0].prompt.id == "first"


def test_an_equal_second_shard_loses(memory_store: ObjectStore) -> None:
    assert shards.create(memory_store, builders.shard())
    assert not shards.create(memory_store, builders.shard())


def test_a_shard_with_more_bytes_than_readers_accept_is_refused(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "ARROW_BYTES_MAX", 99)
    with pytest.raises(
        ObjectTooLargeError, match=r"^shards/00000000\.arrow has [\d,]+ bytes; .* most 99$"
    ):
        shards.create(memory_store, builders.shard(order=0))
    assert not shards.exists(memory_store, 0)


def test_unreadable_and_misplaced_shards_are_named(memory_store: ObjectStore) -> None:
    with pytest.raises(NotFoundError):
        shards.read(memory_store, 3)
    memory_store.put("shards/00000003.arrow", b"garbage")
    with pytest.raises(
        CorruptError,
        match=r"shards/00000003\.arrow: a shard file of 7 bytes is no readable Arrow file",
    ):
        shards.read(memory_store, 3)
    memory_store.put("shards/00000003.arrow", shards.encode(builders.shard(order=2)))
    with pytest.raises(CorruptError, match=r"shards/00000003\.arrow holds the shard of order 2"):
        shards.read(memory_store, 3)


def test_arrays_of_a_decoded_shard_are_views(memory_store: ObjectStore) -> None:
    sequence: Sequence = round_trip(builders.shard()).groups[0].episodes[0].sequences[0]
    assert not sequence.tokens.flags.owndata
    for name in shards.TOKEN_COLUMNS:
        assert not getattr(sequence, name).flags.writeable


def test_very_long_names_of_worker_region_and_sequence_are_cut_when_a_shard_is_read() -> None:
    long, cut = "x" * 100_000, "x" * shards.NAME_MAX
    group = builders.group(builders.episode(builders.sequence(name=long)))
    read = round_trip(replace(builders.shard(group), worker=long, region=long))
    assert (read.worker, read.region) == (cut, cut)
    assert read.groups[0].episodes[0].sequences[0].name == cut


def test_the_checks_of_a_shard_take_few_bytes_for_each_token() -> None:
    num_tokens = 2**20
    sequence = builders.sequence(answer=[1] * num_tokens)
    body = shards.encode(builders.shard(builders.group(builders.episode(sequence))))
    tracemalloc.start()
    shards.decode(body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * num_tokens


def test_sequences_of_very_many_policies_are_neither_stored_nor_read(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = tuple(f"p{number}" for number in range(128))
    sequence = replace(builders.sequence(), policies=policies)
    allowed = builders.shard(builders.group(builders.episode(*[sequence] * 128)))
    assert round_trip(allowed).groups[0].episodes[0].sequences[0].policies == policies
    bomb = builders.shard(builders.group(builders.episode(*[sequence] * 1000)))
    with pytest.raises(ObjectTooLargeError, match="have 128000 policies together"):
        shards.create(store, bomb)
    with monkeypatch.context() as unlimited:
        unlimited.setattr(shards, "POLICIES_MIN", 2**20)
        body = shards.encode(bomb)
    with pytest.raises(CorruptError, match="have 128000 policies together; that is too many"):
        shards.decode(body)


def test_very_many_sequences_in_few_bytes_are_neither_stored_nor_read(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them is a kilobyte of Python objects."""
    empty = replace(builders.sequence((), ()), policies=())
    allowed = builders.shard(builders.group(builders.episode(*[empty] * 2**14)))
    assert len(round_trip(allowed).groups[0].episodes[0].sequences) == 2**14
    bomb = builders.shard(builders.group(builders.episode(*[empty] * (2**14 + 1))))
    with pytest.raises(ObjectTooLargeError, match="has 16385 sequences; that is too many"):
        shards.create(store, bomb)
    with monkeypatch.context() as unlimited:
        unlimited.setattr(arrow_sizes, "SEQUENCES_MIN", 2**20)
        body = shards.encode(bomb)
    with pytest.raises(CorruptError, match=r"of \d+ bytes has 16385 sequences; that is too many"):
        shards.decode(body)
