"""Stored text made fit to be shown: in a terminal, in a page, in Markdown. Whoever writes to a
store chooses such text.

A control character can move a terminal's cursor, rename its window or clear it; a bidirectional
override shows text in another order than it has. Both are taken out of whatever is shown. Markup
(of a page, of a terminal, of Markdown) is escaped where it would mean something.
"""

import re

_INVISIBLE = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls of C0 and C1 but tab and newline
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction of text
    "\u2028\u2029\ufeff\ufff9-\ufffb"  # other line ends, byte order mark, annotations
    "\ud800-\udfff"  # halves of a pair, which no stream can write
    "\U000e0000-\U000e007f"  # tags: text that nobody sees
    "]"
)
_MARKDOWN = re.compile(r"[\\`*_{}\[\]()<>#!|~&]|^[-+]|(?<=^\d)[.)]|(?<=^\d\d)[.)]")


def plain(text: str) -> str:
    """The text without control characters, but for tabs and line ends, and without what changes the
    direction of text.
    """
    return _INVISIBLE.sub("", text)


def one_line(text: str) -> str:
    """`plain`, with a space for each line end."""
    return " ".join(plain(text).splitlines())


def markdown(text: str) -> str:
    """`one_line`, with every character escaped that Markdown could take for its own: it is text in
    a cell or a paragraph.
    """
    return _MARKDOWN.sub(r"\\\g<0>", one_line(text).strip())
