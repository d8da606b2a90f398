"""What holds for every episode and sequence of a shard.

    shards.decode  ──▶ check_failure, check_policies, check_temperatures, check_finish_reasons,
                       check_tokens
    rollout worker ──▶ storable_episode ──▶ the same checks, before an episode is part of a shard

All of them raise CorruptError.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage import layout, plain_names
from storage.config_model import TEMPERATURE_MAX, TEMPERATURE_MIN
from storage.errors import CorruptError
from storage.formats import json_values
from storage.formats.ragged_lists import TokenLists
from storage.records.rollouts import NOT_SAMPLED, POLICIES_MAX, Episode, FailureKind, Sequence
from storage.records.types import Bool, Int8, Int32

FINISH_REASONS = frozenset({"stop", "length", "abort"})
METRICS_MAX = 1_000
"""Metrics of an episode that is added to a shard, so that one episode alone cannot exceed the
limits of a shard. Not checked when a shard is read.
"""
TOKEN_DTYPES = {
    "tokens": np.dtype(np.int32),
    "loss_mask": np.dtype(np.bool_),
    "logprobs": np.dtype(np.float32),
    "owners": np.dtype(np.int8),
    "versions": np.dtype(np.int32),
}
"""The arrays of a sequence that have one value for each token."""


def check_failure(error: str | None, failure_kind: FailureKind | None) -> None:
    """Check that only an episode with an error has a failure kind."""
    if failure_kind is not None and error is None:
        raise CorruptError(
            f"an episode of a shard has the failure kind {failure_kind} and no error"
        )


def check_policies(policies: tuple[str, ...]) -> None:
    """Check the names that the owners of a sequence index."""
    if len(policies) > POLICIES_MAX:
        raise CorruptError(
            f"a shard's policy set has {len(policies):,} policies; it has at most {POLICIES_MAX}"
        )
    if len(set(policies)) < len(policies):
        raise CorruptError(f"a shard's policy set {list(policies)} names a policy twice")
    check_policy_names(policies)


def check_policy_names(policies: Iterable[str]) -> None:
    for policy in policies:
        if not layout.NAME.fullmatch(policy):
            raise CorruptError(
                f"a shard has the policy {plain_names.quoted(policy)}, which is not a valid name"
            )


def check_temperatures(values: NDArray[np.float64]) -> None:
    """Check that all of `values` [rows] are valid temperatures."""
    is_valid = (values == 0) | ((values >= TEMPERATURE_MIN) & (values <= TEMPERATURE_MAX))
    if (wrong_rows := np.flatnonzero(~is_valid)).size:
        row = wrong_rows[0]
        raise CorruptError(
            f"row {row}: the temperature is {values[row]:g}; "
            f"it is 0, or from {TEMPERATURE_MIN:g} to {TEMPERATURE_MAX:g}"
        )


def check_finish_reasons(reasons: Iterable[str]) -> None:
    if unknown := set(reasons) - FINISH_REASONS:
        reason = plain_names.quoted(min(unknown))
        raise CorruptError(f"a shard has the unknown finish reason {reason}")


def check_tokens(lists: TokenLists, num_policies: NDArray[np.int64]) -> None:
    """Check every token against the promises of `Sequence`. `num_policies` [rows]."""
    owners: Int8 = lists.values["owners"]
    versions: Int32 = lists.values["versions"]
    mask: Bool = lists.values["loss_mask"]
    sampled = owners != NOT_SAMPLED
    lists.raise_where(lists.values["tokens"] < 0, "tokens are negative")
    # Two bytes for each token, of which a shard of megabytes may have a hundred million.
    num_policies_T = lists.repeat(num_policies.astype(np.int16))
    lists.raise_where(
        (owners < NOT_SAMPLED) | (owners >= num_policies_T),
        "owners name a policy that does not exist",
    )
    lists.raise_where(mask & ~sampled, "loss_mask is True on a token that was not sampled")
    lists.raise_where(sampled & (versions < 0), "versions are negative on a sampled token")
    lists.raise_where(
        ~sampled & (versions != NOT_SAMPLED), "versions name one on a token that was not sampled"
    )
    lists.raise_where(
        ~sampled & (lists.values["logprobs"] != 0),
        "logprobs are not 0 on a token that was not sampled",
    )


def storable_episode(episode: Episode) -> Episode:
    """Return the episode with the types of a shard, after all checks of a reader.

    Accepts any sequences of numbers as arrays, and text as failure kind. A row in a message is the
    index of a sequence of the episode.
    """
    kind = episode.failure_kind
    if kind is not None and kind not in set(FailureKind):
        raise CorruptError(f"the failure kind {kind!r} is none of {', '.join(FailureKind)}")
    check_failure(episode.error, kind)
    if episode.error is not None:
        _check_text("error", episode.error)
    if len(episode.metrics) > METRICS_MAX:
        raise CorruptError(
            f"{len(episode.metrics):,} metrics are more than the limit of {METRICS_MAX:,}; sum up "
            "those of turns or tokens"
        )
    for name in episode.metrics:
        _check_text("the name of a metric", name)
    rows = tuple(
        _storable_sequence(row, sequence) for row, sequence in enumerate(episode.sequences)
    )
    if rows:
        check_temperatures(np.array([row.temperature for row in rows], dtype=np.float64))
        check_finish_reasons(row.finish_reason for row in rows)
        check_tokens(
            TokenLists.from_rows(
                {name: [getattr(row, name) for row in rows] for name in TOKEN_DTYPES}
            ),
            np.array([len(row.policies) for row in rows], dtype=np.int64),
        )
    return replace(episode, sequences=rows, failure_kind=kind and FailureKind(kind))


def _storable_sequence(row: int, sequence: Sequence) -> Sequence:
    _check_text(f"row {row}: name", sequence.name)
    policies = tuple(sequence.policies)
    for policy in policies:
        _check_text(f"row {row}: a policy", policy)
    check_policies(policies)
    arrays: dict[str, Any] = {
        name: _array(f"row {row}: {name}", getattr(sequence, name), dtype)
        for name, dtype in TOKEN_DTYPES.items()
    }
    return replace(sequence, policies=policies, **arrays)


def _check_text(noun: str, value: object) -> None:
    if not isinstance(value, str):
        raise CorruptError(f"{noun} is of the type {type(value).__name__}; it must be text")
    if fault := json_values.fault(value):
        raise CorruptError(f"{noun} {fault[1]}")


def _array(noun: str, values: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return `values` as an array [L] of `dtype`, without a change of any whole number."""
    array = np.asarray(values)
    if array.shape == (0,):
        return array.astype(dtype)  # an empty list has the dtype float64
    if dtype.kind == "b" and array.dtype.kind in "iu" and np.isin(array, (0, 1)).all():
        array = array.astype(dtype)
    if array.ndim != 1 or not np.can_cast(array.dtype, dtype, "same_kind"):
        raise CorruptError(
            f"{noun} is {array.dtype} of the shape {array.shape}; it must be {dtype} [L]"
        )
    cast = array.astype(dtype, copy=False)
    if dtype.kind == "i" and (cast != array).any():
        raise CorruptError(f"{noun} has a number that is no {dtype}")
    return cast
