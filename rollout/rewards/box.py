"""Extraction of the final answer from a text: the last `\\boxed{…}`."""

import re
from typing import Final

TEXT_CHARS_MAX: Final = 200_000
"""Only the end of a longer text is searched."""

BRACES: Final = re.compile(
    r"\\(?:boxed|fbox)(?:\s{0,8}\{|(?![a-zA-Z])\s{0,8}"
    r"(?P<token>\\(?!boxed|fbox)[a-zA-Z]+|\\[{}|]|[a-zA-Z](?![a-zA-Z])|[^\sa-zA-Z{}\\$.,;:!?)\]`'\"*]))"
    r"|\\(?!\\(?:boxed|fbox)).|[{}]",
    re.DOTALL,
)
"""The beginning of a box, a box around a single token, an escaped character, or a brace.

`\\{` opens no group, and `\\\\{` is a line break before a group. A word or a punctuation mark after
`\\boxed` is prose about boxes.
"""


def last_box(text: str) -> str | None:
    """Return the contents of the last `\\boxed{…}` that is not empty and whose braces balance.

    None if the text has no such box. `\\boxed{\\frac{1}{2}}` → `\\frac{1}{2}`;
    `\\boxed{3} and \\boxed{4` → `3`; `\\boxed 57` → `5`, as in TeX. One pass over at most
    TEXT_CHARS_MAX characters.
    """
    text = text[-TEXT_CHARS_MAX:]
    # For each open group: the position at which the contents of its box begin; -1 without a box.
    groups: list[int] = []
    begin, end = -1, -1
    for brace in BRACES.finditer(text):
        kind = brace[0][-1]
        if brace["token"]:
            begin, end = brace.span("token")
        elif kind == "{" and (brace[0] == "{" or len(brace[0]) > 2):
            groups.append(brace.end() if len(brace[0]) > 1 else -1)
        elif brace[0] == "}" and groups:
            opened = groups.pop()
            if (
                opened > begin
                and not text[opened : brace.start()].isspace()
                and opened < brace.start()
            ):
                begin, end = opened, brace.start()
    return text[begin:end] if begin >= 0 else None
