"""One spelling for what LaTeX spells in many ways, before answers are compared.

    $\\left(\\dfrac12,\\ 1{,}200\\right)$.   ──tidy──▶   (\\frac{1}{2}, 1200)

Only spelling changes here, never meaning. Every pattern takes time that grows linearly with the text.
"""

import re
from typing import Final

CHARACTERS: Final = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": "\\times ",
        "·": "\\cdot ",
        "⋅": "\\cdot ",
        "∗": "*",
        "÷": "\\div ",
        "°": "^\\circ ",
        "∞": "\\infty ",
        "π": "\\pi ",
        "√": "\\sqrt ",
        "±": "\\pm ",
        "≤": "\\le ",
        "≥": "\\ge ",
        "≠": "\\ne ",
        "≈": "\\approx ",
        "∪": "\\cup ",
        "½": "\\frac{1}{2}",
        "¼": "\\frac{1}{4}",
        "¾": "\\frac{3}{4}",
        "⅓": "\\frac{1}{3}",
        "⅔": "\\frac{2}{3}",
        "⅕": "\\frac{1}{5}",
        "⅙": "\\frac{1}{6}",
        "⅛": "\\frac{1}{8}",
        "∅": "\\emptyset ",
        "，": ", ",
        "、": ", ",
        "。": ".",
        **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F) if chr(code) != "，"},  # full width
        "\u00a0": " ",
        "\u2009": "\\,",
        "\u202f": "\\,",
    }
)

SUPERSCRIPTS: Final = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
RAISED: Final = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "+-0123456789")

GROUPED: Final = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\!|\\,|\\thinspace ?)(?=\d{3}(?!\d))")
"""What separates the thousands of a number and nothing else. A plain comma also separates the items of a list, so whether
it groups digits is decided where numbers are read."""

SPACING: Final = re.compile(
    r"(?<!\\)\\[,;: \n\t]|~"
    r"|\\(?:q?quad|enspace|thinspace|medspace|thickspace|displaystyle|textstyle|limits|allowbreak)(?![a-zA-Z])"
)
DROPPED: Final = re.compile(r"\\!|\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\.?")
"""Sizes of delimiters (`\\left.` is an invisible one)."""
RENAMED: Final = re.compile(
    r"\\(dfrac|tfrac|cfrac|lbrace|rbrace|lbrack|rbrack|langle|rangle|geq|leq|neq|geqslant|leqslant|degree|degrees|varnothing|ldots|cdots|pounds|"
    r"mathrm|mathit|mathbf|mathsf|textrm|textit|textbf|textsf|textnormal|mbox|rm|bf|it)(?![a-zA-Z])\s{0,8}"
)
NEW_NAMES: Final = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac"), "\\frac "),
    "lbrace": "\\{",
    "rbrace": "\\}",
    "lbrack": "[",
    "rbrack": "]",
    "langle": "(",
    "rangle": ")",
    **dict.fromkeys(("geq", "geqslant"), "\\ge "),
    **dict.fromkeys(("leq", "leqslant"), "\\le "),
    "neq": "\\ne ",
    "varnothing": "\\emptyset ",
    **dict.fromkeys(("ldots", "cdots"), "\\dots "),
    "pounds": "£",
    **dict.fromkeys(("degree", "degrees"), "^\\circ "),
    **dict.fromkeys(("rm", "bf", "it"), ""),
}
"""Every other one of RENAMED is a font, and becomes `\\text`."""

CONSTANT: Final = re.compile(r"\\mathrm\s{0,8}\{\s{0,8}([ei])\s{0,8}\}")
"""Euler's number and the imaginary unit, set upright."""
REPEATED: Final = re.compile(r"(?<=[.\d])\\(?:bar|overline)\s{0,8}(?:\{(\d{1,30})\}|(\d))")
SET_AS_TEXT: Final = re.compile(r"\\text ?\{ ?(?=[-+.$€\\\d])")
"""The beginning of a text which is mathematics: `\\textbf{42}`, `\\text{5 apples}`."""

BRACE: Final = re.compile(r"\\.|[{}]", re.DOTALL)

SHORT_FRACTION: Final = re.compile(r"\\frac\s{0,8}(?:(\d)\s{0,8}(\d)|(\d)\s{0,8}(?=\{)|\{([^{}]*)\}\s{0,8}(\d)|(?=\{))")
"""`\\frac12`, `\\frac1{2}`, `\\frac{1}2`, `\\frac {1}`."""

WHITE: Final = re.compile(r"\s+")
LOOSE: Final = re.compile(r" (?![0-9A-Za-z.])|(?<![0-9A-Za-z.},;]) ")
"""A space that separates no two words, numbers or items of a list: `1, 200` is a list, `1,200` a number."""


def tidy(text: str) -> str:
    """The same answer in one spelling: without dollars around it, spacing commands, sizes and a final full stop."""
    text = SUPERSCRIPTS.sub(lambda found: f"^{{{found[0].translate(RAISED)}}}", text).translate(CHARACTERS)
    text = CONSTANT.sub(r" \1", GROUPED.sub("", text))
    text = REPEATED.sub(lambda found: f"\\overline{{{found[1] or found[2]}}}", text)
    text = DROPPED.sub("", SPACING.sub(" ", text))
    text = RENAMED.sub(lambda found: NEW_NAMES.get(found[1], "\\text"), text)
    text = SHORT_FRACTION.sub(_fraction, text).replace("\\%", "%").replace("\\$", "").replace("$", "")
    return _unwrapped(LOOSE.sub("", WHITE.sub(" ", text)).strip())


def without_spaces(text: str) -> str:
    """For comparing spellings: all spaces gone but those between two digits, since `1 2` is not `12`."""
    return re.sub(r" (?!\d)|(?<!\d) ", "", text)


def _fraction(found: re.Match[str]) -> str:
    if found[1]:
        return f"\\frac{{{found[1]}}}{{{found[2]}}}"
    if found[3]:
        return f"\\frac{{{found[3]}}}"
    if found[5]:
        return f"\\frac{{{found[4]}}}{{{found[5]}}}"
    return "\\frac"


def _unwrapped(text: str) -> str:
    """Without the brackets of mathematics around the whole and the punctuation behind it."""
    for opened, closed in (("\\(", "\\)"), ("\\[", "\\]")):
        text = text.removesuffix(".").removeprefix(opened).removesuffix(closed) if text.startswith(opened) else text
    if len(text) > 1 and text[-1] in ".,;" and not text.endswith(".."):
        text = text[:-1]
    text = text.strip()
    if (wrapped := SET_AS_TEXT.match(text)) and _closes_at_end(text, wrapped.end()):
        text = text[wrapped.end() : -1].strip()
    return text


def _closes_at_end(text: str, begin: int) -> bool:
    """Whether the group whose contents begin at `begin` ends with the text."""
    depth = 1
    for brace in BRACE.finditer(text, begin):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.end() == len(text)
    return False
