"""One spelling for what LaTeX spells in many ways, before answers are compared.

    $\\left(\\dfrac12,\\ 1{,}200\\right)$.   ──tidy──▶   (\\frac{1}{2}, 1200)

Only spelling changes here, never meaning. Every pattern takes time that grows linearly with the
text.
"""

import re
from typing import Final

CHARACTERS: Final = str.maketrans(
    {
        "−": "-",
        **dict.fromkeys("–‐‑﹣", "-"),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),  # without width
        **dict.fromkeys("⁄∕", "/"),
        **dict.fromkeys("∙•", "\\cdot "),
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
        "⅜": "\\frac{3}{8}",
        "⅝": "\\frac{5}{8}",
        "⅞": "\\frac{7}{8}",
        "⅖": "\\frac{2}{5}",
        "⅗": "\\frac{3}{5}",
        "⅘": "\\frac{4}{5}",
        "⅚": "\\frac{5}{6}",
        "…": "\\dots ",
        "∈": "\\in ",
        "′": "'",
        "℃": "^\\circ C",
        "℉": "^\\circ F",
        "∅": "\\emptyset ",
        "、": ", ",
        "。": ".",
        **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},  # full width
        "\u00a0": " ",
        "\u2009": "\\,",
        "\u202f": "\\,",
    }
)

SUPERSCRIPTS: Final = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
RAISED: Final = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "+-0123456789")

GROUPED: Final = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\!|\\,|\\thinspace ?)(?=\d{3}(?!\d))")
"""What separates the thousands of a number and nothing else. A plain comma also separates the items
of a list, so whether it groups digits is decided where numbers are read.
"""

SPACING: Final = re.compile(
    r"(?<!\\)\\[,;: \n\t]|~"
    r"|\\(?:q?quad|enspace|thinspace|medspace|thickspace|displaystyle|textstyle|limits|allowbreak)(?![a-zA-Z])"
)
DROPPED: Final = re.compile(
    r"\\!|\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\.?|\\(?:tiny|small|large|Large|LARGE|huge|Huge)(?![a-zA-Z])"
    r"|\\(?:color|textcolor|hspace\*?)\s{0,8}\{[^{}]{0,40}\}"
)
"""Sizes of delimiters (`\\left.` is an invisible one) and of letters, colours, and spaces of a
given width.
"""
RENAMED: Final = re.compile(
    r"\\(dfrac|tfrac|cfrac|nicefrac|lt|gt|colon|lbrace|rbrace|lbrack|rbrack|langle|rangle|geq|leq|neq|geqslant|leqslant|degree|degrees|varnothing|ldots|cdots|pounds|"
    r"mathrm|mathit|mathbf|mathsf|textrm|textit|textbf|textsf|textnormal|mbox|boldsymbol|bold|bm|rm|bf|it)(?![a-zA-Z])\s{0,8}"
)
NEW_NAMES: Final = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac", "nicefrac"), "\\frac "),
    "lbrace": "\\{",
    "rbrace": "\\}",
    "lbrack": "[",
    "rbrack": "]",
    "langle": "(",
    "rangle": ")",
    **dict.fromkeys(("geq", "geqslant"), "\\ge "),
    **dict.fromkeys(("leq", "leqslant"), "\\le "),
    "neq": "\\ne ",
    "lt": "<",
    "gt": ">",
    "colon": ":",
    "varnothing": "\\emptyset ",
    **dict.fromkeys(("ldots", "cdots"), "\\dots "),
    "pounds": "£",
    **dict.fromkeys(("degree", "degrees"), "^\\circ "),
    **dict.fromkeys(("rm", "bf", "it"), ""),
}
"""Every other one of RENAMED is a font, and becomes `\\text`."""

CONSTANT: Final = re.compile(r"\\mathrm\s{0,8}\{\s{0,8}([ei])\s{0,8}\}")
"""Euler's number and the imaginary unit, set upright."""
REPEATED: Final = re.compile(r"(?<=[.\d])\\(?:bar|dot|overline)\s{0,8}(?:\{(\d{1,30})\}|(\d))")
PLAIN: Final = re.compile(
    r"\*\*(?P<power>)|\+/-(?P<signs>)|\\not ?=(?P<unequal>)|(?<=[)\]}]) ?U ?(?=[(\[\\])(?P<union>)"
    r"|(?<![a-zA-Z\\{])(?:np\.|math\.)?(?P<name>pi|sqrt|arcsin|arccos|arctan|sin|cos|tan|exp|log)(?=[({]|(?<=pi)(?![a-zA-Z.]))"
)
"""What people and programs write without TeX: `x**2`, `+/-`, `(0,1) U (2,3)`, `2pi`, `sqrt(2)`,
`np.arcsin(10/13)`.
"""
TYPESET: Final = {"power": "^", "signs": "\\pm ", "unequal": "\\ne ", "union": "\\cup "}
ROOT: Final = re.compile(r"\\sqrt ?\(([^(){}]{1,100})\)")
INDEX: Final = re.compile(r"([_^]) ?\{ ?(\w) ?\}(?![\w{])")
"""`E_{1}`, which is `E_1`."""
FRENCH: Final = re.compile(r"([\[\]])([^][]{1,200})([\[\]])")
"""An interval whose brackets are turned outwards at an open end: `]0,1]`."""
SET_AS_TEXT: Final = re.compile(r"\\text ?\{ ?(?=[-+.$€\\\d]|\([-+.\d])")
"""The beginning of a text which is mathematics: `\\textbf{42}`, `\\text{5 apples}`."""

BRACE: Final = re.compile(r"\\.|[{}]", re.DOTALL)

SHORT_FRACTION: Final = re.compile(
    r"\\frac\s{0,8}(?:(\d)\s{0,8}(\d)|(\d)\s{0,8}(?=\{)|\{([^{}]*)\}\s{0,8}(\d)|(?=\{))"
)
"""`\\frac12`, `\\frac1{2}`, `\\frac{1}2`, `\\frac {1}`."""

WHITE: Final = re.compile(r"\s+")
LOOSE: Final = re.compile(r" (?![0-9A-Za-z.])|(?<![0-9A-Za-z.},;]) ")
"""A space that separates no two words, numbers or items of a list: `1, 200` is a list, `1,200` a
number.
"""


SPACE: Final = re.compile(r" (?!\d)|(?<![\d,]) |(?<=,) (?!\d{3}(?!\d))")


def tidy(text: str) -> str:
    """The same answer in one spelling: without dollars around it, spacing commands, sizes and a
    final full stop.
    """
    text = text.strip()
    text = text[2:-2] if len(text) > 4 and text.startswith("**") and text.endswith("**") else text
    text = SUPERSCRIPTS.sub(lambda found: f"^{{{found[0].translate(RAISED)}}}", text).translate(
        CHARACTERS
    )
    text = CONSTANT.sub(r" \1", GROUPED.sub("", text))
    text = REPEATED.sub(lambda found: f"\\overline{{{found[1] or found[2]}}}", text)
    text = DROPPED.sub("", SPACING.sub(" ", text))
    text = RENAMED.sub(lambda found: NEW_NAMES.get(found[1], "\\text"), text)
    text = (
        SHORT_FRACTION.sub(_fraction, text)
        .replace("\\%", "%")
        .replace("US\\$", "")
        .replace("\\$", "")
        .replace("$", "")
    )
    text = _unwrapped(
        LOOSE.sub("", WHITE.sub(" ", ROOT.sub(r"\\sqrt{\1}", PLAIN.sub(_typeset, text)))).strip()
    )
    text = INDEX.sub(r"\1\2", text).replace("\\{\\}", "\\emptyset")
    if (interval := FRENCH.fullmatch(text)) and "," in interval[2]:
        return (
            f"{'[' if interval[1] == '[' else '('}{interval[2]}{']' if interval[3] == ']' else ')'}"
        )
    return text


def _typeset(found: re.Match[str]) -> str:
    kind = found.lastgroup or ""
    return f"\\{found['name']} " if kind == "name" else TYPESET[kind]


def without_spaces(text: str) -> str:
    """For comparing spellings: all spaces gone but those that tell numbers apart: `1 2` is not
    `12`, nor `1, 200` `1,200`.
    """
    return SPACE.sub("", text)


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
        text = (
            text.removesuffix(".").removeprefix(opened).removesuffix(closed)
            if text.startswith(opened)
            else text
        )
    text = text.removesuffix("\\newline").removesuffix("\\\\").strip()
    if len(text) > 1 and text[-1] in ".,;:" and not text.endswith(".."):
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
