"""Audit of evaluations, their samples and tags: each can be read, and names versions that exist.

A sample exists where its evaluation says that episodes are kept.
"""

from collections.abc import Mapping

from storage import layout
from storage.errors import UNREADABLE, NotFoundError
from storage.run import evaluation_samples, evaluations
from storage.run.evaluations import Evaluations
from storage.store.object_store import ObjectStore
from storage.verify.violations import Findings, Invariant
from storage.weights import tags


def read_named_versions(run: ObjectStore, findings: Findings) -> dict[str, dict[str, int]]:
    """Return the versions that every evaluation, sample and tag names: key → policy → version.

    One that cannot be read is a violation. Evaluations are read from the store, not from the
    process's cache.
    """
    stored_evaluations = evaluations.read_all(run, cached=False)
    stored_tags = tags.read_all(run)
    for key, why in {**stored_evaluations.unreadable, **stored_tags.unreadable}.items():
        findings.add(Invariant.VERSIONS_EXIST, key, f"cannot be read: {why}")
    return (
        {evaluations.key(each): dict(each.versions) for each in stored_evaluations.readable}
        | _samples(run, stored_evaluations, findings)
        | {tags.key(tag): {tag.policy: tag.version} for tag in stored_tags.readable}
    )


def _samples(
    run: ObjectStore, stored: Evaluations, findings: Findings
) -> dict[str, dict[str, int]]:
    """Return the versions that each sample names; one that is damaged or missing is a violation."""
    named: dict[str, dict[str, int]] = {}
    try:
        keys = evaluation_samples.keys(run)  # after the evaluations, which are written later
    except UNREADABLE as error:
        findings.add(Invariant.VERSIONS_EXIST, layout.EVAL_SAMPLES, f"cannot be listed: {error}")
        return named
    for each in stored.readable:
        key = layout.evaluation_sample(each.versions)
        if each.num_kept and key not in keys:
            findings.add(
                Invariant.VERSIONS_EXIST,
                key,
                f"is missing; {evaluations.key(each)} says that it has {each.num_kept} episodes",
            )
    for key in keys:
        try:
            named[key] = dict(evaluation_samples.read_key(run, key).versions)
        except NotFoundError:
            continue
        except UNREADABLE as error:
            findings.add(Invariant.VERSIONS_EXIST, key, f"cannot be read: {error}")
    return named


def check_named_versions(
    named: Mapping[str, Mapping[str, int]],
    published: Mapping[str, Mapping[int, str]],
    findings: Findings,
) -> None:
    """Check that every version that is named was published.

    Args:
        named: key → policy → version.
        published: policy → version → digest.
    """
    for key, versions in named.items():
        for policy, version in versions.items():
            if version not in published.get(policy, {}):
                findings.add(
                    Invariant.VERSIONS_EXIST,
                    key,
                    f"names version {version} of {policy}, which does not exist",
                )
