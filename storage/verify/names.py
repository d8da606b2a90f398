"""Invariant 4 over evaluations and tags: each can be read, lies where it says, and names versions
that exist.
"""

from collections.abc import Callable, Mapping

from storage.run import evaluations
from storage.store.object_store import ObjectStore
from storage.weights import tags

Broken = Callable[[int, str, str], None]
Published = Mapping[str, Mapping[int, str]]
"""policy → version → digest."""


def named_versions(run: ObjectStore, broken: Broken) -> dict[str, dict[str, int]]:
    """Key of every evaluation and tag that can be read → the versions it names. Those that cannot
    are reported.
    """
    found: dict[str, dict[str, int]] = {}
    seen = evaluations.read_all(run)
    found |= {evaluations.key(one): dict(one.versions) for one in seen.readable}
    tagged = tags.look(run)
    found |= {tags.key(tag): {tag.policy: tag.version} for tag in tagged.found}
    for key, why in {**seen.unreadable, **tagged.unreadable}.items():
        broken(4, key, f"cannot be read: {why}")
    return found


def check_named(
    named: Mapping[str, Mapping[str, int]], published: Published, broken: Broken
) -> None:
    """Every version that an evaluation or a tag names was published."""
    for key, versions in named.items():
        for policy, version in versions.items():
            if version not in published.get(policy, {}):
                broken(4, key, f"names version {version} of {policy}, which does not exist")
