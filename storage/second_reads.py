"""What reads as damaged may only have been damaged on its way here: it is read once more before it is believed to be."""

from collections.abc import Callable
from typing import TypeVar

from storage.errors import CorruptError

R = TypeVar("R")


def read_twice(read: Callable[[], R]) -> R:
    """What `read` returns; it is called again when it raises CorruptError, and then that stands."""
    try:
        return read()
    except CorruptError:
        return read()
