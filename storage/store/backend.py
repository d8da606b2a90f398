"""The interface of a storage backend, implemented in `local.py`, `memory.py` and `s3.py`.

`object_store.py` adds prefixes, retries and the handling of lost answers. A backend tries each
request once and translates its failures into `storage.errors`. Its caller has checked the keys:
relative, `/` between parts.
"""

from typing import Protocol, TypeAlias

from storage.errors import CorruptError

Keys: TypeAlias = list[str]
"""An alias, because `list` is a method in classes that use this type."""
ARROW_BYTES_MAX = 2**30
"""Limit of a shard, a batch or an evaluation. Reading one needs several times as much memory."""
BYTES_MAX = 2**27
"""Limit of other objects of unknown size. A manifest of 100,000 tensors has half of it."""


def check_size(key: str, num_bytes: int, location: str) -> None:
    """Raise CorruptError when an object is too large to be read as a whole.

    Called before the body is read.

    Args:
        num_bytes: the size according to the store.
        location: names the object in the error.
    """
    limit = ARROW_BYTES_MAX if key.endswith(".arrow") else BYTES_MAX
    if num_bytes > limit:
        raise CorruptError(
            f"{location} has {num_bytes:,} bytes; an object of its kind has at most {limit:,}"
        )


class Backend(Protocol):
    """Objects by key.

    All methods raise TransientError when a retry may succeed, and ConfigError when a person must
    act.
    """

    def read(self, key: str) -> bytes:
        """Read a whole object.

        Raises NotFoundError when it does not exist, CorruptError when it is too large
        (`check_size`) or not a file.
        """

    def read_part(self, key: str, start: int, end: int) -> bytes:
        """Read the bytes from `start` to `end`, fewer if the object ends before `end`.

        Raises NotFoundError when it does not exist.
        """

    def create(self, key: str, body: bytes) -> bool:
        """Create the object if it is absent, atomically; return whether this call created it.

        False may also mean that an earlier try, whose answer was lost, created it.
        """

    def write(self, key: str, body: bytes) -> None:
        """Create or replace the object; a reader sees the old or the new one, never a part."""

    def exists(self, key: str) -> bool:
        """Return whether the object exists, readable or not."""

    def list(self, prefix: str, start_after: str) -> Keys:
        """List the keys below `prefix` that are greater than `start_after`, sorted.

        `prefix` is empty, or a folder with its final `/`.
        """

    def folders(self, prefix: str) -> Keys:
        """List the names of the folders directly below `prefix`, sorted."""

    def delete(self, key: str) -> None:
        """Delete the object if it exists."""
