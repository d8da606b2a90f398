"""Normalization of LaTeX: answers are compared in one spelling.

    $\\left(\\dfrac12,\\ 1{,}200\\right)$.   ──tidy──▶   (\\frac{1}{2}, 1200)

It changes the spelling, never the meaning. Every pattern takes linear time in the length of the
text.
"""

import re
from typing import Final

from rollout.rewards.math_answers.spelling import notations
from rollout.rewards.math_answers.spelling.notations import GREEK_LETTER
from rollout.rewards.math_answers.spelling.unit_signs import unit_signs

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
        **dict.fromkeys("Δ∆", "\\Delta "),
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
        "″": "''",
        "¢": "\\text{ cents}",
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

GROUPED: Final = re.compile(
    r"(?<=\d)(?<![_^]\d)(?:\{,\} ?|,\\! ?|\\!|\\,|\\thinspace ?)(?=\d{3}(?!\d))"
)
"""Separators that only thousands have. A plain comma also separates the items of a list: `numbers`
and `structure` decide whether it groups digits.
"""
SPACED: Final = re.compile(
    r"(?<![\d.,^_])[1-9]\d{0,2}(?:(?:\\ |~| ?\\, ?)\d{3})+(?! ?(?:\\[ ,]|~)? ?[\d/])"
)
"""Thousands with wide spaces: `1\\ 000`, but not the mixed number `3\\ 125/200`."""
NO_DIGIT: Final = re.compile(r"\D")

SPACING: Final = re.compile(
    r"(?<!\\)\\[,;: \n\t]|~|\\hspace\*?\s{0,8}\{[^{}]{0,40}\}"
    r"|\\(?:q?quad|enspace|thinspace|medspace|thickspace|displaystyle|textstyle|limits|allowbreak)(?![a-zA-Z])"
)
DROPPED: Final = re.compile(
    r"\\!|\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\.?|\\(?:tiny|small|large|Large|LARGE|huge|Huge)(?![a-zA-Z])"
    r"|\\(?:color|textcolor)\s{0,8}\{[^{}]{0,40}\}"
)
"""Sizes of delimiters (`\\left.` is an invisible delimiter) and of letters, and colours."""
RENAMED: Final = re.compile(
    r"\\(dfrac|tfrac|cfrac|nicefrac|sfrac|backslash|smallsetminus|lvert|rvert|lt|gt|colon|lbrace|rbrace|lbrack|rbrack|langle|rangle|mod|geq|leq|neq|geqslant|leqslant|degree|degrees|varnothing|ldots|cdots|pounds|"
    r"mathrm|mathit|mathbf|mathsf|textrm|textit|textbf|textsf|textnormal|mbox|boldsymbol|bold|bm|rm|bf|it)(?![a-zA-Z])\s{0,8}"
)
NEW_NAMES: Final = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac", "nicefrac", "sfrac"), "\\frac "),
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
    "mod": "\\pmod ",
    **dict.fromkeys(("lvert", "rvert"), "|"),
    **dict.fromkeys(("backslash", "smallsetminus"), "\\setminus "),
    "varnothing": "\\emptyset ",
    **dict.fromkeys(("ldots", "cdots"), "\\dots "),
    "pounds": "£",
    **dict.fromkeys(("degree", "degrees"), "^\\circ "),
    **dict.fromkeys(("rm", "bf", "it"), ""),
}
"""Names of RENAMED that are not fonts; the fonts become `\\text`."""

DOLLARS: Final = re.compile(r"(?:(?<![a-zA-Z])US)?\\\$|\$")
"""Dollars of TeX's math mode, and currency signs."""
AMOUNT: Final = re.compile(
    r"(?<!\d)(?:(?<![a-zA-Z])US)?(?P<sign>\\\$|[€£₹]) ?"
    r"(?P<number>-?(?:\d[\d,]{0,40}(?:\.\d{1,40})?|\.\d{1,40}))(?=[ .,;$]{0,8}\Z)"
)
"""An amount of money at the end of a text, whose sign is a unit."""
CURRENCIES: Final = {"\\$": "dollars", "€": "euros", "£": "pounds", "₹": "rupees"}
CONSTANT: Final = re.compile(r"\\mathrm\s{0,8}\{\s{0,8}([ei])\s{0,8}\}")
"""Euler's number and the imaginary unit, set upright."""
REPEATED: Final = re.compile(r"(?<=[.\d])\\(?:bar|dot|overline)\s{0,8}(?:\{(\d{1,30})\}|(\d))")
PLAIN: Final = re.compile(
    r"\*\*(?P<power>)|\+/-(?P<signs>)|\\not ?=(?P<unequal>)"
    r"|(?<=\s)!=(?P<differs>)|<=(?![>])(?P<most>)|>=(?P<least>)"
    r"|(?<=[)\]}]) ?U ?(?=[(\[\\])(?P<union>)"
    r"|(?<![a-zA-Z\\{])(?:np\.|math\.)?"
    r"(?P<name>pi|sqrt|arcsin|arccos|arctan|sin|cos|tan|exp|log|ln)"
    r"(?=[({]|(?<=pi)(?![a-zA-Z.])|(?<=ln) [\w\\])"
)
"""Notations without TeX: `x**2`, `+/-`, `x >= 2`, `(0,1) U (2,3)`, `2pi`, `sqrt(2)`, `ln 2`,
`np.arcsin(10/13)`. `5!=120` has a factorial; `!=` needs a space before it.
"""
TYPESET: Final = {
    "power": "^",
    "signs": "\\pm ",
    **dict.fromkeys(("unequal", "differs"), "\\ne "),
    "most": "\\le ",
    "least": "\\ge ",
    "union": "\\cup ",
}
ROOT_SIGN: Final = re.compile(r"√ ?([0-9]+(?:\.[0-9]+)?)?")
"""The root sign, and the whole numeral after it: `√12` is `\\sqrt{12}`."""
ROOT: Final = re.compile(r"\\sqrt ?\(([^(){}]{1,100})\)")
INDEXED_ROOT: Final = re.compile(r"\\sqrt ?\[ ?(\w) ?\] ?(\d(?!\d)|[a-zA-Z])")
"""`\\sqrt[3]2`, which is `\\sqrt[3]{2}`."""
ODD_ROOT: Final = re.compile(r"\\sqrt ?\[ ?([3579]) ?\] ?\{ ?- ?(\d{1,100}) ?\}")
"""A real root of a negative number, which an algebra system takes for a complex one."""
MIXED: Final = re.compile(r"(?<=\d)(?<![_^]\d)\{(\\frac\{\d{1,30}\}\{\d{1,30}\})\}")
"""The fraction of `1{\\frac34}`."""
NAMED_INDEX: Final = re.compile(
    r"_ ?(?P<brace>\{ ?)?\\(?P<name>max|min|odot|oplus|Delta)(?![a-zA-Z])(?(brace) ?\})"
)
"""The index of `x_{\\max}` and `M_\\odot`, which are `x_{max}` and `M_{odot}`."""
PREAMBLE: Final = re.compile(
    r"\A(?:\\text ?\{ ?(?:the )?(?:final )?answer(?: is ?:?| ?:) ?\}"
    r"|(?:the )?(?:final )?answer(?: is(?: ?: ?| |(?=\\))| ?: ?))",
    re.IGNORECASE,
)
CURRENCY: Final = re.compile(
    r"\A(?:\\text ?\{ ?(?:USD|EUR|GBP|INR|Rs) ?\.? ?\}|(?:USD|EUR|GBP|INR|Rs) ?\.?) ?(?=\d)"
)
"""The name of a currency before a number, which is dropped like its sign."""
SET_MINUS: Final = re.compile(r"(?<=\\mathbb)( ?\{ ?R ?\}| R) ?- ?(?=\\\{)")
"""`\\mathbb{R}-\\{2\\}`."""
FACTOR: Final = r"\\text ?\{ ?[a-zA-Z]{1,20} ?\}(?: ?\^ ?(?:\d|\{ ?-?\d ?\}))?"
FACTORS: Final = rf"{FACTOR}(?:(?: ?\\cdot)? ?{FACTOR}){{0,4}}"
UNIT_FRACTION: Final = re.compile(
    rf"(?<=[\d}}])\\frac ?\{{ ?({FACTORS}) ?\}} ?\{{ ?({FACTORS}) ?\}}\Z"
)
"""The unit of `9.8\\frac{\\text{m}}{\\text{s}^2}`, which is `\\text{m}/\\text{s}^2`."""
UNIT_PRODUCT: Final = re.compile(
    r"\\text ?\{ ?([a-zA-Z]{1,20}(?:\^(?:\d|\{-?\d\}))?"
    r"(?:(?: ?(?:\\cdot|/) ?| )[a-zA-Z]{1,20}(?:\^(?:\d|\{-?\d\}))?){0,4}) ?\}"
)
"""`\\text{m\\cdot s^{-1}}`: a product within one `\\text`."""
UNIT_NAME: Final = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]+")
ANGSTROM: Final = re.compile(r"\\text ?\{ ?\\AA ?\}")
TEXT_INDEX: Final = re.compile(
    r"_ ?(?:\{ ?\\text ?\{ ?(\w{1,12}) ?\} ?\}|\\text ?\{ ?(\w{1,12}) ?\})"
)
"""`v_{\\text{max}}`, which is `v_{max}`."""
BLACKBOARD: Final = re.compile(r"\\mathbb ?([A-Z])(?![a-zA-Z])")
"""`\\mathbb R`, which is `\\mathbb{R}`."""
ORDINAL: Final = re.compile(
    r"(?<=\d)(?:\^\{\\text\{(?:st|nd|rd|th)\}\}|\^?\\text\{(?:st|nd|rd|th)\}|\^\{th\}|th(?![a-zA-Z]))"
)
"""The end of `12^{\\text{th}}`. `2^{nd}` without \\text is a power."""
BARE_ORDINAL: Final = re.compile(
    r"\A(?P<number>\d{0,3}(?<!1)(?:1(?=st)|2(?=nd)|3(?=rd)))[a-z]{2}\Z"
)
"""`22nd` as the whole text; in a formula it is a product."""
PARTS: Final = re.compile(
    r"(\d/\d{1,6}|\\[dt]?frac ?(?:\{\d{1,6}\} ?\{\d{1,6}\}|\d\d)) ?"
    r"(?:\\text ?\{ ?(?:th|rd|nd)s ?\}|(?:th|rd|nd)s(?![a-zA-Z]))"
)
"""The fraction in `3/5\\text{ths}`."""
CLOCK: Final = re.compile(r"(?<=\d) ?(?:\\text ?\{ ?o'clock ?\}|o'clock)")
BASE: Final = re.compile(
    r"(?<=\d) ?(?:_ ?\{ ?\( ?(?P<index>\d{1,2}) ?\) ?\}"
    r"|(?P<place>_ ?\{ ?)?\\text ?\{ ?(?:in )?"
    r"(?P<bracket>\()?base (?P<text>\d{1,2}|[a-z]{3,7})(?(bracket)\)) ?\}(?(place) ?\})"
    r"|(?P<brace>_ ?\{ ?|\()?\\text ?\{ ?(?:in )?base ?\} ?"
    r"(?P<digits>\d{1,2})(?!\d)(?(brace) ?[)}]))"
)
"""The base of `52_{(8)}`, `52\\text{ (base 8)}`, `52_{\\text{base 8}}`, `52_{\\text{base }8}`."""
BASE_TWICE: Final = re.compile(
    r"(?<=\d)(_ ?(?:(?P<digit>\d)|\{ ?(?P<digits>\d{1,2}) ?\})) ?"
    r"\\text ?\{ ?(?:in )?\(?base (?:(?P=digit)|(?P=digits))\)? ?\}"
)
"""`52_8\\text{ (base 8)}`."""
LOG_E: Final = re.compile(r"\\log ?_ ?(?:e|\{ ?e ?\}) ?")
PER_CENT: Final = re.compile(r"(?<=\d)( ?| ?\\text ?\{ ?)per cent(?![a-zA-Z])")
PERCENT_AS_TEXT: Final = re.compile(r"\\text ?\{ ?% ?\}")
INDEX: Final = re.compile(r"([_^]) ?\{ ?(\w) ?\}(?![\w{])")
"""`E_{1}`, which is `E_1`."""
FRENCH: Final = re.compile(r"([\[\]])([^][]{1,200})([\[\]])")
"""An interval whose bracket at an open end points outwards: `]0,1]`."""
NUMERAL_AS_TEXT: Final = re.compile(r"(?<==)\\text ?\{ ?(-?\d[\d,]{0,30}(?:\.\d{1,30})?) ?\}")
"""The result of `7+8=\\mathbf{15}`."""
AND_IN_TEXT: Final = re.compile(r"\\text ?\{([^{}]{0,60}[a-z]),? (?:and|or) ?\}(?= ?[\d$])")
"""The unit of an item and the word before the next one: `5\\text{ boys and }7\\text{ girls}`."""
SET_AS_TEXT: Final = re.compile(r"\\text ?\{ ?(?=[-+.$€\\\d]|\([-+.\d])")
"""The beginning of mathematics that is set as text: `\\textbf{42}`, `\\text{5 apples}`."""
BRACE: Final = re.compile(r"\\.|[{}]", re.DOTALL)

ONE_TOKEN: Final = re.compile(
    r"\\(bar|vec|hat|tilde|over(?:line|rightarrow)|wide(?:hat|tilde)|boldsymbol|bm"
    rf"|math(?:bf|bb|cal|rm|it|sf))(?:\s{{1,8}}([a-zA-Z])|\s{{0,8}}({GREEK_LETTER}))"
)
"""An accent or a font before one token without braces: `\\bar x`, which is `\\bar{x}`."""

WIDE_ACCENT: Final = re.compile(
    r"\\(?:overline|wide(?P<name>hat|tilde))(?P<letter> ?\{ ?[a-zA-Z] ?\})"
)
"""An accent of one letter: `\\overline{x}`, which is `\\bar{x}`."""
STAR: Final = re.compile(r"\^ ?(?:\{ ?(?:\*|\\(?:ast|star)) ?\}|\\(?:ast|star)(?![a-zA-Z]))")
"""The star of `x^{\\ast}`, which is `x^*`."""
SYMBOL_INDEX: Final = re.compile(
    rf"_ ?(?P<symbol>{GREEK_LETTER}|\\(?:pi|infty|perp|parallel)(?![a-zA-Z]))"
)
"""The index of `T_\\infty`, which is `T_{\\infty}`."""

EN_DASH: Final = re.compile(r"(?<=\d)--(?=\d)")
"""A range in TeX: `5--6`."""
WHITE: Final = re.compile(r"\s+")
END: Final = re.compile(r"(?<!\\)\\\s+\Z")
"""The space of `7\\ `, whose sign would stay."""
LOOSE: Final = re.compile(
    r" (?![0-9A-Za-z.]|(?<=[a-zA-Z] )- [a-z]{3})"
    r"|(?<![0-9A-Za-z.},;]) (?!(?<=[a-zA-Z] - )[a-z]{3})"
)
"""A space without meaning: not between two words, numbers or items of a list. `1, 200` is a list,
`1,200` a number. `boys - girls` is no word as `push-ups`.
"""
SPACE: Final = re.compile(r" (?!\d)|(?<![\d,]) |(?<=,) (?!\d{3}(?!\d))")


def tidy(text: str) -> str:
    """Return an answer in the normal spelling, without dollars, spacing, sizes and a full stop."""
    text = END.sub("", text).strip()
    text = text[2:-2] if len(text) > 4 and text.startswith("**") and text.endswith("**") else text
    text = SUPERSCRIPTS.sub(lambda match: f"^{{{match[0].translate(RAISED)}}}", text).translate(
        CHARACTERS
    )
    text = EN_DASH.sub("-", ROOT_SIGN.sub(_root, notations.without_row_spacing(text)))
    text = ONE_TOKEN.sub(lambda match: f"\\{match[1]}{{{match[2] or match[3]}}}", text)
    text = WIDE_ACCENT.sub(lambda match: f"\\{match['name'] or 'bar'}{match['letter']}", text)
    text = SYMBOL_INDEX.sub(r"_{\g<symbol>}", STAR.sub("^*", notations.binomials(text)))
    text = SPACED.sub(lambda number: NO_DIGIT.sub("", number[0]), GROUPED.sub("", text))
    text = CONSTANT.sub(r" \1", text)
    text = REPEATED.sub(lambda match: f"\\overline{{{match[1] or match[2]}}}", text)
    text = notations.means(notations.arrays(DROPPED.sub("", SPACING.sub(" ", text))))
    text = RENAMED.sub(lambda match: NEW_NAMES.get(match[1], "\\text"), text)
    text = AMOUNT.sub(
        lambda match: f"{match['number']}\\text{{ {CURRENCIES[match['sign']]}}}", text
    )
    text = AND_IN_TEXT.sub(r"\\text{\1}, ", text)
    text = DOLLARS.sub(_between_digits, notations.fractions(text).replace("\\%", "%"))
    text = _unwrapped(
        LOOSE.sub("", WHITE.sub(" ", ROOT.sub(r"\\sqrt{\1}", PLAIN.sub(_typeset, text)))).strip()
    )
    text = notations.factorials(_respelled(text))
    text = INDEX.sub(r"\1\2", text).replace("\\{\\}", "\\emptyset")
    text = notations.extrema(notations.congruences(text))
    return "\\cup".join(map(_french, text.split("\\cup")))


def _respelled(text: str) -> str:
    """Replace rare spellings of roots, ordinals, mixed numbers, indices, currencies and units."""
    text = ORDINAL.sub("", CURRENCY.sub("", PREAMBLE.sub("", text)))
    text = CLOCK.sub("", PARTS.sub(r"\1", BARE_ORDINAL.sub(r"\g<number>", text)))
    text = LOG_E.sub(r"\\ln ", BASE.sub(_base, BASE_TWICE.sub(r"\1", text)))
    text = INDEXED_ROOT.sub(r"\\sqrt[\1]{\2}", MIXED.sub(r"\1", text))
    text = NAMED_INDEX.sub(r"_{\g<name>}", ODD_ROOT.sub(r"{-\\sqrt[\1]{\2}}", text))
    text = PERCENT_AS_TEXT.sub("%", PER_CENT.sub(r"\1percent", text))
    text = BLACKBOARD.sub(r"\\mathbb{\1}", text)
    text = TEXT_INDEX.sub(lambda match: f"_{{{match[1] or match[2]}}}", text)
    text = SET_MINUS.sub(r"\1\\setminus", ANGSTROM.sub(r"\\AA ", text))
    text = NUMERAL_AS_TEXT.sub(r"\1", text)
    return UNIT_FRACTION.sub(r"\1/\2", UNIT_PRODUCT.sub(_factors, unit_signs(text)))


def _base(match: re.Match[str]) -> str:
    return f"_{{{match['index'] or match['text'] or match['digits']}}}"


def _factors(match: re.Match[str]) -> str:
    """Set each unit of a product as a text of its own."""
    if "\\cdot" not in match[1] and "{" not in match[1]:
        return match[0]
    return UNIT_NAME.sub(lambda name: f"\\text{{{name[0]}}}", match[1]).strip()


def _french(text: str) -> str:
    """Return `]0,1]` as `(0,1]`; other texts are unchanged."""
    if not (interval := FRENCH.fullmatch(text.strip())) or not {",", ";"} & set(interval[2]):
        return text
    return f"{'[' if interval[1] == '[' else '('}{interval[2]}{']' if interval[3] == ']' else ')'}"


def _between_digits(match: re.Match[str]) -> str:
    """Return a space for a sign between two digits, as in `$2$$3$`, which is not 23."""
    text, begin, end = match.string, match.start(), match.end()
    is_between = begin > 0 and end < len(text) and text[end].isdigit()
    return " " if is_between and (text[begin - 1].isdigit() or text[begin - 1] == "$") else ""


def _typeset(match: re.Match[str]) -> str:
    kind = match.lastgroup or ""
    return f"\\{match['name']} " if kind == "name" else TYPESET[kind]


def _root(match: re.Match[str]) -> str:
    return f"\\sqrt{{{match[1]}}}" if match[1] else "\\sqrt "


def without_spaces(text: str) -> str:
    """Remove the spaces from a text, except those that separate numbers: `1 2`, `1, 200`."""
    return SPACE.sub("", text)


def _unwrapped(text: str) -> str:
    """Remove the delimiters of TeX's math mode around a text, and the punctuation after it."""
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
    """Return whether the group whose contents begin at `begin` ends at the end of the text."""
    depth = 1
    for brace in BRACE.finditer(text, begin):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.end() == len(text)
    return False
