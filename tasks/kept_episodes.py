"""Episodes that an evaluation keeps: which ones, and their storage.

    groups of an evaluation ──selected──▶ eval_samples/{versions}.arrow (created once)

An episode is kept where the digest of its prompt's id is among the lowest. So every evaluation of
every run keeps the same problems of one set, in whatever order they are played, and a larger number
keeps those of a smaller one, too.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence

from storage.errors import ConfigError, ConflictError, CorruptError
from storage.records.rollouts import Group
from storage.run import evaluation_samples
from storage.run.evaluation_samples import TOKENS_MAX, EvaluationSample, num_tokens
from storage.store.object_store import ObjectStore

log = logging.getLogger(__name__)


def selected(groups: Sequence[Group], number: int) -> tuple[Group, ...]:
    """Return the groups to keep, at most `number`, in the order in which they were played.

    The first one that would exceed the tokens of a sample is left out, with all after it.
    """
    ranked = sorted(range(len(groups)), key=lambda index: _rank(groups[index].prompt.id))
    kept: list[int] = []
    tokens = 0
    for index in ranked[:number]:
        tokens += num_tokens(groups[index])
        if tokens > TOKENS_MAX:
            log.warning(
                "%d of %d episodes of the evaluation are kept: more have too many tokens",
                len(kept),
                number,
            )
            break
        kept.append(index)
    return tuple(groups[index] for index in sorted(kept))


def keep(
    run: ObjectStore, versions: Mapping[str, int], groups: Sequence[Group], number: int
) -> int:
    """Store the sample of an evaluation, before the evaluation; return how many episodes it has.

    The first sample of these versions is kept: an evaluation that was interrupted before its end
    finds its own. One that cannot be stored is logged, and delays nothing.
    """
    kept = selected(groups, number)
    if not kept:
        return 0
    sample = EvaluationSample(versions=versions, groups=kept)
    try:
        evaluation_samples.create(run, sample)
    except ConflictError:
        return _num_stored(run, sample)
    except (ConfigError, CorruptError) as error:
        log.warning("no episode of the evaluation is kept: %s", error)
        return 0
    return sample.num_episodes


def _num_stored(run: ObjectStore, sample: EvaluationSample) -> int:
    """Return how many episodes the stored sample has; those of `sample` if it is damaged."""
    try:
        return evaluation_samples.read(run, sample.versions).num_episodes
    except CorruptError as error:
        log.warning("the episodes of an earlier try are damaged: %s", error)
        return sample.num_episodes


def _rank(prompt_id: str) -> bytes:
    return hashlib.sha256(prompt_id.encode("utf-8", "surrogatepass")).digest()
