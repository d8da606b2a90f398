"""Names for versions that a person wants to find again. The data of a tagged version, and what
leads to it, is never let go.

A tag is an object of the run, created once: `tags/{name}.json`. To move a name, take it away and
give it again.
"""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from storage import layout
from storage.errors import UNREADABLE, ConfigError, ConflictError, CorruptError, NotFoundError
from storage.formats.json_objects import seal, unseal
from storage.plain_names import PartName, new_write_id
from storage.records.numbers import Count, UnixTime
from storage.store.object_store import ObjectStore
from storage.weights import manifests

_VERSION = re.compile(r"(.+)@(\d{1,18})", re.ASCII)
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
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


def create(run: ObjectStore, name: str, policy: str, version: int) -> Tag:
    """Name a version. Giving it the name that it has is no error.

    Raises:
        ConfigError: the name cannot be one or belongs to another version; there is no such version,
        or its data was let go.
    """
    if name.isdecimal():
        raise ConfigError(
            f"{name!r} would be taken for a version; let the name begin with a letter"
        )
    if not manifests.exists(run, policy, version):
        raise ConfigError(
            f"{run.url} has no version {version} of {policy!r}; `astraflow weights` lists those it "
            "has"
        )
    tag = Tag(name=name, policy=policy, version=version, at_s=time.time(), write_id=new_write_id())
    try:
        run.create(layout.tag(name), seal(tag))
    except ConflictError:
        stands = read(run, name)
        if (stands.policy, stands.version) == (policy, version):
            return stands
        raise ConfigError(
            f"the name {name} belongs to {stands.policy}@{stands.version}; choose another, or take "
            "it away first"
        ) from None
    # After the tag stands: whoever retires the version now sees the tag, and whoever had begun is
    # seen here.
    if run.exists(layout.retired(policy, version)):
        run.delete(layout.tag(name))
        raise ConfigError(
            f"the data of version {version} of {policy} was let go; tag a version that still has "
            "its own"
        )
    return tag


def resolve(run: ObjectStore, policy: str, word: str) -> int:
    """The version of the policy that a number or a tag names; ConfigError where there is no such
    tag, CorruptError where it is damaged.
    """
    if _NUMBER.fullmatch(word):
        return int(word)
    tagged = look(run)
    found = {tag.name: tag.version for tag in tagged.found if tag.policy == policy}
    if word in found:
        return found[word]
    if layout.NAME.fullmatch(word) and layout.tag(word) in tagged.unreadable:
        raise CorruptError(tagged.unreadable[layout.tag(word)])
    raise ConfigError(
        f"{word!r} is no version of {policy} and none of its tags; those are "
        f"{', '.join(found) or 'none yet'}"
    )


def delete(run: ObjectStore, name: str) -> Tag | None:
    """Take a name away, also from a tag that cannot be read (None is returned); ConfigError where
    no version has it.
    """
    try:
        tag = read(run, name)
    except UNREADABLE:
        tag = None
    except NotFoundError:
        known = ", ".join(tag.name for tag in look(run).found) or "none"
        raise ConfigError(f"no version is tagged {name!r}; tags of the run: {known}") from None
    run.delete(layout.tag(name))
    return tag


def key(tag: Tag) -> str:
    """The key of the tag, relative to its run."""
    return layout.tag(tag.name)


def read(run: ObjectStore, name: str) -> Tag:
    """NotFoundError where there is none; CorruptError when it is damaged, or another tag's copy."""
    place = layout.tag(name)
    tag = unseal(Tag, run.get(place), place)
    if tag.name != name:
        raise CorruptError(f"{place} holds the tag {tag.name!r}")
    return tag


@dataclass(frozen=True)
class Tags:
    """The tags of a run, by policy and version."""

    found: tuple[Tag, ...]
    unreadable: Mapping[str, str]
    """Key → why it cannot be read. `tags` alone: not even their names are known."""


def look(run: ObjectStore) -> Tags:
    """Read every tag of the run."""
    found: list[Tag] = []
    unreadable: dict[str, str] = {}
    try:
        places = run.list(layout.TAGS)
    except ConfigError as error:
        return Tags((), {layout.TAGS: str(error)})
    for place in places:
        name = place.removeprefix(f"{layout.TAGS}/").removesuffix(".json")
        if not layout.NAME.fullmatch(name) or place != layout.tag(name):
            continue  # other keys are no objects of the run
        try:
            found.append(read(run, name))
        except UNREADABLE as error:
            unreadable[place] = str(error)
        except NotFoundError:
            continue  # taken away meanwhile
    return Tags(
        tuple(sorted(found, key=lambda tag: (tag.policy, tag.version, tag.name))), unreadable
    )


def read_all(run: ObjectStore) -> list[Tag]:
    """Every tag of the run, by policy and version. CorruptError for one that cannot be read: what
    it keeps is not known.
    """
    tagged = look(run)
    for place, why in tagged.unreadable.items():
        if place == layout.TAGS:
            raise CorruptError(f"{why}; which versions are tagged is not known")
        name = place.removeprefix(f"{layout.TAGS}/").removesuffix(".json")
        raise CorruptError(
            f"{why}; what it keeps is not known: put it back, or take it away with `astraflow tag "
            f"RUN --remove {name}`"
        )
    return list(tagged.found)
