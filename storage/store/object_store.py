"""The object store: keys below a prefix of a local folder, of memory, or of an S3 bucket.

    caller ──▶ ObjectStore (prefix, bounded retries, lost answers) ──▶ Backend (local, memory, s3)

Everything rests on one primitive, "created once": of any number of writers exactly one succeeds,
and a reader never sees a partial object. A store may be used from many threads.
"""

import logging
import os
import random
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

import tenacity

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
"""How long a call is retried while the store fails transiently."""
TRIES_MAX = 16
"""Tries of one call within that time."""
BACKOFF_S, BACKOFF_MAX_S, JITTER_S = 0.1, 5.0, 0.5
"""First and longest pause between two tries; it doubles with each try. A random part of the jitter
is added.
"""
CHECK_PATIENCE_S = 5.0
PART_BYTES_MIN, PART_BYTES_MAX = 2**19, 2**23
"""An object of known size that exceeds the lower bound is fetched in parts of a size in this range:
over an ocean one connection carries 8 MB/s, whatever the link.
"""
PARTS_MAX = 32
"""Parts of one object that are fetched at once."""

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class ObjectStore:
    """The objects below one prefix of a store.

    Keys are relative to it, their parts joined by `/`. All errors are `AstraFlowError`.
    """

    url: str
    """URL without query: messages and links append keys to it."""
    backend: Backend
    prefix: str = ""
    """Empty, or a folder with its final `/`."""
    patience_s: float = PATIENCE_S
    query: str = ""
    """Query of the URL: `endpoint=https://host&profile=eu`."""

    @property
    def address(self) -> str:
        """The URL with which `open_store` opens this store in any process."""
        return f"{self.url}?{self.query}" if self.query else self.url

    def get(self, key: str, num_bytes: int = 0) -> bytes:
        """Read a whole object.

        Args:
            num_bytes: the size, if it is known; a large object is then fetched in parallel parts.

        Raises:
            NotFoundError: the object does not exist.
            CorruptError: it is not a file, or larger than its key allows.
        """
        path = self._path(key)
        if num_bytes <= PART_BYTES_MIN:
            return self._retry(lambda: self.backend.read(path))
        part_bytes = min(max(-(-num_bytes // PARTS_MAX), PART_BYTES_MIN), PART_BYTES_MAX)

        def read_part(start: int) -> bytes:
            end = min(start + part_bytes, num_bytes)
            return self._retry(lambda: self.backend.read_part(path, start, end))

        starts = range(0, num_bytes, part_bytes)
        parts: list[bytes] = []
        with ordered_map(read_part, starts, threads=PARTS_MAX, budget=2 * PARTS_MAX) as bodies:
            for body in bodies:
                parts.append(body)
                if len(body) < part_bytes:
                    break  # the object ends here, even if `num_bytes` is larger
        return b"".join(parts)

    def create(self, key: str, body: bytes) -> None:
        """Create an object if it is absent, atomically; ConflictError when it exists.

        An existing object with the same bytes is taken for the result of an earlier try of this
        call whose answer was lost. Therefore bodies contain a write id wherever two writers could
        produce the same bytes.
        """
        path = self._path(key)
        try:
            check_size(key, len(body), f"{self.url}/{key}")
        except CorruptError as error:
            raise ConfigError(
                f"{error}, or readers reject it; make prompts, orders or the recipe smaller"
            ) from None

        def create_or_compare() -> bool:
            """Return whether the object has `body` now."""
            if self.backend.create(path, body):
                return True
            try:
                return self.backend.read(path) == body
            except NotFoundError:
                raise TransientError(
                    f"{self.url}/{key} was deleted while it was being created"
                ) from None
            except CorruptError:  # it is too large to be this one, or not a file
                return False

        if not self._retry(create_or_compare):
            raise ConflictError(
                f"{self.url}/{key} exists with another body: another writer was first"
            )

    def put(self, key: str, body: bytes) -> None:
        """Create or overwrite an object.

        For hints, for renewals by the only owner of an object, and for files whose name contains a
        write id.
        """
        path = self._path(key)
        self._retry(lambda: self.backend.write(path, body))

    def exists(self, key: str) -> bool:
        """Return whether the object exists, readable or not."""
        path = self._path(key)
        return self._retry(lambda: self.backend.exists(path))

    def list(self, prefix: str = "", start_after: str = "") -> Keys:
        """List the keys below the folder `prefix`, sorted, relative to this store.

        Only keys after `start_after` are listed. Names that are not valid keys are omitted: other
        programs wrote them.
        """
        folder = self._folder(prefix)
        after = self.prefix + start_after if start_after else ""
        paths = self._retry(lambda: self.backend.list(folder, after))
        return [path[len(self.prefix) :] for path in paths if _is_key(path)]

    def folders(self, prefix: str = "") -> Keys:
        """List the names of the folders directly below `prefix`, sorted, without their contents."""
        folder = self._folder(prefix)
        names = self._retry(lambda: self.backend.folders(folder))
        return [name for name in names if _is_key(name)]

    def delete(self, key: str) -> None:
        """Delete the object if it exists."""
        path = self._path(key)
        self._retry(lambda: self.backend.delete(path))

    def sub(self, prefix: str) -> "ObjectStore":
        """Return the same store with the keys relative to the folder `prefix`."""
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

    def _retry(self, call: Callable[[], R]) -> R:
        return retried(call, self.patience_s)


def retried(call: Callable[[], R], patience_s: float = PATIENCE_S) -> R:
    """Return the result of `call`, which is repeated while it raises TransientError."""
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(TransientError),
        wait=_backoff_s,
        stop=tenacity.stop_after_attempt(TRIES_MAX) | tenacity.stop_after_delay(patience_s),
        after=_log_failure,
        reraise=True,
    )
    return retrying(call)


def open_store(url: str) -> ObjectStore:
    """Open the store at a path, `file:///path`, `memory://name` or `s3://bucket/prefix`.

    Nothing is read or written yet. `s3://bucket/prefix?endpoint=https://host&profile=eu` sets the
    server and the profile of `~/.aws` for this store alone.

    Raises ConfigError for an invalid URL, and for one with credentials, which are not repeated.
    """
    scheme, _, rest = url.partition("://")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)", url):
        raise ConfigError(
            f"the store URL {url.partition(':')[0]}:/… has one slash after its scheme; write two: "
            "s3://bucket/prefix"
        )
    if "://" in url and not url.isprintable():
        raise ConfigError(
            f"the store URL {url!r} has a character that cannot be printed; write it as %XX, or "
            "remove it"
        )
    if not rest:
        if "://" in url or not url:
            raise ConfigError(
                f"the store URL {url!r} has no path; write a path, or s3://bucket/prefix"
            )
        return _local(url)
    if scheme == "file":
        return _local(_file_path(rest))
    if scheme == "memory":
        return ObjectStore(url=url.rstrip("/"), backend=MemoryObjects(f"/{rest.strip('/')}"))
    if scheme == "s3":
        location = s3_url.parse(url)
        return ObjectStore(url=location.url, backend=S3Objects(location), query=location.query)
    raise ConfigError(
        f"the store URL {scheme}://… has the unknown scheme {scheme!r}; use a path, file, memory "
        "or s3"
    )


def default_store() -> ObjectStore:
    """Open the store of ASTRAFLOW_STORE, else `.astraflow/store` in the working directory."""
    return open_store(os.environ.get(STORE_VARIABLE) or str(Path.cwd() / ".astraflow" / "store"))


def check_store(store: ObjectStore) -> None:
    """Test that the store can be written and that put-if-absent works; ConfigError if not."""
    probe = replace(store, patience_s=min(store.patience_s, CHECK_PATIENCE_S))
    key = f"checks/{new_write_id()}"
    try:
        probe.create(key, b"first")
        if probe.get(key) != b"first":
            raise ConfigError(
                f"the store {store.address} returns other bytes than were written; use another "
                "store"
            )
        _check_create_once(probe, key)
        probe.delete(key)
    except ConfigError as error:
        url = os.environ.get(STORE_VARIABLE)
        if STORE_VARIABLE in str(error) or not url or open_store(url).address != store.address:
            raise
        raise ConfigError(f"{error} ({STORE_VARIABLE} names this store)") from error
    except AstraFlowError as error:
        raise ConfigError(
            f"the store {store.address} cannot be used: {error}; correct {STORE_VARIABLE}, or "
            "start the server it names"
        ) from error


def _is_key(key: str) -> bool:
    """Return whether all parts are printable names, none `.`, `..` or that of a temporary file."""
    parts = key.split("/")
    return key.isprintable() and not any(
        part in ("", ".", "..") or part.startswith(TEMPORARY_PREFIX) for part in parts
    )


def _check_create_once(store: ObjectStore, key: str) -> None:
    """Raise ConfigError when a second create of `key` succeeds."""
    try:
        store.create(key, b"second")
    except ConflictError:
        return
    raise ConfigError(
        f"the store {store.address} overwrites objects that must be created once (it ignores "
        "If-None-Match); "
        "use one that supports conditional writes, such as AWS S3, Ceph, MinIO or a local folder"
    )


def _file_path(rest: str) -> str:
    """Return the path of `file://rest`; ConfigError for another machine, no path, or parameters."""
    machine, slash, path = rest.partition("/")
    if machine not in ("", "localhost"):
        machine = machine.rpartition("@")[2]
        raise ConfigError(
            f"the store URL file://{machine}{slash}… names the machine {machine!r}, and a file URL "
            "reaches this one only; "
            f"write three slashes, file:///{path or machine}, for the folder /{path or machine} "
            "here"
        )
    for character, escape in (("?", "%3F"), ("#", "%23")):
        if character in path:
            raise ConfigError(
                f"a store URL file:///path takes no parameters; write a {character} of the path as "
                f"{escape}"
            )
    if not path:
        raise ConfigError(f"the store URL file://{rest} names no folder; write file:///path")
    try:
        return f"/{unquote(path, errors='strict')}"
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the store URL file:///{path} is not UTF-8 ({error.reason}); write another path"
        ) from None


def _local(path: str) -> ObjectStore:
    try:
        absolute = Path(path).expanduser().absolute()
        encoded = str(absolute).encode()
    except (RuntimeError, ValueError) as error:  # an unknown user; invalid characters
        raise ConfigError(
            f"the store {path!r} cannot be a folder ({error}); write another path"
        ) from None
    if b"\0" in encoded:
        raise ConfigError(
            f"the store {path!r} cannot be a folder, because it contains a NUL; write another path"
        )
    return ObjectStore(url=absolute.as_uri(), backend=LocalFiles(absolute))


def _backoff_s(state: tenacity.RetryCallState) -> float:
    backoff_s = BACKOFF_S * 2.0 ** (state.attempt_number - 1) + random.uniform(0, JITTER_S)
    return min(backoff_s, BACKOFF_MAX_S)


def _log_failure(state: tenacity.RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    log.info("try %d of %d: %s", state.attempt_number, TRIES_MAX, error)


def read_twice(read: Callable[[], R]) -> R:
    """Return the result of `read`, which is called a second time if it raises CorruptError.

    The first error, which has all that was decoded before it, is gone by then.
    """
    with suppress(CorruptError):
        return read()
    return read()
