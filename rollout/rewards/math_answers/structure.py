"""Parts of an answer: items of lists, tuples, intervals, sets, unions and chains of equalities.

\\{1,2\\} → {1 2}     (1,200, 3] → ( 1 200 3 ]     1,200 → one number
x=2 or x=3 → x=2, x=3     2\\pm\\sqrt3 → two items
"""

import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from rollout.rewards.math_answers.spelling.notations import GREEK_LETTER

ITEMS_MAX: Final = 50
"""A list with more items is not split."""
SIDES_MAX: Final = 8
"""A relation of more quantities equals only the same spelling: each side may equal each other."""
BRACKETS_MAX: Final = 4
"""Maximum pairs of brackets around the whole text that are removed."""

MARK: Final = re.compile(
    r"\\\{|\\\}|\\begin\{[^{}]*\}|\\end\{[^{}]*\}|\\[a-zA-Z]+|\\.|[()\[\]{},;:=<>]"
)
OPENING: Final = frozenset(("(", "[", "{", "\\{"))
CLOSING: Final = frozenset((")", "]", "}", "\\}"))
CLOSED_BY: Final = {"(": (")", "]"), "[": (")", "]"), "\\{": ("\\}",)}

CONJUNCTION: Final = re.compile(
    r" ?,? ?\\text ?\{ ?,? ?(?:and|or) ?\} ?|,? (?:and|or) (?=\S)"
    r"| ?\\(?:lor|vee)(?= ?[a-zA-Z] ?=)"
)
GROUPING: Final = re.compile(r"(?<![\d,.])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)")
"""A number whose commas group its digits."""
GROUPED: Final = re.compile(rf"[-+]?{GROUPING.pattern}(?:\.\d*)?")
PLUS_MINUS: Final = re.compile(r"\\pm(?![a-zA-Z])")
ONE_ARGUMENT: Final = re.compile(r"\\(?:log|ln|lg|exp|sin|cos|tan)(?:_(?:\w|\{\w{1,8}\}))? ?\Z")
ONE_ARGUMENT_CHARS_MAX: Final = 20
"""A function of one argument before its bracket: in `\\log_2(1,024)` no comma separates."""
LETTER: Final = re.compile(r"[a-zA-Z]")
ROOT_INDEX: Final = re.compile(r"^([kmrtxz]|\\lambda|\\theta)_(?:\w|\{\w{1,8}\})$")
"""A root of an equation: `x_1`, `\\lambda_2`. `a_1` is a member of a sequence."""
NO_OPERATION: Final = re.compile(r"\\text ?\{[^{}]*\}|[_^]\{[^{}]*\}|_\w|(?<=[a-zA-Z'}])\([^()]*\)")
"""Parts of a name in which signs and digits do not make a term: texts, indices, arguments."""
LEADING_PLUS: Final = re.compile(r"(?<=[=(,])( ?)\+")
TERM: Final = re.compile(r"[-+/^]|\d[a-zA-Z\\(]")
"""A part of an expression that is no name: `x+y`, `2x`."""
SYSTEM: Final = re.compile(r"\\begin\{cases\}([^<>]{1,500})\\end\{cases\}")
"""Lines without inequalities: `\\begin{cases}x&=1,\\\\y&=2\\end{cases}`."""
UNKNOWN_IS: Final = re.compile(r"\\?[a-zA-Z]{1,10}(?:_(?:\w|\{\w{1,8}\}))? ?=(?!.*\\text)")
ALIGNED: Final = re.compile(
    r"\\begin\{(aligned|align\*?|split|gathered)\}((?:(?!\\\\|\\begin).)*)\\end\{\1\}"
)
"""A single line in an environment for several."""
COORDINATES: Final = re.compile(r"\(([a-zA-Z](?: ?, ?[a-zA-Z]){1,5})\) ?= ?(?=\()")
DOMAIN_LETTER: Final = rf"(?:[a-zA-Z]|{GREEK_LETTER})(?:_(?:\w|\{{\w{{1,8}}\}}))?"
DOMAIN_AND: Final = r" ?, ?| ?\\text ?\{ ?and ?\} ?| and "
DOMAIN: Final = re.compile(
    r"(?:,|(?P<bracket>,? ?\()|(?P<forall>,? ?\\forall)"
    r"|,? ?\\text ?\{ ?,? ?(?:(?P<all>for (?:all|every|any|each|(?P<some>some)))|for|where|with)"
    r"(?: (?P<kind>(?:positive )?integer|real|(?:(?:real|arbitrary) )?constant)(?:s| numbers?)?)?"
    r" ?\}?) ?"
    rf"(?P<variables>{DOMAIN_LETTER}(?:(?:{DOMAIN_AND}){DOMAIN_LETTER}){{0,3}}) ?"
    r"(?:\\in ?\\mathbb ?\{ ?(?P<set>[NRZ]) ?\}(?P<plus>[_^](?:\+|\{ ?\+ ?\}))?"
    r"|(?:\\text ?\{ ?)?(?:is (?:an?|any)|are(?: any)?) "
    r"(?P<is>(?:positive )?integer|real|(?:(?:real|arbitrary) )?constant)s?(?: numbers?)?|) ?"
    r"\}?(?(bracket) ?\))\Z"
)
"""A domain after an answer: `, k\\in\\mathbb{Z}`, `\\text{ for any integer }k`,
`, a,b\\in\\mathbb{R}`.
"""

MATRIX: Final = re.compile(r"\\begin\{[pb]?matrix\}(.*)\\end\{[pb]?matrix\}", re.DOTALL)
MATRIX_CELLS_MAX: Final = 50
"""A matrix with more cells is not split."""


@dataclass(frozen=True)
class Collection:
    """A list, tuple, interval or set. `(0, 1]` → `Collection("(", "]", ("0", "1"))`.

    `2, 3` is a list, without brackets.
    """

    opening: str
    closing: str
    items: tuple[str, ...]

    @property
    def brackets(self) -> str:
        """The two brackets, such as `(]`; empty for a list without brackets."""
        return self.opening + self.closing

    @property
    def is_bare(self) -> bool:
        return not self.opening

    @property
    def is_set(self) -> bool:
        return self.opening == "\\{"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of `x=1, y=2` or `AB=5, f(1)=7`; empty unless each item has a name of its own.

        `x_1=1, x_2=2` has none: these are the two roots, in any order. Nor has a list of equations
        (`2x-y=0, y=3`).
        """
        parts = [split(item, ("=",)) for item in self.items]
        named = [part[0].replace(" ", "") for part in parts if len(part) > 1]
        if any(TERM.search(NO_OPERATION.sub("", name)) for name in named):
            return ()
        names = [ROOT_INDEX.sub(r"\1", name) for name in named if LETTER.search(name)]
        return tuple(names) if len(set(names)) == len(self.items) else ()


def collection(text: str, num_expected: int = 0) -> Collection | None:
    """Split a tidy text that is a list, tuple, interval or set; None for a single answer.

    A comma before a space separates items. `1,200` is one number, with two exceptions: where only
    two items give the total of `num_expected`, and in brackets without `, `. Round brackets around
    a number are dropped where `num_expected` is 1: `(40,000)` is 40,000, and `[40,000]` is an
    interval.
    """
    text = _both_points(CONJUNCTION.sub(", ", text))
    opening, inner, closing = _enclosed(text) or ("", text, "")
    if opening == "\\{" and is_set(inner):
        return Collection(opening, closing, (inner,))
    items, all_commas = items_of(inner, keep_numbers=True), items_of(inner, keep_numbers=False)
    is_list = not opening or opening == "\\{"
    if is_list:
        items = [signed for item in items for signed in both_signs(item)]
    is_single = not opening or (opening + closing == "()" and GROUPED.fullmatch(inner))
    if (len(items) != num_expected or (num_expected == 1 and not is_single)) and (
        len(all_commas) == num_expected or (opening and ", " not in inner)
    ):
        items = [each for item in all_commas for each in (both_signs(item) if is_list else [item])]
    if not 1 < len(items) <= ITEMS_MAX or not all(items):
        return None
    return Collection(opening, closing, tuple(items))


def is_set(text: str) -> bool:
    """Return whether a text is a set: `\\{1,2\\}`, `\\emptyset`."""
    return text == "\\emptyset" or (
        text.startswith("\\{") and _closing_at(text) == len(text) - len("\\}")
    )


def assignments(text: str) -> str | None:
    """Rewrite `(x,y)=(1,2)` and systems of equations as `x=1, y=2`; other texts are unchanged.

    None where the numbers of names and of values differ.
    """
    if system := SYSTEM.fullmatch(text):
        lines = [line.strip().rstrip(",") for line in system[1].replace("&=", "=").split("\\\\")]
        lines = [line for line in lines if line]
        is_assigned = all(
            line.count("=") == 1 and UNKNOWN_IS.match(line) and not {"&", ","} & set(line)
            for line in lines
        )
        return ", ".join(lines) if is_assigned else text
    if line := ALIGNED.fullmatch(text):
        return line[2].replace("&", "").strip()
    named = COORDINATES.match(text)
    enclosed = _enclosed(text[named.end() :]) if named else None
    if named is None or enclosed is None:
        return text
    names, values = named[1].split(","), split(enclosed[1], (",", ";"))
    if len(names) != len(values):
        return None
    return ", ".join(f"{name.strip()}={value}" for name, value in zip(names, values, strict=True))


def domain(text: str) -> tuple[str, frozenset[str], str] | None:
    """Split `k\\pi, k\\in\\mathbb{Z}` into (`k\\pi`, {`k`}, `Z`); None for a text without a domain.

    The numbers are `N`, `R` (also for constants), `Z`, `Z+`, or empty after `\\text{ for all }x`.
    """
    found = DOMAIN.search(text)
    while found is not None and len(set(names := _letters(found))) < len(names):
        found = DOMAIN.search(text, found.start() + 1)  # an item before `n` in `-n, n, n\\in…`
    if found is None or found[0].count("{") != found[0].count("}"):
        return None
    kind = found["kind"] or found["is"] or ""
    numbers = found["set"] or ("Z" if "integer" in kind else "R" if kind else "")
    numbers += "+" if found["plus"] or "positive" in kind else ""
    if not numbers and not found["forall"] and not found["all"]:
        return None
    rest = text[: found.start()].strip()
    variables = frozenset(_letters(found))
    marks_of_all = ("<", ">", "\\le", "\\ge", *(f"({variable})" for variable in variables))
    if found["some"] and any(mark in rest for mark in marks_of_all):
        return None  # `f(n)=2n \\text{ for some }n`
    return rest, variables, numbers


def _letters(domain: re.Match[str]) -> list[str]:
    return re.split(DOMAIN_AND, domain["variables"])


def _both_points(text: str) -> str:
    """Write `(\\pm 1, 0)` as `(1, 0), (-1, 0)`; other texts are unchanged."""
    opening, inner, closing = _enclosed(text) or ("", "", "")
    is_point = opening + closing == "()" and len(items_of(inner, keep_numbers=False)) > 1
    return ", ".join(both_signs(text)) if is_point else text


def both_signs(text: str) -> list[str]:
    """Split `1\\pm 2` into `1+ 2` and `1- 2`."""
    if len(PLUS_MINUS.findall(text)) != 1:
        return [text]
    return [
        LEADING_PLUS.sub("", PLUS_MINUS.sub(sign, text)).removeprefix("+").strip() for sign in "+-"
    ]


def parts_of_union(text: str) -> tuple[str, ...]:
    """Split `(0,1)\\cup[2,3]` into its two intervals."""
    return tuple(split(text, ("\\cup",)))


def parts_of_ratio(text: str) -> tuple[str, ...]:
    """Split `1:2:3` into its three terms."""
    return tuple(split(text, (":",)))


def matrix(text: str) -> tuple[tuple[str, ...], ...] | None:
    """Split a matrix, in round or square brackets, into rows of cells; None for other texts."""
    match = MATRIX.fullmatch(text)
    if match is None or "\\begin" in match[1]:
        return None
    lines = match[1].strip().removesuffix("\\\\").split("\\\\")
    rows = tuple(tuple(cell.strip() for cell in line.split("&")) for line in lines)
    cells = [cell for row in rows for cell in row]
    is_split = len(cells) <= MATRIX_CELLS_MAX and all(cells) and not cells[0].startswith("[")
    return rows if is_split else None


def sides(text: str) -> list[str]:
    """Split `7+8 = 15` into `7+8`, `15`; also at `\\approx` and similar signs."""
    return split(text, ("=", "\\approx", "\\equiv", "\\simeq"))


def without_brackets(text: str) -> str:
    """Return `5` for `((5))` and `\\{5\\}`; `(1)(2)`, `(1,2)`, `\\{\\{5\\}\\}` are unchanged."""
    for _ in range(BRACKETS_MAX):
        for opening, closing in (("(", ")"), ("{", "}"), ("\\{", "\\}")):
            if (
                text.startswith(opening)
                and text.endswith(closing)
                and _closing_at(text) == len(text) - len(closing)
            ):
                inner = text[len(opening) : -len(closing)].strip()
                if opening == "\\{" and is_set(inner):
                    return text
                is_number = opening == "(" and GROUPED.fullmatch(inner)
                if opening != "{" and not is_number and len(split(inner, (",", ";"))) > 1:
                    return text  # a tuple, an interval or a set
                text = inner
                break
        else:
            break
    return text


def without_grouping(text: str) -> str:
    """Remove the commas of thousands, but not in brackets: `\\gcd(24,180)` has two arguments."""
    grouping = _grouping(text)
    groups: list[bool] = []
    dropped: set[int] = set()
    for kind, at, _ in marks(text):
        if kind in CLOSING or kind.startswith("\\end{"):
            groups[-1:] = []
        elif kind in OPENING or kind.startswith("\\begin{"):
            before = text[max(0, at - ONE_ARGUMENT_CHARS_MAX) : at]
            is_index = before.endswith("_")
            is_argument = kind == "(" and ONE_ARGUMENT.search(before)
            groups.append(bool(is_argument) or (kind == "{" and not is_index))
        elif at in grouping and all(groups):
            dropped.add(at)
    return "".join(sign for at, sign in enumerate(text) if at not in dropped)


def without_outer_group(text: str) -> str:
    """Return `(1,2)` for `\\{(1,2)\\}` and `((1,2))`; other texts, also sets of sets, unchanged."""
    for _ in range(BRACKETS_MAX):
        opening, inner, closing = _enclosed(text) or ("", "", "")
        inner = inner.strip()
        is_set_of_set = opening == "\\{" and is_set(inner)
        if opening + closing not in ("()", "\\{\\}") or is_set_of_set or not _enclosed(inner):
            break
        text = inner
    return text


def nesting(text: str) -> int:
    """Return the depth of the most deeply nested group."""
    return max((depth + 1 for kind, _, depth in marks(text) if kind in OPENING), default=0)


def _enclosed(text: str) -> tuple[str, str, str] | None:
    """Split a text within one pair of brackets into (opening, contents, closing), or None."""
    opening = "\\{" if text.startswith("\\{") else text[:1]
    end = _closing_at(text) if opening in CLOSED_BY else None
    if end is None or text[end:] not in CLOSED_BY[opening]:
        return None
    return opening, text[len(opening) : end], text[end:]


def items_of(text: str, keep_numbers: bool) -> list[str]:
    """Split a list; with `keep_numbers`, `1,200` is one item."""
    return split(text, (",", ";"), _grouping(text) if keep_numbers else frozenset())


def _grouping(text: str) -> frozenset[int]:
    """Return the positions of the commas that may group digits."""
    numbers = GROUPING.finditer(text)
    return frozenset(at for number in numbers for at in range(*number.span()) if text[at] == ",")


def marks(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield (text, position, number of groups around it) of each bracket, separator and command.

    Round and square brackets close each other, since `(0, 1]` is an interval.
    """
    depth = 0
    for mark in MARK.finditer(text):
        kind = mark[0]
        if kind in CLOSING or kind.startswith("\\end{"):
            depth -= 1
        yield kind, mark.start(), depth
        if kind in OPENING or kind.startswith("\\begin{"):
            depth += 1


def _closing_at(text: str) -> int | None:
    """Return the position at which the group at the beginning of the text ends."""
    for kind, at, depth in marks(text):
        if depth == 0 and at > 0 and kind in CLOSING:
            return at
    return None


def split(
    text: str, separators: tuple[str, ...], skipped: AbstractSet[int] = frozenset()
) -> list[str]:
    """Split a text at separators that are in no group and not at a position in `skipped`."""
    parts: list[str] = []
    begin = 0
    for kind, at, depth in marks(text):
        if depth == 0 and kind in separators and at not in skipped:
            parts.append(text[begin:at].strip())
            begin = at + len(kind)
    return [*parts, text[begin:].strip()]
