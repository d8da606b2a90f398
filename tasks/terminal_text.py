"""Sanitization of stored text before it is shown in a terminal, a page or Markdown.

Anybody who can write to the store controls this text. A control character can move a terminal's
cursor, rename its window or clear it; a bidirectional override shows text in another order. Both
are removed, or escaped where a reader must see them. Characters that are markup in Markdown are
escaped; pages and terminals escape theirs where they are written.
"""

import re

LINE_MAX = 2_000
"""Characters of one line; a stored text may have millions."""
_INVISIBLE = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls of C0 and C1 but tab and newline
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction of text
    "\u2028\u2029\ufeff\ufff9-\ufffb"  # other line ends, byte order mark, annotations
    "\ud800-\udfff"  # surrogates, which cannot be encoded
    "\U000e0000-\U000e007f"  # tags: invisible text
    "]"
)
_MARKDOWN = re.compile(r"[\\`*_{}\[\]()<>#!|~&]|^[-+]|(?<=^\d)[.)]|(?<=^\d\d)[.)]")


def plain(text: str) -> str:
    """Remove control characters except tab and line end, and characters that change direction."""
    return _INVISIBLE.sub("", text)


def visible(text: str) -> str:
    r"""Escape the characters that `plain` removes: an escape character becomes `\x1b`."""
    return _INVISIBLE.sub(lambda match: _escape(match[0]), text)


def quoted_line(text: str) -> str:
    r"""`visible` in quotes on one line: line ends, tabs and backslashes are escaped, too."""
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")
    return f'"{visible(escaped)}"'


def _escape(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


def one_line(text: str) -> str:
    """`plain`, with a space in place of each line end, cut after LINE_MAX characters."""
    return " ".join(plain(text[:LINE_MAX]).splitlines())


def markdown(text: str) -> str:
    """`one_line`, with Markdown's special characters escaped, for a cell or a paragraph."""
    return _MARKDOWN.sub(r"\\\g<0>", one_line(text).strip())
