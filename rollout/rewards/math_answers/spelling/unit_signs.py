"""Signs of units after a number, written as units that `units` knows.

900\\text{ °C}   →   900^\\circ C          0.49''   →   0.49\\text{ arcseconds}
"""

import re
from typing import Final

DEGREES_AS_TEXT: Final = re.compile(r"\\text ?\{ ?\^ ?(?:\\circ|\{ ?\\circ ?\}) ?([CF]?) ?\}")
EMPTY_GROUP: Final = re.compile(r"(?:\\text ?)?\{ ?\} ?(?=\^ ?\{? ?\\circ)")
"""The group before the degrees of `900\\,{}^\\circ C`."""
TEXT_IN_TEXT: Final = re.compile(r"\\text ?\{ ?\\text ?\{([^{}]{0,40})\} ?\}")
LETTER: Final = re.compile(
    r"\\text ?\{(?:[^{}]|\{[^{}]*\}){0,200}\}|([µμ])|[Å\u212b]|\\AA(?![a-zA-Z]) ?"
)
"""Micro and angstrom without TeX; within `\\text` they stay a part of a word."""
MICRO: Final = re.compile(r"\\text ?\{ ?\\mu ?([a-zA-Z]{1,3}) ?\}")
SUN: Final = re.compile(
    r"(?<=[\d}]) ?"
    r"(?:(?:[MLR]|\\text ?\{ ?[MLR] ?\})_\{(?:odot|[sS]un)\}|\\text ?\{ ?[MLR]_\{odot\} ?\})\Z"
)
"""The Sun's mass, luminosity or radius behind a number."""
ARCSECONDS: Final = re.compile(
    r"(?P<number>(?:\A|=|\\approx ?)-?\d{0,20}\.?\d{1,20}(?:\\times ?10\^(?:\d|\{-?\d{1,3}\}))?)"
    r" ?(?:''|\"|\^ ?\{ ?(?:\\prime ?\\prime|'') ?\}|\\text ?\{ ?(?:''|\") ?\})\Z"
)
PER_POWER: Final = re.compile(r"(?<=per )([a-z]{1,12}) (squared|cubed)(?![a-z])")
POWERS: Final = {"squared": "square", "cubed": "cubic"}


def unit_signs(text: str) -> str:
    """Write degrees, micro, arcseconds and `per second squared` as units."""
    text = LETTER.sub(_letter, text)
    text = DEGREES_AS_TEXT.sub(r"^\\circ \1", EMPTY_GROUP.sub("", text))
    text = MICRO.sub(r"\\text{ u\1}", TEXT_IN_TEXT.sub(r"\\text{\1}", text))
    text = ARCSECONDS.sub(r"\g<number>\\text{ arcseconds}", text)
    return PER_POWER.sub(lambda match: f"{POWERS[match[2]]} {match[1]}", text)


def without_suns(gold: str, answer: str) -> str:
    """Drop the unit of `15625 L_\\odot`, unless the gold has such a symbol."""
    return answer if "odot" in gold else SUN.sub("", answer)


def _letter(match: re.Match[str]) -> str:
    if match[0].startswith("\\text"):
        return match[0]
    return "\\mu " if match[1] else "\\text{ Å}"
