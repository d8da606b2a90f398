"""Samples of evaluations as Arrow files: a few of its episodes with their tokens, created once.

    eval_samples/{versions}.arrow ──▶ evals/{versions}.arrow, which has the number of its episodes

A sample is created before its evaluation: where an evaluation says that episodes are kept, they
are in the store. Rows and header are those of a shard without its order (`shards.encode_groups`).

A reader checks the bytes, the key, the limits below, and that tokens were sampled with the
evaluated versions. This module does not select the episodes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from storage import layout
from storage.errors import UNREADABLE, CorruptError, ObjectTooLargeError
from storage.plain_names import new_write_id
from storage.records.numbers import Count
from storage.records.rollouts import KEPT_EPISODES_MAX, Group
from storage.run.shards import GroupHeader, PolicySets, decode_groups, encode_groups, group_headers
from storage.store.object_store import ObjectStore, read_twice

KIND = "evaluation_sample"
TOKENS_MAX = 2**21
"""Tokens of all episodes together, 13 bytes each."""
BYTES_MAX = 2**27


@dataclass(frozen=True, kw_only=True)
class EvaluationSample:
    """A few episodes of one evaluation, each with its prompt.

    Example: `EvaluationSample(versions={"solver": 20}, groups=(Group(prompt, (episode,)),))`.
    """

    versions: Mapping[str, int]
    """policy → evaluated version."""
    groups: tuple[Group, ...]

    @property
    def num_episodes(self) -> int:
        return sum(len(group.episodes) for group in self.groups)


@dataclass(frozen=True, kw_only=True)
class _Header:
    versions: Annotated[dict[str, Count], Field(min_length=1)]
    groups: tuple[GroupHeader, ...]
    policy_sets: PolicySets
    write_id: str


def create(run: ObjectStore, sample: EvaluationSample) -> None:
    """Create the sample; ConflictError when one of these versions exists already.

    Raises:
        ObjectTooLargeError: readers would refuse it.
    """
    body = encode(sample)
    if len(body) > BYTES_MAX:
        raise ObjectTooLargeError(f"{len(body):,} bytes are more than the limit of {BYTES_MAX:,}")
    run.create(layout.evaluation_sample(sample.versions), body)


def read(run: ObjectStore, versions: Mapping[str, int]) -> EvaluationSample:
    """Read the sample of the evaluation of these versions.

    Raises NotFoundError where it has none, CorruptError with the key.
    """
    return read_key(run, layout.evaluation_sample(versions))


def read_key(run: ObjectStore, key: str) -> EvaluationSample:
    """Read the sample in the object `key`; the same errors as `read`."""
    try:
        sample = read_twice(lambda: decode(run.get(key)))
        expected_key = layout.evaluation_sample(sample.versions)
    except UNREADABLE as error:
        raise CorruptError(f"{key}: {error}") from error
    if key != expected_key:
        raise CorruptError(f"{key} holds the sample of the versions {dict(sample.versions)}")
    return sample


def keys(run: ObjectStore) -> list[str]:
    """List the keys of all samples of the run."""
    return [key for key in run.list(layout.EVAL_SAMPLES) if key.endswith(".arrow")]


def encode(sample: EvaluationSample) -> bytes:
    """Encode a sample; the same errors as `shards.encode_groups`."""

    def header(policy_sets: PolicySets) -> dict[str, object]:
        groups = group_headers(sample.groups)
        own = _Header(
            versions=dict(sample.versions),
            groups=groups,
            policy_sets=policy_sets,
            write_id=new_write_id(),
        )
        return vars(own)

    return encode_groups(sample.groups, KIND, header)


def decode(body: bytes) -> EvaluationSample:
    """Decode and validate a sample; CorruptError for other bytes, and beyond the limits."""
    if len(body) > BYTES_MAX:
        raise CorruptError(f"{len(body):,} bytes are more than the limit of {BYTES_MAX:,}")
    header, groups = decode_groups(body, KIND, _Header)
    sample = EvaluationSample(versions=header.versions, groups=groups)
    if sample.num_episodes > KEPT_EPISODES_MAX:
        raise CorruptError(
            f"{sample.num_episodes:,} episodes are more than the limit of {KEPT_EPISODES_MAX}"
        )
    if (tokens := sum(map(num_tokens, groups))) > TOKENS_MAX:
        raise CorruptError(f"{tokens:,} tokens are more than the limit of {TOKENS_MAX:,}")
    _check_versions(sample)
    return sample


def num_tokens(group: Group) -> int:
    """Return the tokens of all sequences of a group, sampled or not."""
    return sum(len(sequence.tokens) for episode in group.episodes for sequence in episode.sequences)


def _check_versions(sample: EvaluationSample) -> None:
    """Check that every token was sampled with the evaluated version of its policy."""
    for group in sample.groups:
        for episode in group.episodes:
            for sequence in episode.sequences:
                for policy, is_own in sequence.sampled_by():
                    if (sequence.versions[is_own] != sample.versions.get(policy)).any():
                        raise CorruptError(
                            f"a token of {policy} was sampled with another version than "
                            f"{sample.versions.get(policy)}, which was evaluated"
                        )
