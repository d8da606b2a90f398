"""Files of users that a run reads once: found by a pattern, and copied with their digest.

    find("s3://bucket/feedback/*.jsonl") ──▶ SourceFile (name, size, time) ──fetch──▶ local copy

Local paths, `memory://` and `s3://bucket/key?endpoint=…&profile=…`, with the credentials of a
store on S3: `AWS_…` variables or `~/.aws`, never the address. `*` and `[…]` match within a part of
a path, `**` any number of parts, and `?`, except on S3, one character. As in a shell, a pattern
matches no name that begins with a dot, unless the pattern's own last part does.
"""

import fnmatch
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from storage.errors import ConfigError, ConflictError, NotFoundError
from storage.plain_names import quoted
from storage.records.numbers import TIME_MAX_S
from storage.store import s3_url
from storage.store.addresses import holds_credentials, without_credentials
from storage.store.object_store import retried
from storage.store.ordered_map import ordered_map
from storage.store.s3 import Listed, S3Objects

LISTED_MAX = 1_000_000
"""Files that one pattern looks at on S3."""
PART_BYTES = 2**23
PARTS_AT_ONCE = 8
SCHEMES = ("memory", "s3")
_MAGIC = re.compile(r"[*?[]")


@dataclass(frozen=True)
class SourceFile:
    """One file. Example: `SourceFile("s3://bucket/feedback/1.jsonl", 812, 1700000000.0, …)`."""

    name: str
    """Absolute path, or address without query; unique."""
    num_bytes: int
    modified_s: float
    """Unix time of its last modification."""
    read_part: Callable[[int, int], bytes]
    """Reads the bytes from start to end; ConflictError where the file is another one by now."""


def is_remote(path: str) -> bool:
    """Return whether a path is an address with a scheme, rather than a local path."""
    return "://" in path


def fault(pattern: str) -> str:
    """Return why a path or pattern cannot be used, without repeating a credential; empty for none.

    Nothing is read.
    """
    if not pattern.strip() or not pattern.isprintable():
        return "must be a path or an address of printable characters"
    if holds_credentials(pattern):
        return (
            f"contains a credential beside the address {without_credentials(pattern)}, and recipes "
            "are stored; remove it, and set the AWS_… variables or name a profile of ~/.aws"
        )
    scheme = pattern.partition("://")[0]
    if is_remote(pattern) and scheme not in SCHEMES:
        return f"has the unknown scheme {quoted(scheme)}; use a local path, s3:// or memory://"
    try:
        path = s3_url.parse(pattern).root if scheme == "s3" else pattern
    except ConfigError as error:
        return str(error)
    if any("**" in part and part != "**" for part in path.split("/")):
        return "is no pattern of files: '**' can only be a whole part of a path"
    return ""


def find(patterns: Iterable[str]) -> list[SourceFile]:
    """Return the files that match any of the patterns, each once, sorted by name.

    Raises:
        ConfigError: a folder cannot be listed, or a file has an invalid modification time.
        TransientError: the server does not answer.
    """
    found: dict[str, SourceFile] = {}
    servers: dict[str, str] = {}
    for pattern in patterns:
        if pattern.startswith("s3://"):
            location = s3_url.parse(pattern)
            if servers.setdefault(location.bucket, location.query) != location.query:
                raise ConfigError(
                    f"the bucket {location.bucket} is named with two endpoints or profiles; name "
                    "one, so that each file has one address"
                )
        found |= {file.name: file for file in _find(pattern) if _is_shown(file.name, pattern)}
    for file in found.values():
        if not 0 <= file.modified_s <= TIME_MAX_S:
            raise ConfigError(
                f"{file.name} was modified before 1970 or after 9999; correct the time of the file"
            )
    return [found[name] for name in sorted(found)]


def fetch(file: SourceFile, copy: Path) -> str:
    """Write the file's bytes to the path `copy` and return their digest, `sha256:` + hex.

    Raises:
        ConfigError: the file changes while it is read, or the copy cannot be written.
        TransientError: the server does not answer.
    """

    def read_part(start: int) -> bytes:
        end = min(start + PART_BYTES, file.num_bytes)
        body = retried(lambda: file.read_part(start, end))
        if len(body) != end - start:
            raise ConflictError(f"{file.name} became shorter")
        return body

    digest = hashlib.sha256()
    starts = range(0, file.num_bytes, PART_BYTES)
    try:
        with (
            copy.open("wb") as target,
            ordered_map(
                read_part, starts, threads=PARTS_AT_ONCE, budget=2 * PARTS_AT_ONCE
            ) as parts,
        ):
            for body in parts:
                digest.update(body)
                target.write(body)
    except (ConflictError, NotFoundError) as error:
        raise ConfigError(
            f"{file.name} was changed while it was read; write files under another name and rename "
            "them when they are complete, then start again"
        ) from error
    except OSError as error:
        raise ConfigError(f"{file.name} cannot be copied to {copy.parent}: {error}") from error
    return f"sha256:{digest.hexdigest()}"


def _find(pattern: str) -> Iterator[SourceFile]:
    if pattern.startswith("s3://"):
        return _find_on_s3(pattern)
    return _find_in_memory(pattern) if is_remote(pattern) else _find_locally(pattern)


def _is_shown(name: str, pattern: str) -> bool:
    hidden, asked = (path.rpartition("/")[2].startswith(".") for path in (name, pattern))
    return asked or not hidden


def _find_on_s3(url: str) -> Iterator[SourceFile]:
    location = s3_url.parse(url)
    bucket = S3Objects(replace(location, root=""))
    matches = matcher(location.root)
    prefix, token, num_listed = _MAGIC.split(location.root)[0], "", 0
    while True:
        page, token = retried(partial(bucket.list_page, prefix, token))
        num_listed += len(page)
        if num_listed > LISTED_MAX:
            raise ConfigError(
                f"{url}: more than {LISTED_MAX:,} objects begin with {quoted(prefix)}; write a "
                "pattern with a longer beginning"
            )
        for listed in page:
            if matches(listed.key):
                yield _on_s3(bucket, listed)
        if not token:
            return


def _on_s3(bucket: S3Objects, listed: Listed) -> SourceFile:
    def read_part(start: int, end: int) -> bytes:
        return bucket.read_version(listed.key, listed.etag, start, end)

    name = f"s3://{bucket.bucket}/{listed.key}"
    return SourceFile(name, listed.num_bytes, listed.modified_s, read_part)


def _find_in_memory(url: str) -> Iterator[SourceFile]:
    import fsspec

    filesystem: Any = fsspec.filesystem("memory")
    matches = matcher(str(filesystem._strip_protocol(url)))
    for path, info in filesystem.find("", detail=True).items():
        if not matches(path):
            continue
        state = (info["size"], filesystem.modified(path))

        def read_part(
            start: int, end: int, path: str = path, state: tuple[int, Any] = state
        ) -> bytes:
            body = bytes(filesystem.cat_file(path, start=start, end=end))
            if state != (filesystem.info(path)["size"], filesystem.modified(path)):
                raise ConflictError(f"memory:/{path} was changed")
            return body

        yield SourceFile(f"memory:/{path}", state[0], state[1].timestamp(), read_part)


def expanded(path: str) -> str:
    """Return a local path with the home in the place of `~` or `~user`; others are unchanged.

    So is the name of a file that begins with `~`, as in a shell.
    """
    with suppress(ValueError):  # characters that no user's name has
        return os.path.expanduser(path)
    return path


def _find_locally(pattern: str) -> Iterator[SourceFile]:
    """Yield the regular files, also those behind links."""
    import fsspec

    pattern = os.path.abspath(expanded(pattern))
    paths = [pattern]
    if not os.path.isfile(pattern):  # a name with a bracket is no pattern
        folder = os.path.dirname(_MAGIC.split(pattern)[0])
        if not os.path.isdir(folder):
            return
        depth = None if "**" in pattern else pattern[len(folder) :].count("/") + (folder == "/")
        try:
            found = fsspec.filesystem("file").find(folder, maxdepth=depth, on_error="raise")
        except OSError as error:
            raise ConfigError(
                f"the files {pattern} cannot be listed: {error}; correct the pattern or the "
                "permissions, and start again"
            ) from error
        paths = [*filter(matcher(pattern), found)]
    for path in paths:
        try:
            state = os.stat(path)
        except OSError:  # deleted meanwhile, or a link to nothing
            continue
        if stat.S_ISREG(state.st_mode):
            yield _local(path, state)


def _local(path: str, listed: os.stat_result) -> SourceFile:
    def read_part(start: int, end: int) -> bytes:
        try:
            with open(path, "rb") as file:
                file.seek(start)
                body = file.read(end - start)
                now = os.fstat(file.fileno())
        except FileNotFoundError as error:
            raise NotFoundError(f"{path} was deleted") from error
        if _identity(now) != _identity(listed):
            raise ConflictError(f"{path} was changed")
        return body

    return SourceFile(path, listed.st_size, listed.st_mtime, read_part)


def _identity(state: os.stat_result) -> tuple[int, int, int]:
    return state.st_ino, state.st_size, state.st_mtime_ns


def matcher(pattern: str) -> Callable[[str], bool]:
    """Return the test of a path by a pattern.

    A name that was made for it takes no longer than others of its length: a part is compared by the
    expression of `fnmatch`, which goes back to the last `*` only, and parts go back to the last
    `**` only.
    """
    wanted: list[Callable[[str], object] | None] = [
        None if part == "**" else re.compile(fnmatch.translate("?*" if part == "*" else part)).match
        for part in pattern.split("/")
    ]

    def matches(path: str) -> bool:
        parts = path.split("/")
        at = part = 0
        behind: tuple[int, int] | None = None
        """Where to go on in `wanted` and in `parts` when what follows the last `**` differs."""
        while part < len(parts):
            compare: Callable[[str], object] | None = wanted[at] if at < len(wanted) else _nothing
            if compare is None:
                behind = at + 1, part + 1
                at += 1
            elif compare(parts[part]):
                at, part = at + 1, part + 1
            elif behind is not None:
                at, part = behind
                behind = at, part + 1
            else:
                return False
        return at == len(wanted)

    return matches


def _nothing(part: str) -> None:
    return None
