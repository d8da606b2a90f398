"""Lexer of numbers and their units."""

import re
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["numeral", "word", "text", "command", "sign"]

TOKEN: Final = re.compile(
    r"(?P<numeral>(?:(?:[1-9]\d{0,2}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,4}(?![\d.a-zA-Z]))?)"
    r"|\\text ?\{(?P<text>[^{}]*)\}"
    r"|(?P<command>\\[a-zA-Z]+)"
    r"|(?P<word>(?:[A-Z]|t(?=-shirt)|[a-zA-Z]{2,})(?:-[a-zA-Z]{3,})+|[a-zA-Z]+)"
    r"|(?P<sign>[-+*/^_(){}%.€£¥₹₩])",
    re.ASCII,
)
"""A hyphen belongs to a word if at least three letters follow it: `push-ups`, `T-shirts`."""
DEGREES: Final = re.compile(r"\^ ?(?:\{ ?\\circ ?\}|\\circ(?![a-zA-Z]))")


@dataclass(frozen=True)
class Token:
    """One token of a text.

    `12` in `x = 12` is `Token("numeral", "12", spaced=True)`; `\\text{ cm}` is
    `Token("text", " cm", spaced=False)`.
    """

    kind: Kind
    text: str
    spaced: bool
    """Whether a space precedes it."""


def tokens(text: str) -> list[Token] | None:
    """Split a tidy text into tokens; None if a character belongs to no kind.

    A degree sign becomes the unit `deg`.
    """
    text = DEGREES.sub(r"\\text{deg}", text)
    parsed: list[Token] = []
    at, spaced = 0, False
    while at < len(text):
        if text[at] == " ":
            at, spaced = at + 1, True
            continue
        match = TOKEN.match(text, at)
        if match is None:
            return None
        kind: Kind = match.lastgroup  # type: ignore[assignment]  # the groups are named after the kinds
        parsed.append(Token(kind, match[kind], spaced))
        at, spaced = match.end(), False
    return parsed
