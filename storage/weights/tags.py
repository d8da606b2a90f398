"""Tags: names that a person gives to versions. The data of a tagged version, and of the versions it
is made of, is never retired.

A tag is an object of the run, created once: `tags/{name}.json`. To move a name, delete the tag and
create it again. A run whose version 0 is a version of another run creates a tag
there, which keeps that version as long as the newer run exists.
"""

import hashlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from storage import layout
from storage.errors import UNREADABLE, ConfigError, ConflictError, CorruptError, NotFoundError
from storage.formats.json_objects import seal, unseal
from storage.plain_names import PartName, RunIdOrNone, new_write_id
from storage.records.numbers import Count, UnixTime
from storage.run import runs
from storage.store.object_store import ObjectStore
from storage.weights import manifests

_VERSION = re.compile(r"(.+)@(\d{1,18})", re.ASCII)
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Tag:
    """A name of a version. Example:
    `Tag(name="best", policy="solver", version=40, at_s=1767225600.0)`.
    """

    name: PartName
    policy: PartName
    version: Count
    at_s: UnixTime
    """Unix time of its creation."""
    run: RunIdOrNone = ""
    """The run whose version 0 is this version; empty for the tag of a person."""
    write_id: str = ""

    @property
    def label(self) -> str:
        """What people are shown: the name, or the run that continues from the version."""
        return f"continued-by-{self.run}" if self.run else self.name

    @property
    def reason(self) -> str:
        """Why the version is kept."""
        return f"run {self.run} continues from it" if self.run else f"tagged {self.name}"


def parse(word: str) -> tuple[str, int]:
    """Parse `"solver@40"` into `("solver", 40)`; ConfigError for text of another form."""
    if (match := _VERSION.fullmatch(word)) is None:
        raise ConfigError(f"{word!r} names no version; write POLICY@VERSION, such as solver@40")
    return match[1], int(match[2])


def keep_for(run: ObjectStore, policy: str, version: int, run_id: str) -> Tag:
    """Create the tag that keeps a version for the run `run_id`, which exists; raises what `create`
    raises.
    """
    key = f"{run_id}/{policy}/{version}".encode()
    name = f"run-{hashlib.sha256(key).hexdigest()[:32]}"
    return create(run, name, policy, version, run_id=run_id)


def create(run: ObjectStore, name: str, policy: str, version: int, *, run_id: str = "") -> Tag:
    """Create a tag; one that exists for the same version is returned.

    Args:
        run_id: `Tag.run`.

    Raises:
        ConfigError: the name is not allowed, or belongs to another version; there is no such
            version, or its data was retired.
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
    tag = Tag(
        name=name,
        policy=policy,
        version=version,
        at_s=time.time(),
        run=run_id,
        write_id=new_write_id(),
    )
    try:
        run.create(layout.tag(name), seal(tag))
    except ConflictError:
        tag = read(run, name)
        if (tag.policy, tag.version) != (policy, version):
            raise ConfigError(
                f"the name {name} belongs to {tag.policy}@{tag.version}; choose another, or "
                "remove it first"
            ) from None
        if not tag.run:  # the tag of a run held nothing while that run did not exist
            return tag
    # Checked after the tag was created: a retirement that begins now reads the tag, and one that
    # had begun is detected here.
    if run.exists(layout.retired(policy, version)):
        run.delete(layout.tag(name))
        raise ConfigError(
            f"the data of version {version} of {policy} was retired; tag a version that still has "
            "its data"
        )
    return tag


def resolve(run: ObjectStore, policy: str, word: str) -> int:
    """Return the version of the policy that a number or a tag names.

    Raises:
        ConfigError: there is no such tag.
        CorruptError: the tag is damaged.
    """
    if _NUMBER.fullmatch(word):
        return int(word)
    stored = read_all(run)
    versions = {tag.name: tag.version for tag in stored.readable if tag.policy == policy}
    if word in versions:
        return versions[word]
    if layout.NAME.fullmatch(word) and layout.tag(word) in stored.unreadable:
        raise CorruptError(stored.unreadable[layout.tag(word)])
    raise ConfigError(
        f"{word!r} is no version of {policy} and none of its tags; those are "
        f"{', '.join(versions) or 'none yet'}"
    )


def delete(run: ObjectStore, name: str) -> Tag | None:
    """Delete a tag and return it; None where it could not be read.

    Raises:
        ConfigError: there is no such tag, or it keeps the version for a run.
    """
    tag: Tag | None
    try:
        tag = read(run, name)
    except UNREADABLE:
        tag = None
    except NotFoundError:
        names = ", ".join(tag.name for tag in read_all(run).readable) or "none"
        raise ConfigError(f"no version is tagged {name!r}; tags of the run: {names}") from None
    if tag and tag.run and _holds(run, tag):
        raise ConfigError(
            f"{name} keeps {tag.policy}@{tag.version} for the run {tag.run}, whose version 0 it "
            "is; delete that run first"
        )
    run.delete(layout.tag(name))
    return tag


def key(tag: Tag) -> str:
    """Return the key of the tag, relative to its run."""
    return layout.tag(tag.name)


def read(run: ObjectStore, name: str) -> Tag:
    """Read a tag.

    Raises:
        NotFoundError: there is no such tag.
        CorruptError: it is damaged, or the copy of another tag.
    """
    place = layout.tag(name)
    tag = unseal(Tag, run.get(place), place)
    if tag.name != name:
        raise CorruptError(f"{place} holds the tag {tag.name!r}")
    return tag


@dataclass(frozen=True)
class Tags:
    """The tags of a run, by policy and version."""

    readable: tuple[Tag, ...]
    unreadable: Mapping[str, str]
    """Key → why it cannot be read. The key `tags`: the tags cannot be listed."""


def read_all(run: ObjectStore) -> Tags:
    """Read every tag of the run; one that cannot be read is listed with the reason."""
    readable: list[Tag] = []
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
            readable.append(read(run, name))
        except UNREADABLE as error:
            unreadable[place] = str(error)
        except NotFoundError as error:
            if place in run.list(layout.TAGS):  # else it was deleted meanwhile
                unreadable[place] = f"{place} is listed, but cannot be read: {error}"
    return Tags(
        tuple(sorted(readable, key=lambda tag: (tag.policy, tag.version, tag.name))), unreadable
    )


def require_all(run: ObjectStore) -> list[Tag]:
    """Read every tag of the run, sorted by policy and version.

    Raises:
        CorruptError: one cannot be read, so that the version which it keeps is unknown.
    """
    stored = read_all(run)
    for place, why in stored.unreadable.items():
        if place == layout.TAGS:
            raise CorruptError(f"{why}; which versions are tagged is not known")
        name = place.removeprefix(f"{layout.TAGS}/").removesuffix(".json")
        raise CorruptError(
            f"{why}; what it keeps is not known: put it back, or remove it with `astraflow tag "
            f"RUN --remove {name}`"
        )
    return list(stored.readable)


def holding(run: ObjectStore) -> list[Tag]:
    """Read the tags that keep their versions: all but those for runs that do not exist any more.

    Raises what `require_all` raises.
    """
    return [tag for tag in require_all(run) if _holds(run, tag)]


def _holds(run: ObjectStore, tag: Tag) -> bool:
    return not tag.run or runs.sibling(run, tag.run).exists(layout.RUN)
