"""Comparison of answers in words, letters of choices, and times of day.

\\text{Friday} = friday     \\textbf{(B)} = B     \\textbf{(B) } 27 → B, 27     5:30 p.m.
"""

import re
from typing import Final

from rollout.rewards.math_answers.spelling.tidying import without_spaces

TEXT: Final = re.compile(r"\\text ?\{([^{}]*)\}")
WORDS: Final = re.compile(r"[a-zA-Z][a-zA-Z .'()-]*")
WORD: Final = re.compile(r"[a-zA-Z]+")
LETTERS: Final = re.compile(r"[a-zA-Z]+(?: [a-zA-Z]+)*\.?")
WORD_MIN: Final = 4
"""Minimum letters of a word; a shorter run of letters is a product, in any order."""
SHORT_WORDS: Final = frozenset(("yes", "no", "odd", "all", "any", "one", "two", "six", "ten"))
CAPITALS: Final = re.compile(r"[A-Z]{3,}")

NONE_OF: Final = re.compile(r"\A(no [a-z ]*[a-z]{3})s\Z")
"""`no solutions`, which is `no solution`."""

CHEMICAL: Final = re.compile(r"(?!No|Up|In|On)[A-Z][a-z]|[A-Z][a-z][A-Z]|[A-Z]{2}[a-z]")
"""A symbol or formula whose case counts: `Mg`, `NaF`, `HCl`. `No` and `Yes` are words."""

ROMAN: Final = re.compile(r"[IVX]{1,5}(?:(?: ?, ?and |, ?| and )[IVX]{1,5}){0,9}")
"""Roman numerals: `IV`; `I and II`."""
ROMANS: Final = re.compile(r"[IVX]+")

CHOICE: Final = re.compile(r"(?:(?:[Oo]ption|[Cc]hoice|[Aa]nswer) )?\(?([A-Za-z])\)?")
CHOICES: Final = re.compile(
    r"(?P<set>\\\{ ?)?(?:\([A-Z]\)|[A-Z])"
    r"(?: ?(?:, ?(?:and)?|(?<![A-Z])and) ?(?:\([A-Z]\)|[A-Z])){1,9}(?(set) ?\\\})"
)
"""Several choices: `B, E`, `(B), (E)`, `B and E`."""
CAPITAL: Final = re.compile(r"[A-Z]")
LABELLED: Final = re.compile(
    r"(?:\\text ?\{ ?\(([A-E])\)[.:]? ?\} ?|\\text ?\{ ?\(([A-E])\) ?(?=[^{} ][^{}]*\}$)"
    r"|\(([A-E])\) ?(?=[\d\\])|([A-E])[.)] ?(?=[\d\\]))(?P<rest>.+)"
)
"""A choice and its content: `\\text{(B) }27`, `\\text{(B) red}`, `\\text{(B) 27}`, `B. 27`."""
SECOND_CHOICE: Final = re.compile(r"\([A-E]\)|^(?:and|or)(?![a-zA-Z])")

CLOCK: Final = re.compile(
    r"(\d{1,2})(?:(?:\{:\}|:)(\d\d))? ?(?:(?:\\text ?\{ ?)?([aApP]) ?\.? ?[mM] ?\.? "
    r"?\}?)?(?:\\text ?\{ ?\})?"
)
"""Hour, minute, `a` or `p`."""


def same_words(answer: str, gold: str) -> bool | None:
    """Return whether two texts in words are equal; None if one of them may be mathematics.

    `abc` and `cba` may be the same product. Four and more letters are a word: `stop` is not `pots`,
    and `IV` is not `VI`.
    """
    is_text = "\\text" in answer or "\\text" in gold
    answer, gold = (" ".join(TEXT.sub(r"\1", text).split()).strip(" .") for text in (answer, gold))
    if is_text and answer and without_spaces(answer) == without_spaces(gold):
        return True
    if ROMAN.fullmatch(answer) and ROMAN.fullmatch(gold):
        return set(ROMANS.findall(answer)) == set(ROMANS.findall(gold))
    choices = CHOICE.fullmatch(answer), CHOICE.fullmatch(gold)
    if choices[0] and choices[1]:
        letter, gold_letter = choices[0][1], choices[1][1]
        return letter == gold_letter or (is_text and letter.lower() == gold_letter.lower())
    if not WORDS.fullmatch(answer) or not WORDS.fullmatch(gold):
        return None
    if CAPITALS.fullmatch(answer) and CAPITALS.fullmatch(gold):
        return answer == gold
    same = NONE_OF.sub(r"\1", answer.lower()) == NONE_OF.sub(r"\1", gold.lower())
    if is_text and any(map(CHEMICAL.fullmatch, (answer, gold))):
        return answer == gold
    if is_text or answer == gold:
        return same
    if LETTERS.fullmatch(answer) and LETTERS.fullmatch(gold):
        words = [word.strip(".") for text in (answer, gold) for word in text.lower().split()]
        return same if any(len(word) >= WORD_MIN or word in SHORT_WORDS for word in words) else None
    is_word = any(len(word) >= WORD_MIN for word in WORD.findall(answer))
    return True if same and is_word else None


def labelled_choice(text: str) -> tuple[str, str]:
    """Split `\\text{(B) }27` into (`B`, `27`); a text without a leading letter gives ("", text)."""
    match = LABELLED.fullmatch(text)
    if match is None or SECOND_CHOICE.search(match["rest"]):
        return "", text
    letter, rest = match[1] or match[2] or match[3] or match[4], match["rest"].strip()
    if match[2]:
        rest = rest.removesuffix("}") if rest[0] in "-.0123456789" else f"\\text{{{rest}"
    return letter, rest


def is_choice(text: str) -> bool:
    """Return whether a text is only the letter of a choice."""
    return CHOICE.fullmatch(TEXT.sub(r"\1", text).strip(" .")) is not None


def same_choices(answer: str, gold: str) -> bool | None:
    """Return whether two texts have the same letters of several choices, in any order.

    None for other texts, and if neither is set as text: letters may be variables.
    """
    texts = [" ".join(TEXT.sub(r" \1 ", text).split()).strip(" .") for text in (answer, gold)]
    if "\\text" not in answer + gold or not all(map(CHOICES.fullmatch, texts)):
        return None
    letters, gold_letters = (sorted(CAPITAL.findall(text)) for text in texts)
    return letters == gold_letters


def same_time(answer: str, gold: str) -> bool | None:
    """Return whether two times of day are equal; None for other texts, and without a.m. or p.m.

    `5:30` may be a.m. or p.m.; `17:30` is 5:30 p.m., and `0:30` is 12:30 a.m.
    """
    matches = CLOCK.fullmatch(answer), CLOCK.fullmatch(gold)
    if not matches[0] or not matches[1] or not (matches[0][3] or matches[1][3]):
        return None
    time, gold_time = _time(matches[0]), _time(matches[1])
    same_half = time[2] == gold_time[2] or not (time[2] and gold_time[2])
    return time[:2] == gold_time[:2] and same_half


def _time(match: re.Match[str]) -> tuple[int, int, str]:
    hour, minute, half = int(match[1]), int(match[2] or "0"), (match[3] or "").lower()
    if hour == 0 and not half:
        return 12, minute, "a"
    return (hour - 12, minute, "p") if 12 < hour < 24 and not half else (hour, minute, half)
