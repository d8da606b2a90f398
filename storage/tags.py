"""Names for versions that a person wants to find again. The data of a tagged version, and what leads to it, is never let go.

A tag is an object of the run, created once: `tags/{name}.json`. To move a name, take it away and give it again.
"""

import re
import time
from contextlib import suppress
from dataclasses import dataclass

from storage import layout, weights
from storage.errors import ConfigError, ConflictError, CorruptError, NotFoundError
from storage.json_numbers import Count, UnixTime
from storage.json_objects import new_write_id, seal, unseal
from storage.objects import ObjectStore
from storage.plain_names import PartName

_VERSION = re.compile(r"(.+)@(\d{1,18})", re.ASCII)
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)


@dataclass(frozen=True)
class Tag:
    """Example: `Tag("best", "solver", 40, 1767225600.0)`."""

    name: PartName
    policy: PartName
    version: Count
    at_s: UnixTime
    """Unix time."""
    write_id: str = ""


def parse(word: str) -> tuple[str, int]:
    """`"solver@40"` → `("solver", 40)`; ConfigError for what does not read like this."""
    if (found := _VERSION.fullmatch(word)) is None:
        raise ConfigError(f"{word!r} names no version; write POLICY@VERSION, such as solver@40")
    return found[1], int(found[2])


def give(run: ObjectStore, name: str, policy: str, version: int) -> Tag:
    """Name a version. Giving it the name that it has is no error.

    Raises:
        ConfigError: the name cannot be one or belongs to another version; there is no such version, or its data was let go.
    """
    if name.isdecimal():
        raise ConfigError(f"{name!r} would be taken for a version; let the name begin with a letter")
    if not weights.exists(run, policy, version):
        raise ConfigError(f"{run.url} has no version {version} of {policy!r}; `astraflow weights` lists those it has")
    tag = Tag(name, policy, version, time.time(), new_write_id())
    try:
        run.create(layout.tag(name), seal(tag))
    except ConflictError:
        stands = read(run, name)
        if (stands.policy, stands.version) == (policy, version):
            return stands
        raise ConfigError(
            f"the name {name} belongs to {stands.policy}@{stands.version}; choose another, or take it away first"
        ) from None
    # After the tag stands: whoever retires the version now sees the tag, and whoever had begun is seen here.
    if run.exists(layout.retired(policy, version)):
        run.delete(layout.tag(name))
        raise ConfigError(f"the data of version {version} of {policy} was let go; tag a version that still has its own")
    return tag


def resolve(run: ObjectStore, policy: str, word: str) -> int:
    """The version of the policy that a number or a tag names; ConfigError where there is no such tag."""
    if _NUMBER.fullmatch(word):
        return int(word)
    found = {tag.name: tag.version for tag in read_all(run) if tag.policy == policy}
    if word not in found:
        raise ConfigError(
            f"{word!r} is no version of {policy} and none of its tags; those are {', '.join(found) or 'none yet'}"
        )
    return found[word]


def take(run: ObjectStore, name: str) -> Tag:
    """Take a name away; ConfigError where no version has it."""
    try:
        tag = read(run, name)
    except NotFoundError:
        known = ", ".join(tag.name for tag in read_all(run)) or "none"
        raise ConfigError(f"no version is tagged {name!r}; tags of the run: {known}") from None
    run.delete(layout.tag(name))
    return tag


def read(run: ObjectStore, name: str) -> Tag:
    """NotFoundError where there is none; CorruptError when it is damaged."""
    key = layout.tag(name)
    tag = unseal(Tag, run.get(key), key)
    if tag.name != name:
        raise CorruptError(f"{key} holds the tag {tag.name!r}")
    return tag


def read_all(run: ObjectStore) -> list[Tag]:
    """Every tag of the run, by policy and version. CorruptError for one that is damaged: what it keeps is not known."""
    found = []
    for key in run.list(f"{layout.TAGS}/"):
        name = key.removeprefix(f"{layout.TAGS}/").removesuffix(".json")
        if layout.NAME.fullmatch(name) and key == layout.tag(name):  # other keys are no objects of the run
            with suppress(NotFoundError):  # taken away meanwhile
                found.append(read(run, name))
    return sorted(found, key=lambda tag: (tag.policy, tag.version, tag.name))
