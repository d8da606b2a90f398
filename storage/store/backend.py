"""What an object store must be able to do, in six verbs; `objects.py` builds retries, prefixes and
lost answers on top.

Implementations: `local_files.py`, `memory_objects.py`, `s3_objects.py`. Each translates its own
failures into `storage.errors` and tries everything exactly once. Keys are checked by the caller:
relative, `/` between parts.
"""

from typing import Protocol, TypeAlias

from storage.errors import CorruptError

Keys: TypeAlias = list[str]
"""Named, because within a class with a method `list` the builtin cannot be written."""
ARROW_BYTES_MAX = 2**30
"""Of a shard, a batch or an evaluation. Arrow asks for several times as much to read one."""
BYTES_MAX = 2**27
"""Of any other object whose size its reader does not know. A manifest of 100,000 tensors has half.
"""


def check_size(key: str, num_bytes: int, where: str) -> None:
    """CorruptError when the object `key`, which shall be read as a whole, is too large for what its
    name promises. Asked with the size that the store tells, before any of it is read.
    """
    most = ARROW_BYTES_MAX if key.endswith(".arrow") else BYTES_MAX
    if num_bytes > most:
        raise CorruptError(
            f"{where} has {num_bytes:,} bytes; an object of its kind has at most {most:,}"
        )


class Backend(Protocol):
    """All methods raise TransientError when another try may help, and ConfigError when a person
    must act.
    """

    def read(self, key: str) -> bytes:
        """The whole object, none of it where `refuse_size` says so (CorruptError). NotFoundError
        when there is none, CorruptError when what is there is no file.
        """

    def read_part(self, key: str, start: int, end: int) -> bytes:
        """Bytes `start` to `end` of the object, fewer where it ends before; NotFoundError when
        there is none.
        """

    def create(self, key: str, body: bytes) -> bool:
        """Atomic put-if-absent: True when this call made the object, False when one stands (perhaps
        its own, by an earlier try whose answer got lost).
        """

    def write(self, key: str, body: bytes) -> None:
        """Create or replace; a reader sees the old or the new object, never half of one."""

    def exists(self, key: str) -> bool: ...

    def list(self, prefix: str, start_after: str) -> Keys:
        """Sorted keys that begin with `prefix` (empty, or a folder with its final `/`) and come
        after `start_after`.
        """

    def folders(self, prefix: str) -> Keys:
        """Sorted names of the folders directly below `prefix`."""

    def delete(self, key: str) -> None:
        """Deleting what is not there is no error."""
