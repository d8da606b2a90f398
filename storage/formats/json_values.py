"""What a value must be so that a stored JSON object gives it back as it was: plain data, finite,
bounded in depth and length.

JSON has no NaN and no infinity, UTF-8 has no lone surrogate, and every reader of JSON has a limit
on nesting and on digits. A value that is judged here before it is stored cannot fail later, when
the object around it is written or read.
"""

from typing import Any

from storage.records.numbers import INTEGER_BITS

DEPTH_MAX = 32
"""Levels of lists and objects inside a value. Far below what any reader of JSON allows, since
objects stand around it.
"""
DIGITS_MAX = 39
"""Decimal digits of a whole number of INTEGER_BITS."""
_PLAIN = (str, int, float, list, tuple, dict, type(None))


def fault(value: Any) -> tuple[str, str] | None:
    """Where `value` could not be stored as JSON, as a dotted path, and why; None when all of it
    can.

    Example: `fault({"meta": {"score": nan}})` → `("meta.score", "is nan, …")`.
    """
    waiting: list[tuple[Any, tuple[str, ...]]] = [(value, ())]
    while waiting:
        one, path = waiting.pop()
        if why := _why_not(one, len(path)):
            return ".".join(path), why
        if isinstance(one, dict):
            waiting += [(item, (*path, key)) for key, item in reversed(one.items())]
        elif isinstance(one, list | tuple):
            waiting += [
                (item, (*path, str(index))) for index, item in reversed(list(enumerate(one)))
            ]
    return None


def is_plain(value: Any) -> bool:
    """Whether JSON has a type for the value and for everything in it, whatever their limits."""
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return isinstance(value, _PLAIN)


def storable_text(text: str) -> str:
    """The text with `?` for each lone surrogate: for messages, which must be stored whatever they
    quote.
    """
    return text.encode("utf-8", "replace").decode()


def _why_not(value: Any, depth: int) -> str:
    """What is wrong with the value itself, `depth` levels down; empty when nothing is."""
    if not isinstance(value, _PLAIN):
        return f"is a {type(value).__name__}, for which JSON has no type"
    if depth > DEPTH_MAX:
        return f"is nested deeper than {DEPTH_MAX} levels"
    if isinstance(value, str):
        return _text_fault(value)
    if isinstance(value, dict):
        return next((f"has a key that {why}" for key in value if (why := _key_fault(key))), "")
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
        return f"has the lone surrogate U+{ord(text[error.start]):04X} as character {error.start + 1}, which is no text"
    return ""
