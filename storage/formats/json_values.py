"""Checks that a value survives a round trip through JSON: plain, finite, limited in depth and size.

JSON has no NaN and no infinity, UTF-8 has no lone surrogate, and every reader of JSON has a limit
on nesting and on digits. A value that passes cannot fail later, when the object around it is
written or read.
"""

from collections.abc import Iterator
from typing import Any

from storage.records.numbers import INTEGER_BITS

DEPTH_MAX = 32
"""Levels of lists and objects in a value. Far below the limit of any JSON reader, because the value
is nested in other objects.
"""
VALUES_MAX = 500_000
"""Values within a value. An order of four such prompts (the default) is within its own limit
(`json_objects.VALUES_MAX`).
"""
DIGITS_MAX = 39
"""Decimal digits of an integer of INTEGER_BITS."""
_PLAIN = (str, int, float, list, tuple, dict, type(None))


def fault(value: Any) -> tuple[str, str] | None:
    """Return the dotted path and the fault of the first part that JSON cannot represent.

    Returns None when JSON can represent the whole value.
    Example: `fault({"meta": {"score": nan}})` → `("meta.score", "is nan, …")`.
    """
    pending: list[tuple[Any, tuple[str, ...]]] = [(value, ())]
    num_values = 0
    while pending:
        part, path = pending.pop()
        if reason := _fault_of(part, len(path)):
            return ".".join(path), reason
        num_values += len(part) if isinstance(part, dict | list | tuple) else 0
        if num_values > VALUES_MAX:
            return ".".join(path), f"exceeds the limit of {VALUES_MAX:,} values"
        if isinstance(part, dict):
            pending += [(item, (*path, key)) for key, item in reversed(part.items())]
        elif isinstance(part, list | tuple):
            pending += [
                (item, (*path, str(index))) for index, item in reversed(list(enumerate(part)))
            ]
    return None


def strings(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value, keys of objects excepted."""
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, dict):
            pending += part.values()
        elif isinstance(part, list):
            pending += part


def is_plain(value: Any) -> bool:
    """Return whether JSON has a type for the value and for everything in it, ignoring limits."""
    pending = [value]
    while pending:
        part = pending.pop()
        if not isinstance(part, _PLAIN):
            return False
        if isinstance(part, dict):
            pending += part.values()
        elif isinstance(part, list | tuple):
            pending += part
    return True


def storable_text(text: str) -> str:
    """Replace each lone surrogate by `?`, for messages that quote arbitrary text."""
    return text.encode("utf-8", "replace").decode()


def _fault_of(value: Any, depth: int) -> str:
    """Return the fault of the value itself at nesting level `depth`; empty for none."""
    if not isinstance(value, _PLAIN):
        return f"is a {type(value).__name__}, for which JSON has no type"
    if depth > DEPTH_MAX:
        return f"is nested deeper than {DEPTH_MAX} levels"
    if isinstance(value, str):
        return _text_fault(value)
    if isinstance(value, dict):
        return next((f"has a key that {fault}" for key in value if (fault := _key_fault(key))), "")
    if isinstance(value, int):
        return (
            ""
            if value.bit_length() <= INTEGER_BITS
            else f"is a whole number of more than {INTEGER_BITS} bits"
        )
    if isinstance(value, float) and not -float("inf") < value < float("inf"):
        return f"is {value}, which is no number in JSON"
    return ""


def _key_fault(key: Any) -> str:
    return (
        _text_fault(key) if isinstance(key, str) else f"is a {type(key).__name__} instead of text"
    )


def _text_fault(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code, position = ord(text[error.start]), error.start + 1
        return f"has the lone surrogate U+{code:04X} as character {position}, which is no text"
    return ""
