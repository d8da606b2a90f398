"""Units after a number: `18 dollars`, `9 apples`, `45^\\circ`, `3\\text{ cm}^2`, `70 km/h`.

A unit does not change the value of a number, except for the words in SCALES. Bare letters after a
number are usually variables (`5x`): a single letter, or a word without a space before it, is a unit
only if it is an abbreviation in the tables below.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from rollout.rewards.math_answers.measures import Measure, measure_of
from rollout.rewards.math_answers.tokens import Token

SCALES: Final = {
    "dozen": Fraction(12),
    "hundred": Fraction(10**2),
    "thousand": Fraction(10**3),
    "million": Fraction(10**6),
    "billion": Fraction(10**9),
    "trillion": Fraction(10**12),
}

ABBREVIATIONS_TEXT: Final = (
    "nm um mm cm dm km ft in yd mi mg kg oz lb lbs ml mL cl dl ms ns sec secs min mins hr hrs yr "
    "yrs deg "
    "rad Hz kHz MHz GHz mph kph kmph rpm eV keV MeV kJ kW kWh MW Pa kPa atm mol amu cc sq cu rs Rs "
    "USD "
    "EUR am pm"
)
ABBREVIATIONS: Final = frozenset(ABBREVIATIONS_TEXT.split())
LETTERS_TEXT: Final = "m g s h L l J K N V W A C F"
LETTERS: Final = frozenset(LETTERS_TEXT.split())
"""Units of one letter, which need a space before them: `5m` is five times m."""

NO_UNITS_TEXT: Final = (
    "a an and or not nor but no non minus plus times over by of to from than then less more most "
    "least "
    "between about around approximately mod modulo divided multiplied times squared cubed pi tau "
    "phi inf "
    "infinity infinite sqrt root roots log ln exp sin cos tan cot sec csc arcsin arccos arctan "
    "sinh cosh "
    "tanh frac cdot choose factorial half halves third thirds quarter quarters fourth fourths "
    "fifth "
    "fifths tenth tenths hundredth hundredths thousandth thousandths dozens base if when for where "
    "is are either both none undefined unknown i e x y z"
)
NO_UNITS: Final = frozenset(NO_UNITS_TEXT.split())
"""Words after a number that may change its value."""

WHOLE: Final = re.compile(r"of (?:an|a|the) ", re.IGNORECASE)
"""The words between a fraction and its whole: `3/4 of an hour` is 3/4, `3/4 of 12` is not."""
TEXT_AT_END: Final = re.compile(r"\\text ?\{([^{}]*)\}((?: ?\^ ?(?:\d|\{-?\d\}))?)$")

COMMANDS: Final = frozenset(("\\mu", "\\Omega", "\\AA", "\\ell", "\\cdot", "\\prime"))
WORD_MIN: Final = 3
"""Minimum letters of a bare word that is a unit though no abbreviation. It needs a space before."""


def begins_unit(token: Token) -> bool:
    return token.kind in ("word", "text") or token.text in ("\\mu", "\\Omega", "\\AA", "\\ell")


def is_unit(text: str) -> bool:
    """Return whether a `\\text{…}`, perhaps with a power, is a unit that changes no value."""
    words = _words(text[text.index("{") + 1 : text.index("}")])
    return words is not None and not any(
        word.lower() in NO_UNITS or word.lower() in SCALES for word in words
    )


def measure_behind(text: str) -> Measure | None:
    """Return the unit in the `\\text{…}` at the end of an expression: `2\\sqrt{3}\\text{ cm}^2`."""
    match = TEXT_AT_END.search(text)
    return measure_of(match[1] + match[2]) if match else None


def written(unit: Sequence[Token]) -> str:
    """Join the tokens of a unit to a text: `cm^2`, `of an hour`."""
    spelled = "".join(" " * token.spaced + token.text for token in unit)
    return " ".join(spelled.split())


def scale_of(unit: Sequence[Token], letters_are_units: bool) -> Fraction | None:
    """Return the factor that a unit multiplies its number by: 10⁶ for `million euros`, usually 1.

    None if the tokens are not a unit. A bare letter is a unit only if `letters_are_units`.
    """
    if (whole := WHOLE.match(written(unit))) is not None:
        rest = written(unit)[whole.end() :]
        return Fraction(1) if is_unit(f"{{{rest}}}") and rest.replace(" ", "").isalpha() else None
    words: list[str] = []
    for index, token in enumerate(unit):
        if token.kind == "text":
            inner = _words(token.text)
            if inner is None:
                return None
            words += inner
        elif token.kind == "word":
            attached = index == 0 and not token.spaced
            if not _is_unit_word(token.text, attached) or (
                token.text in LETTERS and not letters_are_units
            ):
                return None
            words.append(token.text)
        elif token.kind == "command":
            if token.text not in COMMANDS:
                return None
        elif token.kind == "numeral":
            if not (token.text in ("2", "3", "1") and unit[index - 1].text in "^-{"):
                return None
        elif token.text not in "/^{}-.":
            return None
    if any(word.lower() in NO_UNITS for word in words):
        return None
    return SCALES.get(words[0].lower(), Fraction(1)) if words else Fraction(1)


def _is_unit_word(word: str, attached: bool) -> bool:
    if word in ABBREVIATIONS:
        return True
    if word in LETTERS:
        return not attached
    return len(word) >= WORD_MIN and not attached


def _words(text: str) -> list[str] | None:
    """Split the contents of a `\\text{…}` into words; None if it has more than words.

    Even a single letter is a unit there.
    """
    for mark in "/.-~^()€£¥₹₩":
        text = text.replace(mark, " ")
    words = [word.rstrip("23") for word in text.split()]
    return words if all(word == "" or word.isalpha() for word in words) else None
