"""The object store every service meets in: a prefix of a local folder, of memory, or of an S3
bucket.

    caller ──▶ ObjectStore (prefix, bounded retries, lost answers) ──▶ Backend (local_files, memory_objects, s3_objects)

"Created once" is the one primitive everything rests on: of any number of writers exactly one
succeeds, and a reader never sees half an object. This module knows nothing of what the objects
mean. A store may be used from many threads.
"""

import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

import stamina

from storage import plain_names
from storage.errors import (
    AstraFlowError,
    ConfigError,
    ConflictError,
    CorruptError,
    NotFoundError,
    TransientError,
)
from storage.plain_names import new_write_id
from storage.store import s3_url
from storage.store.backend import Backend, Keys, check_size
from storage.store.local import TEMPORARY_PREFIX, LocalFiles
from storage.store.memory import MemoryObjects
from storage.store.ordered_map import ordered_map
from storage.store.s3 import S3Objects

log = logging.getLogger(__name__)

STORE_VARIABLE = "ASTRAFLOW_STORE"
PATIENCE_S = 45.0
"""How long one call goes on trying while the store fails transiently."""
TRIES_MAX = 16
"""Most tries of one call within that time."""
CHECK_PATIENCE_S = 5.0
PART_BYTES_MIN, PART_BYTES_MAX = 2**19, 2**23
"""Objects that are larger are fetched in parts: over an ocean one connection carries 8 MB/s,
whatever the link.
"""
PARTS_MAX = 32
"""Parts of one object that are fetched at once."""

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class ObjectStore:
    """Objects below one prefix of a store. Keys are relative, parts joined by `/`; all errors are
    `AstraFlowError`.
    """

    url: str
    """Of the place alone: messages and links append keys to it."""
    backend: Backend
    prefix: str = ""
    """Empty, or a folder with its final `/`."""
    patience_s: float = PATIENCE_S
    query: str = ""
    """How the place is reached, where its URL said so: `endpoint=https://host&profile=eu`."""

    @property
    def address(self) -> str:
        """The URL by which `open_store` opens this very store in any process."""
        return f"{self.url}?{self.query}" if self.query else self.url

    def get(self, key: str, num_bytes: int = 0) -> bytes:
        """The whole object; NotFoundError when there is none, CorruptError when what is there is no
        file, or larger than its key allows. A large one of known size is fetched in parts, many at
        once.
        """
        path = self._path(key)
        if num_bytes <= PART_BYTES_MIN:
            return self._retried(lambda: self.backend.read(path))
        part_bytes = min(max(-(-num_bytes // PARTS_MAX), PART_BYTES_MIN), PART_BYTES_MAX)

        def part(start: int) -> bytes:
            end = min(start + part_bytes, num_bytes)
            return self._retried(lambda: self.backend.read_part(path, start, end))

        parts: list[bytes] = []
        for found in ordered_map(
            part, range(0, num_bytes, part_bytes), threads=PARTS_MAX, budget=2 * PARTS_MAX
        ):
            parts.append(found)
            if len(found) < part_bytes:
                break  # the object ends here, whatever size it was said to have
        return b"".join(parts)

    def create(self, key: str, body: bytes) -> None:
        """Atomic put-if-absent; ConflictError when an object with another body stands.

        When the same bytes stand, they are taken for this call's own write whose answer got lost.
        Bodies therefore carry a write id wherever two writers could otherwise produce the same
        bytes and both believe they won.
        """
        path = self._path(key)
        try:
            check_size(key, len(body), f"{self.url}/{key}")
        except CorruptError as error:
            raise ConfigError(
                f"{error}, which nobody would read; make prompts, orders or the recipe smaller"
            ) from None

        def commit() -> bool:
            if self.backend.create(path, body):
                return True
            try:
                return self.backend.read(path) == body
            except NotFoundError:
                raise TransientError(
                    f"{self.url}/{key} stood and was deleted while it was being created"
                ) from None
            except CorruptError:  # it is too large to be this one, or no file
                return False

        if not self._retried(commit):
            raise ConflictError(
                f"{self.url}/{key} exists with another body: somebody else was first"
            )

    def put(self, key: str, body: bytes) -> None:
        """Create or overwrite: for hints, renewals by an object's one owner, and files whose name
        holds a write id.
        """
        path = self._path(key)
        self._retried(lambda: self.backend.write(path, body))

    def exists(self, key: str) -> bool:
        path = self._path(key)
        return self._retried(lambda: self.backend.exists(path))

    def list(self, prefix: str = "", start_after: str = "") -> Keys:
        """All keys below the folder `prefix`, sorted, relative to this store; only those after
        `start_after`. What a foreign writer gave a name that cannot be a key is left out.
        """
        folder = self._folder(prefix)
        after = self.prefix + start_after if start_after else ""
        found = self._retried(lambda: self.backend.list(folder, after))
        return [key[len(self.prefix) :] for key in found if _is_key(key)]

    def folders(self, prefix: str = "") -> Keys:
        """Names of the folders directly below `prefix`, sorted, without walking through what lies
        in them.
        """
        folder = self._folder(prefix)
        return [
            name for name in self._retried(lambda: self.backend.folders(folder)) if _is_key(name)
        ]

    def delete(self, key: str) -> None:
        """Deleting what is not there is no error."""
        path = self._path(key)
        self._retried(lambda: self.backend.delete(path))

    def sub(self, prefix: str) -> "ObjectStore":
        """The same store seen from the folder `prefix`."""
        folder = self._path(prefix.rstrip("/"))
        return replace(self, url=f"{self.url}/{prefix.rstrip('/')}", prefix=f"{folder}/")

    def _path(self, key: str) -> str:
        if not _is_key(key):
            raise ConfigError(
                f"{plain_names.quoted(key)} cannot be a key of {self.url}; "
                "its parts must be plain names joined by single slashes"
            )
        return self.prefix + key

    def _folder(self, prefix: str) -> str:
        return f"{self._path(prefix.rstrip('/'))}/" if prefix else self.prefix

    def _retried(self, call: Callable[[], R]) -> R:
        """`call` again and again, with jittered pauses, while it fails transiently and patience
        lasts.
        """
        for attempt in stamina.retry_context(
            on=TransientError, attempts=TRIES_MAX, timeout=self.patience_s, wait_jitter=0.5
        ):
            with attempt:
                try:
                    return call()
                except TransientError as error:
                    log.info("try %d of %d: %s", attempt.num, TRIES_MAX, error)
                    raise
        raise AssertionError("stamina either returns or raises")


def open_store(url: str) -> ObjectStore:
    """The store at `url`: a path, `file:///path`, `memory://name` or `s3://bucket/prefix`. Touches
    nothing yet.

    `s3://bucket/prefix?endpoint=https://host&profile=eu` names the server and the profile of
    `~/.aws` for this store alone. A URL that cannot be opened, or that holds credentials, is a
    ConfigError, which does not repeat them.
    """
    scheme, _, rest = url.partition("://")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)", url):
        raise ConfigError(
            f"the store URL {url.partition(':')[0]}:/… has one slash after its scheme; write two: "
            "s3://bucket/prefix"
        )
    if "://" in url and not url.isprintable():
        raise ConfigError(
            f"the store URL {url!r} holds a character that cannot be printed; write it as %XX, or "
            "leave it out"
        )
    if not rest:
        if "://" in url or not url:
            raise ConfigError(
                f"the store URL {url!r} names no place; write a path, or s3://bucket/prefix"
            )
        return _local(url)
    if scheme == "file":
        return _local(_file_path(rest))
    if scheme == "memory":
        return ObjectStore(url=url.rstrip("/"), backend=MemoryObjects(f"/{rest.strip('/')}"))
    if scheme == "s3":
        place = s3_url.parse(url)
        return ObjectStore(url=place.url, backend=S3Objects(place), query=place.query)
    raise ConfigError(
        f"the store URL {scheme}://… has the unknown scheme {scheme!r}; use a path, file, memory "
        "or s3"
    )


def default_store() -> ObjectStore:
    """The store that ASTRAFLOW_STORE names, else `.astraflow/store` in the working directory."""
    return open_store(os.environ.get(STORE_VARIABLE) or str(Path.cwd() / ".astraflow" / "store"))


def check_store(store: ObjectStore) -> None:
    """Prove that the store can be written and that put-if-absent holds; ConfigError says what fails
    and what to do.
    """
    probe = replace(store, patience_s=min(store.patience_s, CHECK_PATIENCE_S))
    key = f"checks/{new_write_id()}"
    try:
        probe.create(key, b"first")
        if probe.get(key) != b"first":
            raise ConfigError(
                f"the store {store.address} returns other bytes than were written; use another "
                "store"
            )
        _second_create_loses(probe, key)
        probe.delete(key)
    except ConfigError as error:
        named = os.environ.get(STORE_VARIABLE)
        if STORE_VARIABLE in str(error) or not named or open_store(named).address != store.address:
            raise
        raise ConfigError(f"{error} ({STORE_VARIABLE} names this store)") from error
    except AstraFlowError as error:
        raise ConfigError(
            f"the store {store.address} cannot be used: {error}; correct {STORE_VARIABLE}, or "
            "start the server it names"
        ) from error


def _is_key(key: str) -> bool:
    """Whether all parts are plain names: none that leads elsewhere, is a temporary file's, or
    cannot be printed.
    """
    parts = key.split("/")
    return key.isprintable() and not any(
        part in ("", ".", "..") or part.startswith(TEMPORARY_PREFIX) for part in parts
    )


def _second_create_loses(store: ObjectStore, key: str) -> None:
    try:
        store.create(key, b"second")
    except ConflictError:
        return
    raise ConfigError(
        f"the store {store.address} overwrites objects that must be created once (it ignores "
        "If-None-Match); "
        "use one that honours conditional writes, such as AWS S3, Ceph, MinIO or a local folder"
    )


def _file_path(rest: str) -> str:
    """The path of `file://rest`. ConfigError for one of another machine, of none, or with
    parameters.
    """
    machine, slash, path = rest.partition("/")
    if machine not in ("", "localhost"):
        machine = machine.rpartition("@")[2]
        raise ConfigError(
            f"the store URL file://{machine}{slash}… names the machine {machine!r}, and a file URL "
            "reaches this one only; "
            f"write three slashes, file:///{path or machine}, for the folder /{path or machine} "
            "here"
        )
    for mark, spelled in (("?", "%3F"), ("#", "%23")):
        if mark in path:
            raise ConfigError(
                f"a store URL file:///path takes no parameters; write a {mark} of the path as "
                f"{spelled}"
            )
    if not path:
        raise ConfigError(f"the store URL file://{rest} names no folder; write file:///path")
    return f"/{unquote(path)}"


def _local(path: str) -> ObjectStore:
    try:
        absolute = Path(path).expanduser().absolute()
        named = os.fsencode(absolute)
    except (
        RuntimeError,
        ValueError,
    ) as error:  # a user that is not there; characters that no file system takes
        raise ConfigError(
            f"the store {path!r} can be no folder ({error}); write another path"
        ) from None
    if b"\0" in named:
        raise ConfigError(
            f"the store {path!r} can be no folder, because its name holds a NUL; write another path"
        )
    return ObjectStore(url=absolute.as_uri(), backend=LocalFiles(absolute))


def read_twice(read: Callable[[], R]) -> R:
    """What `read` returns; it is called again when it raises CorruptError, and then that stands."""
    try:
        return read()
    except CorruptError:
        return read()
