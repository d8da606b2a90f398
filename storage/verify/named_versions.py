"""Audit of evaluations and tags: each can be read, and names versions that exist."""

from collections.abc import Mapping

from storage.run import evaluations
from storage.store.object_store import ObjectStore
from storage.verify.violations import Findings, Invariant
from storage.weights import tags


def read_named_versions(run: ObjectStore, findings: Findings) -> dict[str, dict[str, int]]:
    """Return the versions that every evaluation and tag names: key → policy → version.

    One that cannot be read is a violation. Evaluations are read from the store, not from the
    process's cache.
    """
    stored_evaluations = evaluations.read_all(run, cached=False)
    stored_tags = tags.read_all(run)
    for key, why in {**stored_evaluations.unreadable, **stored_tags.unreadable}.items():
        findings.add(Invariant.VERSIONS_EXIST, key, f"cannot be read: {why}")
    return {evaluations.key(each): dict(each.versions) for each in stored_evaluations.readable} | {
        tags.key(tag): {tag.policy: tag.version} for tag in stored_tags.readable
    }


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
