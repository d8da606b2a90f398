"""Comparison of answers in words, letters of choices, and times of day.

\\text{Friday} = friday     \\textbf{(B)} = B     \\textbf{(B) } 27 → B, 27     5:30 p.m.
"""

import re
from typing import Final

from rollout.rewards.math_answers.spelling import without_spaces

TEXT: Final = re.compile(r"\\text ?\{([^{}]*)\}")
WORDS: Final = re.compile(r"[a-zA-Z][a-zA-Z .'()-]*")
LETTERS: Final = re.compile(r"[a-zA-Z]+(?: [a-zA-Z]+)*\.?")
WORD_MIN: Final = 4
"""Number of letters from which on a run of letters is a word and not a product in any order."""
SHORT_WORDS: Final = frozenset(("yes", "no", "odd", "all", "any", "one", "two", "six", "ten"))
CAPITALS: Final = re.compile(r"[A-Z]{3,}")

CHOICE: Final = re.compile(r"(?:(?:[Oo]ption|[Cc]hoice|[Aa]nswer) )?\(?([A-Za-z])\)?")
LABELLED: Final = re.compile(
    r"(?:\\text ?\{ ?\(([A-E])\)[.:]? ?\} ?|\\text ?\{ ?\(([A-E])\) ?(?=[^{} ][^{}]*\}$)"
    r"|\(([A-E])\) ?(?=[\d\\])|([A-E])[.)] ?(?=[\d\\]))(?P<rest>.+)"
)
"""A choice with its content behind it: `\\text{(B) }27`, `\\text{(B) red}`, `(B)27`, `B. 27`."""

ANOTHER: Final = re.compile(r"\([A-E]\)|^(?:and|or)(?![a-zA-Z])")

CLOCK: Final = re.compile(
    r"(\d{1,2})(?:(?:\{:\}|:)(\d\d))? ?(?:(?:\\text ?\{ ?)?([aApP]) ?\.? ?[mM] ?\.? "
    r"?\}?)?(?:\\text ?\{ ?\})?"
)
"""Hour, minute, `a` or `p`."""


def same_words(answer: str, gold: str) -> bool | None:
    """Return whether two texts in words are equal; None where one of them may be mathematics.

    `abc` and `cba` may be one product. Four letters and more are a word: `stop` is not `pots`.
    """
    one, other = (" ".join(TEXT.sub(r"\1", text).split()).strip(" .") for text in (answer, gold))
    is_text = "\\text" in answer or "\\text" in gold
    if is_text and one and without_spaces(one) == without_spaces(other):
        return True
    choices = CHOICE.fullmatch(one), CHOICE.fullmatch(other)
    if choices[0] and choices[1]:
        one, other = choices[0][1], choices[1][1]
        return one == other or (is_text and one.lower() == other.lower())
    if not WORDS.fullmatch(one) or not WORDS.fullmatch(other):
        return None
    if CAPITALS.fullmatch(one) and CAPITALS.fullmatch(other):
        return one == other
    same = one.lower() == other.lower()
    if is_text or one == other:
        return same
    if LETTERS.fullmatch(one) and LETTERS.fullmatch(other):
        words = [word.strip(".") for text in (one, other) for word in text.lower().split()]
        return same if any(len(word) >= WORD_MIN or word in SHORT_WORDS for word in words) else None
    return True if same and min(len(word) for word in one.split()) >= WORD_MIN else None


def labelled_choice(text: str) -> tuple[str, str]:
    """`\\text{(B) }27` → (`B`, `27`); a text without such a letter before it → ("", text)."""
    found = LABELLED.fullmatch(text)
    if found is None or ANOTHER.search(found["rest"]):
        return "", text
    letter = found[1] or found[2] or found[3] or found[4]
    return letter, (f"\\text{{{found['rest']}" if found[2] else found["rest"]).strip()


def is_choice(text: str) -> bool:
    """Return whether a text is the letter of a choice and nothing else."""
    return CHOICE.fullmatch(TEXT.sub(r"\1", text).strip(" .")) is not None


def same_time(answer: str, gold: str) -> bool | None:
    """Return whether two times of day are equal; None for other texts, and without a.m. or p.m.

    `5:30` may be either; `17:30` is 5:30 p.m.
    """
    times = CLOCK.fullmatch(answer), CLOCK.fullmatch(gold)
    if not times[0] or not times[1] or not (times[0][3] or times[1][3]):
        return None
    given, wanted = _time(times[0]), _time(times[1])
    return given[:2] == wanted[:2] and (given[2] == wanted[2] or not (given[2] and wanted[2]))


def _time(found: re.Match[str]) -> tuple[int, int, str]:
    hour, minute, half = int(found[1]), int(found[2] or "0"), (found[3] or "").lower()
    return (hour - 12, minute, "p") if 12 < hour < 24 and not half else (hour, minute, half)
