"""What the sides of an equation are: a name and its value, a computation, a relation.

    S = 2+3 = 5      the value of S, computed
    2x = 5           an equation that is still to be solved: no answer
    x = 2y = 3z      a relation of several quantities, which equals one with the same sides

`sides` splits an equation, and `number_of` reads a side that is a number.
"""

import re
from typing import Final

from rollout.rewards.math_answers.number_parser import Reading, TooLargeError
from rollout.rewards.math_answers.numbers import read_number
from rollout.rewards.math_answers.operators import (
    CHANGE,
    COMMAND,
    LETTER,
    derivatives_as_symbols,
)
from rollout.rewards.math_answers.spelling.notations import GREEK_LETTER
from rollout.rewards.math_answers.structure import sides, without_brackets

NAME: Final = re.compile(
    r"(?!\\(?:pi|infty|emptyset)(?![a-zA-Z]))"
    r"(?:[fgh] ?\^ ?\{ ?-1 ?\}(?=\()|\\(?:bar|hat|tilde|vec) ?\{ ?[a-zA-Z] ?\}"
    r"|[a-zA-Z]|\\[a-zA-Z]+|\\text ?\{[^{}]*\})"
    r"(?:\^ ?\*)?(?:_(?:\w|\{[^{}]*\}))?(?: ?\^ ?\*)?'{0,2}"
    r"(?:\((?:[a-zA-Z](?:,[a-zA-Z])*|\d{1,3})\))?"
)
"""A name before `=`, not part of the answer: `x`, `x_1`, `f(x)`, `f^{-1}(x)`, `x^*`, `\\bar{x}`."""
VARIABLE: Final = re.compile(r"[a-df-hj-zA-Z]")
"""A letter other than the constants e and i, in a text without commands."""
BOUND: Final = re.compile(r"\\(?:sum|prod|lim|liminf|limsup|i{1,3}nt|oint)(?![a-zA-Z])")
"""An operator with an index or a variable of its own."""
DERIVATIVE: Final = re.compile(
    r"\\frac ?\{ ?(?P<d>d|\\partial|\\text ?\{ ?d ?\})(?: ?\^ ?(?:\d|\{ ?\d ?\}))? ?"
    r"(?:\} ?\{ ?(?P=d)"
    r"|(?=[(\d]|e ?\^|(?P<letter>[a-zA-Z]) ?\^|\\(?:sin|cos|tan|ln|log|exp|sqrt|frac)(?![a-zA-Z]))"
    r"(?:[^{}]|\{[^{}]{0,50}\}){1,100}\} ?\{ ?(?P=d) ?(?(letter)(?P=letter)|[a-zA-Z]))"
)
"""`\\frac{d}{dx}` before an expression, or `\\frac{d\\sin x}{dx}`: still to be derived."""
ROOTS: Final = re.compile(
    r"\\sqrt(?:\[\w+\])?(?:\w|\{(?:[^{}]|\{[^{}]{0,50}\}){0,100}\})(?=\\sqrt|\\frac|\()"
)
"""A root before another factor, in a text without spaces: `\\sqrt2\\sqrt8`."""
PART: Final = re.compile(
    r"\\text ?\{[^{}]*\}|\\[a-zA-Z]+|\\[^ ,;:!]|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|[^\s\\]"
)
PRODUCT_SIGNS: Final = frozenset(("*", "\\times", "\\cdot", "\\div", "\\ast"))
QUOTIENTS: Final = frozenset(("\\frac", "/", "\\over"))
GROUP_STARTS: Final = frozenset("([{")
GROUP_ENDS: Final = frozenset(")]}")
BARS: Final = frozenset(("|", "\\|", "\\vert", "\\Vert"))
"""They open and close."""
OPENING: Final = frozenset(("(", "\\lfloor", "\\lceil", "\\lvert", "\\lVert"))
CLOSING: Final = frozenset((")", "!", "%", "\\rfloor", "\\rceil", "\\rvert", "\\rVert"))
OTHER_ENDS: Final = frozenset(("}", "]", "\\}", "'", "\\pi", "\\circ", "\\degree", "\\infty"))
"""Ends of an operand behind which another one may be an argument: `\\log_{2}8`."""
APPLIED: Final = frozenset(("\\sqrt", "\\frac", "\\binom"))
TEXT: Final = re.compile(r"\\text ?\{[^{}]*\}")
QUANTITY: Final = re.compile(
    rf"(?:\\(?:angle|measuredangle|triangle) ?[A-Z]{{1,4}}|[A-Z]{{2,4}}|\[[A-Z]{{3,6}}\]|{CHANGE}"
    rf"|\| ?{CHANGE} ?\||\( ?{CHANGE} ?\)"
    r"|\|\\?[a-zA-Z]{1,8}(?:_\w)?\||\|[zw] ?\^ ?\d\||\\text ?\{ ?(?:Re|Im) ?\} ?\(.{1,100}\)"
    r"|[fghFGHP](?:_\w|\^\{-1\})?'{0,2} ?\(.{1,100}\)"
    r"|(?P<function>[a-zA-Z])(?:_\w)?'{0,2} ?\((?:(?!(?P=function))[^()]){1,100}\))"
    r"(?: ?\^ ?(?:\d|\{\d\}))?"
)
"""A quantity that is asked for, besides a name: `AB^2`, `[ABC]`, `|z|^2`, `f(-1)`, `\\Delta x`."""
TEXT_INDEX: Final = re.compile(r"(?<=_\{)\\text ?\{ ?(\w{1,8}) ?\}(?=\})")
"""The index of `v_{\\text{max}}`."""
POLYNOMIAL: Final = re.compile(
    rf"(?:\\(?:frac|cdot|times|div|sqrt|binom|angle|pi)(?![a-zA-Z])|{GREEK_LETTER}"
    r"|[a-zA-Z\d+\-*/^(){}\[\].|!_' ])+"
)
UNKNOWN: Final = re.compile(
    rf"(?P<unknown>{CHANGE}|{GREEK_LETTER}(?:_(?:\w|\{{\w{{1,8}}\}}))?"
    r"|[A-Z]{2,4}|[a-df-hj-zA-Z](?:_(?:\w|\{\w{1,8}\}))?)|\\[a-zA-Z]+"
)
CAPITAL: Final = re.compile(r"[A-Z](?=[A-Z])")
"""A capital before another one."""
FUNCTION_OF_UNKNOWN: Final = re.compile(r"[a-zA-Z] ?\([a-zA-Z]\)")
"""`f(x)`, whose value is asked for only by a numeral, as `f(-1)`."""
DEFINED: Final = re.compile(r"(?<![a-zA-Z\\])([a-zA-Z]) ?\(([a-zA-Z])\) ?=")
"""The left side of `f(n)=n+1`."""
ARGUMENTS: Final = frozenset("kmnx")
"""Arguments whose name does not matter; `f(x)` and `f(y)` may be two densities."""
WORD: Final = re.compile(r"[a-zA-Z]{2,}")
GREEK: Final = re.compile(GREEK_LETTER)
ABOUT: Final = "\\approx"
SIGN: Final = re.compile(r"\A ?(?:=|\\(?:approx|equiv|simeq)(?![a-zA-Z])) ?")
"""The first sign after a side."""


def with_argument_of(gold: str, answer: str) -> str:
    """Write `f(x)=x+1` as `f(n)=n+1` if the gold has `f(n)=`, and neither another such side."""
    defined, wanted = set(DEFINED.findall(answer)), set(DEFINED.findall(gold))
    if len(defined) != 1 or len(wanted) != 1 or "\\text" in answer + gold:
        return answer
    (function, own), (other_function, other) = *defined, *wanted
    letters = set(LETTER.findall(answer))
    if function != other_function or other in letters or not {own, other} <= ARGUMENTS:
        return answer
    return LETTER.sub(lambda letter: other if letter[0] == own else letter[0], answer)


def is_left_to_compute(text: str) -> bool:
    """Return whether the last exact side is a sum, an integral, a limit or a derivative.

    `\\int_0^1 e^x dx` may be copied from the question; `\\int_0^1 e^x dx = e-1` is computed.
    """
    last = sides(text.partition(ABOUT)[0].strip() or text)[-1]
    return bool(BOUND.search(last) or DERIVATIVE.search(last))


def has_sum_or_product(text: str) -> bool:
    """Return whether an expression without variables has a sum, a difference or a product.

    A product without a sign is found behind roots, brackets, bars, factorials and percent signs,
    and between a numeral and brackets, bars or floors: `|7||8|`, `2(5!)`. It is not found in a
    fraction and in brackets below a slash (`\\frac{8!}{3!5!}`), because quotients are answers.
    Signs that begin an operand (`2^{-3}`, `|-5|`) are no sums, nor is a factor of one term
    (`2\\sqrt3`, `3\\ln 2`) a product.
    """
    if ROOTS.search(text.replace(" ", "")):
        return True
    parts = PART.findall(text)
    before, is_operand, is_closed, bars = ["", ""], False, False, 0
    groups, ended = (
        [""],
        "",
    )  # what each open group belongs to, if to a quotient; the last closed one
    for part, behind in zip(parts, [*parts[1:], ""], strict=True):
        is_quotient = any(groups)
        if part == "\\over":
            groups[-1] = part
        elif part in GROUP_STARTS:
            is_denominator = ended == "\\frac" and part == "{"
            groups.append(before[1] if before[1] in QUOTIENTS else "/" if is_denominator else "")
        ended = groups.pop() if part in GROUP_ENDS and len(groups) > 1 else ""
        opens = part in OPENING or (part in BARS and not (is_operand and bars))
        if part in PRODUCT_SIGNS or (part in "+-" and (is_operand or behind == "}")):
            return True
        is_applied = opens and before[1][:1].isdigit() and before[0] not in ("_", "^")
        follows = is_closed and (opens or part in APPLIED or part[0].isdigit())
        if (is_applied or follows) and not is_quotient:
            return True
        if part in BARS:
            bars += 1 if opens else -1
        closes = part in BARS and not opens
        is_closed = closes or (is_operand and part in CLOSING)
        is_operand = is_closed or part in OTHER_ENDS or part[0].isalnum() or bool(TEXT.match(part))
        before = [before[1], part]
    return False


def is_equation_to_solve(answer: str, gold: str, unknowns_max: int = 1) -> bool:
    """Return whether the right side of `2x = 5` is no answer, but a part of an equation to solve.

    This is so if the left side is an expression in one unknown that the gold lacks. It is not if
    the left side is a name, a quantity such as `AB^2`, a function (`\\sin x`), or has several
    unknowns: questions ask for the values of these, such as `m+n`. If the gold is 0, also the
    polynomial after `y` or `f(x)` is an equation to solve.
    """
    *before, _ = sides(answer)
    if not before:
        return False
    side = before[0]
    if NAME.fullmatch(side):
        is_zero = (number := number_of(gold)) is not None and not number.value
        if not is_zero or len(before) == 1 or not (side == "y" or FUNCTION_OF_UNKNOWN.search(side)):
            return False
        side = before[-1]
    if QUANTITY.fullmatch(side):
        return False
    side = TEXT.sub("", TEXT_INDEX.sub(r"\1", side)).strip()
    found = (match["unknown"] for match in UNKNOWN.finditer(side))
    unknowns = {
        unknown for unknown in found if unknown and not variables(unknown) <= variables(gold)
    }
    return (
        1 <= len(unknowns) <= unknowns_max
        and not (NAME.fullmatch(side) or QUANTITY.fullmatch(side))
        and POLYNOMIAL.fullmatch(side) is not None
        and not DERIVATIVE.search(side)
    )


def is_relation(text: str) -> bool:
    """Return whether an equation is a relation, and not a name and its value.

    In a relation, the left side is an expression in variables (`x+y = 4`), or both sides are words
    (`MR = SRMC`).
    """
    first, *others = sides(text)
    if not others:
        return False
    if WORD.fullmatch(first) and WORD.fullmatch(others[-1]):
        return True
    return bool(variables(first)) and bool(
        re.search(r"[a-zA-Z\d)}'|!][-+*/^]|\\frac|\d[a-zA-Z]", first)
    )


def is_relation_of_several(text: str) -> bool:
    """Return whether `a = 2b = c` is a relation of several quantities, and not a computation.

    In a computation, such as `S = \\sum_{k=1}^n k = \\frac{n(n+1)}{2}`, the left side is what is
    asked for, no other side is a name, and the result has a value or letters of all sides between.
    """
    chain_of_sides = sides(text.partition(ABOUT)[0])
    if len(chain_of_sides) < 3:
        return False
    first, *between, result = chain_of_sides
    is_quantity = QUANTITY.fullmatch(first) is not None
    named = [side for side in between if variables(side)]
    if any(NAME.fullmatch(side) or (is_quantity and QUANTITY.fullmatch(side)) for side in named):
        return True
    if not variables(result):
        return False
    is_asked_for = NAME.fullmatch(first) or is_quantity or derivatives_as_symbols(first) != first
    if not is_asked_for and not is_left_to_compute(first):
        return True
    letters = _letters(result, is_quantity)
    return any(letters.isdisjoint(_letters(side, is_quantity)) for side in between)


def named(text: str) -> tuple[str, str]:
    """Split `x = 5` and `5 = x` into (`x`, `5`); a text without a name gives ("", text).

    The value may be a chain: `2+3 = 5`, `\\sqrt2 \\approx 1.41`.
    """
    first, *rest = sides(text)
    if rest and NAME.fullmatch(first):
        return first, SIGN.sub("", text.strip()[len(first) :], count=1)
    if len(rest) == 1 and NAME.fullmatch(rest[0]) and number_of(first) is not None:
        return rest[0], first
    return "", text


def number_of(gold: str) -> Reading | None:
    """Read a reference as a number; None if it is not one. A letter after it is a variable."""
    try:
        return read_number(without_brackets(gold), letters_are_units=False)
    except TooLargeError:
        return None


def variables(text: str) -> frozenset[str]:
    return frozenset(VARIABLE.findall(COMMAND.sub("", text))) | frozenset(GREEK.findall(text))


def _letters(text: str, are_names: bool) -> frozenset[str]:
    """Return the letters of a text with their indices; `AB` is one letter if `are_names`."""
    text = TEXT.sub(" ", text) if are_names else CAPITAL.sub(r"\g<0> ", TEXT.sub(" ", text))
    return frozenset(match["unknown"] for match in UNKNOWN.finditer(text) if match["unknown"])
