"""Units after a number: `18 dollars`, `9 apples`, `45^\\circ`, `3\\text{ cm}^2`, `70 km/h`.

A unit does not change the value of a number, except for the words in SCALES, which multiply it. If
a word may change the value in another way (`5 eighths`, `5 feet six inches`, `5 doubled`), the text
is not read as a number. Bare letters after a
number are usually variables (`5x`): a single letter, or a word without a space before it, is a unit
only if it is an abbreviation in the tables below.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from rollout.rewards.math_answers.measures import PER, Measure, is_unit_name, measure_of
from rollout.rewards.math_answers.tokens import Token

POWERS_OF_TEN: Final = {
    "hundred": 2,
    "thousand": 3,
    "lakh": 5,
    "million": 6,
    "crore": 7,
    "billion": 9,
    "trillion": 12,
    "quadrillion": 15,
}
SCALES: Final = {
    "dozen": Fraction(12),
    **{
        name: Fraction(10**power)
        for word, power in POWERS_OF_TEN.items()
        for name in (word, word + "s")
    },
}

ABBREVIATIONS_TEXT: Final = (
    "nm um mm cm dm km ft in yd mi mg kg oz lb lbs ml mL cl dl ms ns sec secs min mins hr hrs yr "
    "yrs deg "
    "rad Hz kHz MHz GHz mph kph kmph rpm eV keV MeV kJ kW kWh MW Pa kPa atm mol amu cc sq cu rs Rs "
    "USD EUR am pm MB GB TB kpc Mpc"
)
ABBREVIATIONS: Final = frozenset(ABBREVIATIONS_TEXT.split())
LETTERS_TEXT: Final = "m g s h L l J K N V W A C F pc"
LETTERS: Final = frozenset(LETTERS_TEXT.split())
"""Units of one letter, and pc, which need a space before them: `5m` is five times m."""

NO_UNITS_TEXT: Final = (
    "a an and or not nor but no non minus plus times over by to from than then less lesser "
    "more most least fewer greater between about around approximately mod modulo divided "
    "multiplied squared cubed pi tau phi inf infinity infinite sqrt root roots log ln exp "
    "sin cos tan cot csc arcsin arccos arctan sinh cosh tanh frac cdot choose factorial "
    "half halves halved quarter quarters dozens base if when for where is are either both "
    "none undefined unknown i e x y z double doubled triple tripled quadruple quadrupled "
    "quintuple quintupled twice thrice inverse reciprocal negative imaginary conjugate "
    "complement transpose raised power powers exponent multiply divide add added subtract "
    "subtracted exceeding remainder below under above versus vs through till until except "
    "mille score gross binary ternary octal hexadecimal hex bn mn kilo mega giga mil mils "
    "thou grand quintillion sextillion googol permille permil ppm ppb ppt basis bps nil "
    "theta lambda sigma omega repeating repeated recurring periodic "
    "ths rds nds mln bln lac lacs doz halfs"
)
DIGITS_TEXT: Final = "zero one two three four five six seven eight nine ten eleven twelve"
TEENS_TEXT: Final = "thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
TENS_TEXT: Final = "twenty thirty forty fifty sixty seventy eighty ninety"
CARDINALS: Final = (*DIGITS_TEXT.split(), *TEENS_TEXT.split(), *TENS_TEXT.split())
ORDINALS_TEXT: Final = "first third fifth eighth ninth twelfth"
"""Ordinals that are not a cardinal and `th`; `second` is a unit of time."""
ORDINALS: Final = (
    *ORDINALS_TEXT.split(),
    *(word.removesuffix("y") + "ieth" for word in TENS_TEXT.split()),
    *(word + "th" for word in (*CARDINALS, *POWERS_OF_TEN)),
)
NUMBERS: Final = tuple(word + s for word in (*CARDINALS, *ORDINALS) for s in ("", "s", "fold"))
NO_UNITS: Final = frozenset((*NO_UNITS_TEXT.split(), *NUMBERS, "sixes"))
"""Words after a number that may change its value."""
NEUTRAL_TEXT: Final = (
    "each every total altogether per different distinct possible whole full square cubic sq cu "
    "percent pct percentage north south east west northeast northwest southeast southwest left "
    "right up down away apart ahead behind increase decrease gain loss profit clockwise "
    "counterclockwise anticlockwise"
)
NEUTRAL: Final = frozenset(NEUTRAL_TEXT.split())
"""Words of a unit that change no value."""
NO_NOUNS_TEXT: Final = (
    "the this that these those such some any all another other much many few several enough he she "
    "it they we you us him her them his its their our your who whom whose which what something "
    "nothing was were be been being has have had having do does did will would can cannot could "
    "may might must shall should equals cost costs worth above across after against along although "
    "among as at because before behind beside besides beyond despite during excluding following "
    "given how however including inside instead into like near never off on once only onto "
    "opposite otherwise out outside past rather scores short shy since so still though toward "
    "towards unless unlike upon upward upwards while why with within without yet"
)
NO_NOUNS: Final = frozenset(NO_NOUNS_TEXT.split())
"""Words that a phrase of several nouns does not have: `5 short of goal` is no count of goals."""
NOUNS_MAX: Final = 3
"""Maximum words of a unit that are neither neutral nor in a table: `5 red apples per day`."""
LETTERS_MIN: Final = 2
"""Minimum letters of each of several such words: `2 power n` is no count."""
MICRO: Final = "\\mu"
OHM: Final = [Token("command", "\\Omega", spaced=False)]
"""After `\\text{k}`, which is no thousand there."""

WHOLE: Final = re.compile(r"of (?:an|a|the) ", re.IGNORECASE)
"""The words between a fraction and its whole: `3/4 of an hour` is 3/4, `3/4 of 12` is not."""
TEXT_AT_END: Final = re.compile(
    r"(?<=[\w)}\]!]) ?\\text ?\{([^{}]*)\}((?: ?\^ ?(?:\d|\{-?\d\}))?)$"
)

OF: Final = "of"
"""The word between two nouns of a unit: `11 cups of flour`. `10 of them` is not 10."""
EXPONENTS: Final = ("^", "^-", "^{", "^{-")
"""The signs before the exponent of a unit."""
POWER: Final = re.compile(
    r"(?<=[^\W\d_])(?: ?\^ ?-?|(?<![^\W\d_]{3})-?)[123](?![\w.])|(?<=[^\W\d_]{3})[23](?![\w.])"
)
"""The exponent of a unit in a text: `cm^2`, `m s-2`, `feet2`; `apples-2` is a difference."""
COMMANDS: Final = frozenset(("\\mu", "\\Omega", "\\AA", "\\ell", "\\cdot", "\\prime"))
WORD_MIN: Final = 3
"""Minimum letters of a bare word that is a unit though no abbreviation. It needs a space before."""


def begins_unit(token: Token) -> bool:
    return token.kind in ("word", "text") or token.text in ("\\mu", "\\Omega", "\\AA", "\\ell")


def is_unit(text: str) -> bool:
    """Return whether a `\\text{…}`, perhaps with a power, is a unit that changes no value.

    It may have one unknown word, because it may be after an expression that is no number.
    """
    words = _words(text[text.index("{") + 1 : text.index("}")])
    return words is not None and _factor(words, nouns_max=1) == 1


def measure_behind(text: str) -> Measure | None:
    """Return the unit in the `\\text{…}` at the end of an expression: `2\\sqrt{3}\\text{ cm}^2`."""
    match = TEXT_AT_END.search(text)
    return measure_of(match[1] + match[2]) if match else None


def written(unit: Sequence[Token]) -> str:
    """Join the tokens of a unit to a text: `cm^2`, `of an hour`, `um` for `\\mu\\text{m}`."""
    spelled, previous = "", None
    for token in unit:
        if previous is not None and previous.text == MICRO:
            spelled += token.text.strip()
        else:
            is_apart = previous is not None and {previous.kind, token.kind} <= {"text", "word"}
            spelled += " " * (token.spaced or is_apart) + token.text.replace(MICRO, "u").replace(
                "\\cdot", " "
            )
        previous = token
    return " ".join(spelled.split())


def measure_after(unit: Sequence[Token]) -> Measure | None:
    """Return the unit of measurement that the tokens after a number are, without its scales."""
    words = WHOLE.sub("", written(unit)).split()
    while words and words[0].lower() in SCALES:
        words = words[1:]
    return measure_of(" ".join(words))


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
            if token.text.strip() == "k" and unit[index + 1 :][:1] == OHM:
                continue
            inner = _words(token.text)
            if inner is None:
                return None
            words += inner
        elif token.kind == "word":
            pair = " ".join(each.text for each in unit[index : index + 2])
            if PER.match(pair) and token.spaced and words[-1:] != [OF]:
                words.append("per")
                continue
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
            before = "".join(each.text for each in unit[max(0, index - 3) : index])
            if token.text not in ("1", "2", "3") or not before.endswith(EXPONENTS):
                return None
        elif token.text == "-":
            if unit[index - 1].text not in ("^", "{") and not all(
                _is_known(each.text.strip()) for each in unit[index - 1 : index + 2 : 2]
            ):
                return None  # `\\text{ boys} - \\text{girls}`
        elif token.text not in "/^{}.":
            return None
    return _factor(words)


def _factor(words: Sequence[str], nouns_max: int = NOUNS_MAX) -> Fraction | None:
    """Return the product of the scales that the words begin with; None if they are not a unit."""
    names = [word for word in words if word]
    factor = Fraction(1)
    while names and names[0].lower() in SCALES:
        factor *= SCALES[names.pop(0).lower()]
    if names == ["times"] or names[:2] == ["times", "per"]:
        names = names[1:]  # `3 times 4` has a value of its own
    if names[:1] == ["more"] and len(names) > 1:
        names = names[1:]  # `12 more pages`; `12 more` may be a difference
    if names[-2:] == ["left", "over"]:
        names = names[:-1]
    lowered = [name.lower() for name in names]
    parts = [part for name in lowered for part in name.split("-")]
    if any(part in SCALES or part in NO_UNITS for part in parts):
        return None
    for before, name, after in zip(["", *lowered], lowered, [*lowered[1:], ""], strict=False):
        if name == OF and (before in NEUTRAL or {before, after} & {"", OF}):
            return None  # `10 of them`, `5 percent of students`
    nouns = [
        name
        for name in names
        if name.lower() not in NEUTRAL and name.lower() != OF and not _is_known(name)
    ]
    if (len(nouns) > 1 or OF in lowered) and any(
        len(noun) < LETTERS_MIN or not NO_NOUNS.isdisjoint(noun.lower().split("-"))
        for noun in nouns
    ):
        return None
    return factor if len(nouns) <= nouns_max else None


def _is_known(name: str) -> bool:
    return all(
        part in ABBREVIATIONS or part in LETTERS or is_unit_name(part) for part in name.split("-")
    )


def _is_unit_word(word: str, attached: bool) -> bool:
    if word in LETTERS or word == OF:
        return not attached
    if attached:
        return word.split("-")[0] in ABBREVIATIONS and _is_known(word)
    return len(word) >= WORD_MIN or word in ABBREVIATIONS


def _words(text: str) -> list[str] | None:
    """Split the contents of a `\\text{…}` into words; None if it has more than words.

    Even a single letter is a unit there, except `k`, which is a thousand.
    """
    text = POWER.sub("", PER.sub("per ", text))
    for mark in "/.~()€£¥₹₩":
        text = text.replace(mark, " ")
    words = text.split()
    are_words = all(part.isalpha() and part != "k" for word in words for part in word.split("-"))
    return words if are_words else None
