"""What an object store must be able to do, in six verbs; `objects.py` builds retries, prefixes and lost answers on top.

Implementations: `local_files.py`, `memory_objects.py`, `s3_objects.py`. Each translates its own failures into
`storage.errors` and tries everything exactly once. Keys are checked by the caller: relative, `/` between parts.
"""

from typing import Protocol, TypeAlias

from storage.errors import CorruptError

Keys: TypeAlias = list[str]
"""Named, because within a class with a method `list` the builtin cannot be written."""
JSON_BYTES_MAX = 2**27
"""Of an object whose key ends with `.json` and whose size its reader does not know. A manifest of 100,000 tensors has half."""


def refuse_size(key: str, num_bytes: int, where: str) -> None:
    """CorruptError when the object `key`, which shall be read as a whole, is too large for what its name promises. Asked with
    the object's size, or with as much of it as was read, before anything is made of it."""
    if key.endswith(".json") and num_bytes > JSON_BYTES_MAX:
        raise CorruptError(f"{where} has more than {JSON_BYTES_MAX:,} bytes; that is too many for a JSON object")


class Backend(Protocol):
    """All methods raise TransientError when another try may help, and ConfigError when a person must act."""

    def read(self, key: str) -> bytes:
        """The whole object; NotFoundError when there is none, CorruptError when `refuse_size` says so."""

    def read_part(self, key: str, start: int, end: int) -> bytes:
        """Bytes `start` to `end` of the object, fewer where it ends before; NotFoundError when there is none."""

    def create(self, key: str, body: bytes) -> bool:
        """Atomic put-if-absent: True when this call made the object, False when one stands (perhaps its own, by
        an earlier try whose answer got lost)."""

    def write(self, key: str, body: bytes) -> None:
        """Create or replace; a reader sees the old or the new object, never half of one."""

    def exists(self, key: str) -> bool: ...

    def list(self, prefix: str, start_after: str) -> Keys:
        """Sorted keys that begin with `prefix` (empty, or a folder with its final `/`) and come after `start_after`."""

    def folders(self, prefix: str) -> Keys:
        """Sorted names of the folders directly below `prefix`."""

    def delete(self, key: str) -> None:
        """Deleting what is not there is no error."""
