"""Notations of mathematics that LaTeX has in several spellings.

Each function returns the text with one kind of them in the normal spelling.
"""

import re
from typing import Final

GREEK_LETTER: Final = (
    r"(?i:\\(?:var)?(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho"
    r"|sigma|tau|upsilon|phi|chi|psi|omega)(?![a-zA-Z]))"
)
ARGUMENT: Final = rf"\d|[a-zA-Z]|\\(?:pi|hbar|ell)(?![a-zA-Z])|{GREEK_LETTER}"
"""An argument without braces: one digit, letter or symbol."""
SHORT_FRACTION: Final = re.compile(
    rf"\\(frac|[dt]?binom)(?![a-zA-Z])\s{{0,8}}(?:({ARGUMENT})\s{{0,8}}(?:({ARGUMENT})|(?=\{{))"
    rf"|\{{([^{{}}]*)\}}\s{{0,8}}({ARGUMENT})|(?=\{{))"
)
"""`\\frac12`, `\\frac1{2}`, `\\frac{1}2`, `\\frac\\pi 4`, `\\binom52`, `\\frac {1}`."""

CHOOSE: Final = re.compile(
    r"(?<!\\)\{(?P<n>(?:[^{}\\]|\\(?!choose)[a-zA-Z]|\{[^{}]{0,30}\}){1,60})\\choose(?![a-zA-Z])"
    r"(?P<k>(?:[^{}]|\{[^{}]{0,30}\}){1,60})\}"
)
"""`{n \\choose k}`, which is `\\binom{n}{k}`."""
BEFORE_ARGUMENT: Final = re.compile(
    r"(?:[_^]|\\(?:[dtc]?frac(?:\s{0,8}(?:\{(?:[^{}]|\{[^{}]{0,30}\}){1,60}\}|\w))?"
    r"|sqrt(?:\s?\[\w{1,3}\])?))\s{0,8}\Z"
)
"""The text before the braces of an argument, which stay: `2^{n \\choose 2}`."""
BEFORE_ARGUMENT_CHARS_MAX: Final = 100
ROW_SPACING: Final = re.compile(
    r"(?<=\\\\) ?\[ ?-?(?:\d{1,4}(?:\.\d{0,4})?|\.\d{1,4}) ?(?:pt|em|ex|mm|cm|in) ?\]"
)
"""The space below a row of a matrix: `\\\\[6pt]`."""
ARRAY: Final = re.compile(
    r"(?:(?P<round>\()|(?P<square>\[)|\\\{) ?\\begin ?\{array\} ?\{ ?[lcr ]{1,20}\}"
    r"(?P<rows>(?:(?!\\(?:begin|end)(?![a-zA-Z])).)*)\\end ?\{array\} ?"
    r"(?(round)\)|(?(square)\]|(?!\\\})))",
    re.DOTALL,
)
"""A matrix or a system as an array in brackets: `(\\begin{array}{c}1\\\\2\\end{array})`."""
FACTORIAL: Final = re.compile(
    r"\\[a-zA-Z]+|(?P<base>(?<![\d.,_^])\d{1,9}|(?<![_^])[a-zA-Z]|(?<![a-zA-Z_^)}])\([^()]{1,60}\))!\^"
    r"(?P<power>\d?)"
)
"""The power of a factorial, `n!^2`, which is `(n!)^2`; a command's last letter is no base."""
CONGRUENCE: Final = re.compile(r"\\equiv(?![a-zA-Z])[^=<>]+")
MOD_AS_TEXT: Final = re.compile(
    r"\\(?:text|operatorname) ?\{([^{}a-zA-Z]{0,9}mod(?![a-zA-Z])[^{}]{0,20}|\))\}"
)
MODULO: Final = re.compile(
    r"(?P<bracket>\( ?)?(?:\\[bp]?mod|(?<![a-zA-Z\\])mod)(?![a-zA-Z]) {0,3}"
    r"(?:\{ ?(?P<braced>[^{}]{1,20}) ?\}"
    r"|(?P<bare>(?(bracket)[^(){}]{1,20}|(?:\d{1,20}|[a-zA-Z])(?! ?[\w^!*/+-]))))(?(bracket) ?\))"
)
"""The modulus behind a congruence: `\\pmod 7`, `(\\bmod 7)`, `(mod p-1)`."""
BARE_MODULUS: Final = re.compile(r"(?<=\d)(?<![_^]\d) {0,3}\( ?(\d{1,20}) ?\) ?\Z")
"""A modulus in brackets alone: `n\\equiv1\\ (6)`."""
MEAN: Final = re.compile(
    r"\\langle(?![a-zA-Z])(?P<averaged>(?:[^,;|\\]|\\(?!langle|rangle|[,;])){1,100})\\rangle(?![a-zA-Z])"
    r"|(?<![a-zA-Z\\])(?:E|\\mathbb ?(?:E|\{ ?E ?\})) ?\[(?P<expected>[^][,;]{1,100})\]"
)
"""The mean `\\langle x^2\\rangle` or `E[X^2]`, which is a function and no product."""

EXTREMUM: Final = re.compile(
    r"(?P<name>\\(?:max|min|gcd) ?)\\\{(?P<values>(?:[^{}:;|\\]|\\(?!mid|vert|colon)[a-zA-Z]"
    r"|\{[^{}]{0,30}\}){1,60})\\\}"
)
"""`\\max\\{3,5\\}`, which is `\\max(3,5)`, and not `\\max\\{x : x<3\\}`."""


def fractions(text: str) -> str:
    """Write `\\frac12` as `\\frac{1}{2}`, and `\\dbinom52` as `\\binom{5}{2}`."""
    return SHORT_FRACTION.sub(_fraction, text)


def binomials(text: str) -> str:
    """Write `{n \\choose k}` as `\\binom{n}{k}`."""
    return CHOOSE.sub(_binomial, text)


def without_row_spacing(text: str) -> str:
    """Remove the length from `\\\\[6pt]`."""
    return ROW_SPACING.sub("", text)


def arrays(text: str) -> str:
    """Write arrays in brackets as `pmatrix`, `bmatrix` and `cases`."""
    return ARRAY.sub(_environment, text)


def factorials(text: str) -> str:
    """Write `n!^2` as `(n!)^2`."""
    return FACTORIAL.sub(lambda match: _power(match) if match["base"] else match[0], text)


def congruences(text: str) -> str:
    """Write the modulus behind `\\equiv` as `\\pmod{7}`."""
    return CONGRUENCE.sub(_congruence, text)


def extrema(text: str) -> str:
    """Write `\\max\\{3,5\\}` as `\\max(3,5)`."""
    return EXTREMUM.sub(r"\g<name>(\g<values>)", text)


def means(text: str) -> str:
    """Write `\\langle x\\rangle` and `E[x]` as `E(x)`."""
    return MEAN.sub(lambda mean: f"E({mean['averaged'] or mean['expected']})", text)


def _fraction(match: re.Match[str]) -> str:
    command, first, second, braced, last = match.groups()
    command = f"\\{command.lstrip('dt')}"
    if first:
        return f"{command}{{{first}}}" + (f"{{{second}}}" if second else "")
    if last:
        return f"{command}{{{braced}}}{{{last}}}"
    return command


def _binomial(match: re.Match[str]) -> str:
    binomial = f"\\binom{{{match['n']}}}{{{match['k']}}}"
    before = match.string[max(0, match.start() - BEFORE_ARGUMENT_CHARS_MAX) : match.start()]
    return f"{{{binomial}}}" if BEFORE_ARGUMENT.search(before) else binomial


def _congruence(match: re.Match[str]) -> str:
    return MODULO.sub(
        lambda modulus: f"\\pmod{{{(modulus['braced'] or modulus['bare']).strip()}}}",
        MOD_AS_TEXT.sub(r" \1 ", BARE_MODULUS.sub(r" \\pmod{\1}", match[0])),
    )


def _power(match: re.Match[str]) -> str:
    return f"({match['base']}!)^" + (f"{{{match['power']}}}" if match["power"] else "")


def _environment(match: re.Match[str]) -> str:
    name = "pmatrix" if match["round"] else "bmatrix" if match["square"] else "cases"
    return f"\\begin{{{name}}}{match['rows']}\\end{{{name}}}"
