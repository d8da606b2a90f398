"""Conversion of inequalities in one variable to an interval or a union of intervals.

3 > x \\ge 1     → x, [1,3)
x<1 or x>3      → x, (-\\infty,1)\\cup(3,\\infty)
\\{x : x>3\\}     → x, (3,\\infty)
x\\ne2            → x, (-\\infty,2)\\cup(2,\\infty)
x>0, x\\ne2       → x, (0,2)\\cup(2,\\infty)
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import inf
from typing import Final

from rollout.rewards.math_answers.number_parser import TooLargeError
from rollout.rewards.math_answers.numbers import read_number
from rollout.rewards.math_answers.structure import (
    both_signs,
    items_of,
    marks,
    split,
    without_grouping,
)

PARTS_MAX: Final = 4
"""Maximum number of splits at `or`."""
RELATIONS: Final = {"<": ("<", False), ">": (">", False), "\\le": ("<", True), "\\ge": (">", True)}
"""Direction, and whether the bound itself is included."""
INFINITY: Final = "\\infty"
EMPTY: Final = "\\emptyset"
UNEQUAL: Final = "\\ne"

UNKNOWN: Final = re.compile(
    r"(?:[a-df-hj-zA-Z]|\\(?!infty|pi|text|emptyset)[a-zA-Z]{2,8})(?:_(?:\w|\{\w{1,8}\}))?"
)
MEMBER: Final = re.compile(r"([a-zA-Z](?:_(?:\w|\{\w{1,8}\}))?) ?\\in ?(?=[(\[])")
AND: Final = re.compile(
    r" ?,? ?\\text ?\{ ?,? ?and ?\} ?|,? and (?=\S)|\\(?:land|wedge)(?![a-zA-Z])"
)
REAL: Final = re.compile(
    rf"(?P<unknown>{UNKNOWN.pattern}) ?\\in ?\\mathbb ?\{{R\}}"
    rf"(?:{AND.pattern}|,|[:|]|\\mid(?![a-zA-Z])|\\text ?\{{ ?such that ?\}})"
)
"""The domain before the inequalities: `x\\in\\mathbb{R}, x\\ne1`."""
OR: Final = re.compile(r" ?,? ?\\text ?\{ ?,? ?or ?\} ?|,? or (?=\S)|\\(?:lor|vee)(?![a-zA-Z])")
MODULUS: Final = re.compile(r"\|(?P<inside>[^|]{1,60})\| ?(?P<sign><|>|\\le|\\ge)(?P<bound>[^|,]+)")
MODULUS_LAST: Final = re.compile(
    r"(?P<bound>[^|,<>]{1,60})(?P<sign><|>|\\le|\\ge) ?\|(?P<inside>[^|]{1,60})\|"
)
MIRRORED: Final = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
CONSTANT: Final = r"(?:\d{1,20}(?:\.\d{1,20})?|\\frac\{\d{1,20}\}\{\d{1,20}\})"
LINEAR: Final = re.compile(
    rf"(?:(?P<before>-?{CONSTANT})(?P<sign>[-+]))?(?P<factor>-?{CONSTANT}?)(?P<unknown>{UNKNOWN.pattern})"
    rf"(?P<after>[-+]{CONSTANT})?"
)
"""`2x-1` or `1-2x`."""
BUILDER: Final = re.compile(
    r"\\\{ ?[a-zA-Z](?: ?\\in ?\\mathbb ?(?:\{R\}|R))? "
    r"?(?:\\mid(?![a-zA-Z])|\\vert(?![a-zA-Z])|[:|])"
)
"""The beginning of `\\{x : x>3\\}`."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """The solutions of one inequality. `x \\ge 1` → `Range("x", "[", "1", "\\infty", ")")`."""

    unknown: str
    opening: str
    lower: str
    upper: str
    closing: str

    def __str__(self) -> str:
        return EMPTY if self.is_empty else f"{self.opening}{self.lower},{self.upper}{self.closing}"

    @property
    def is_empty(self) -> bool:
        """Whether its bounds are numbers and no number satisfies it."""
        order = _order(self.lower, self.upper)
        return order is not None and (
            order > 0 or (order == 0 and self.opening + self.closing != "[]")
        )


def solution_set(text: str) -> tuple[str, str] | None:
    """Return the unknown and the solutions, as intervals, of a tidy text with inequalities in it.

    None for any other text. Inequalities that are separated by a comma are joined by `and`, or by
    `or` if no number satisfies both.
    """
    if (builder := BUILDER.match(text)) and text.endswith("\\}"):
        text = text[builder.end() : -len("\\}")].strip()
    if real := REAL.match(text):
        found = solution_set(text[real.end() :].strip())
        return found if found is not None and found[0] == real["unknown"] else None
    if (without_points := _without_points(text)) is not None:
        return without_points
    text = _without_modulus(text)
    if not any(sign in text for sign in (*RELATIONS, "\\in")):
        return None
    ranges: list[Range] = []
    for alternative in OR.split(text, PARTS_MAX):
        intersection = _both(AND.split(alternative, 2)) or _listed(alternative)
        if intersection is None:
            return None
        ranges += intersection
    if len({each.unknown for each in ranges}) != 1:
        return None
    return ranges[0].unknown, "\\cup".join(str(each) for each in ranges)


def is_any_of_unequal(text: str) -> bool:
    """Return whether a tidy text is `x\\ne2 or x\\ne3`."""
    return UNEQUAL in text and OR.search(text) is not None


def _without_points(text: str) -> tuple[str, str] | None:
    """Return the unknown and the solutions of `x\\ne2,3` or `0<x<5, x\\ne2`, else None.

    The bounds must be numbers. Here a comma means `and`.
    """
    if UNEQUAL not in text:
        return None
    points: dict[Fraction, str] = {}
    names: set[str] = set()
    bounds: list[str] = []
    for condition in AND.split(text, PARTS_MAX):
        are_points = False
        for part in items_of(condition, keep_numbers=True):
            name, sign, point = (each.strip() for each in part.rpartition(UNEQUAL))
            read = {
                value: each for each in both_signs(point) if (value := _value(each)) is not None
            }
            are_points = bool(sign) or (are_points and bool(read))
            if not are_points:
                bounds.append(_without_modulus(part))
                continue
            if not read:
                return None
            names |= {name} if sign else set()
            points |= {value: each.replace(",", "") for value, each in read.items()}
    unknown = names.pop() if len(names) == 1 else ""
    if not UNKNOWN.fullmatch(unknown):
        return None
    everything = _between(unknown, "-" + INFINITY, False, INFINITY, False)
    ranges = _both(bounds) if bounds else [everything]
    if ranges is None or ranges[0].unknown != unknown or ranges[0].is_empty:
        return None
    parts = _cut(ranges[0], points)
    return None if parts is None else (unknown, "\\cup".join(map(str, parts)))


def _cut(whole: Range, points: Mapping[Fraction, str]) -> list[Range] | None:
    """Return the parts of a range without some points; None if a bound is no number."""
    lower = -inf if whole.lower == "-" + INFINITY else _value(whole.lower)
    upper = inf if whole.upper == INFINITY else _value(whole.upper)
    if lower is None or upper is None:
        return None
    parts: list[Range] = []
    for value in sorted(value for value in points if lower <= value <= upper):
        if value == lower:
            whole = replace(whole, opening="(")
        elif value == upper:
            whole = replace(whole, closing=")")
        else:
            parts.append(replace(whole, upper=points[value], closing=")"))
            whole = replace(whole, lower=points[value], opening="(")
    return [*parts, whole]


def _without_modulus(text: str) -> str:
    """Write `|x-2|<3` as `-1<x<5`, and `|x|>1` as two inequalities; other texts are unchanged."""
    match = MODULUS.fullmatch(text) or MODULUS_LAST.fullmatch(text)
    linear = LINEAR.fullmatch(match["inside"].replace(" ", "")) if match else None
    if match is None or linear is None:
        return text
    sign = match["sign"] if match.re is MODULUS else MIRRORED[match["sign"]]
    bound = _value(match["bound"].strip())
    factor = _value({"": "1", "-": "-1"}.get(linear["factor"], linear["factor"]))
    if linear["sign"] == "-" and factor is not None:
        factor = -factor
    terms = [_value(linear[name] or "0") for name in ("before", "after")]
    if bound is None or bound <= 0 or not factor or terms[0] is None or terms[1] is None:
        return text
    centre, radius = -(terms[0] + terms[1]) / factor, bound / abs(factor)
    unknown, lower, upper = linear["unknown"], _latex(centre - radius), _latex(centre + radius)
    if sign in ("<", "\\le"):
        return f"{lower}{sign} {unknown}{sign} {upper}"
    less = "<" if sign == ">" else "\\le"
    return f"{unknown}{less} {lower} or {unknown}{sign} {upper}"


def _latex(value: Fraction) -> str:
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _value(text: str) -> Fraction | None:
    try:
        number = read_number(text, letters_are_units=False)
    except TooLargeError:
        return None
    return None if number is None else number.value


def _both(conditions: Sequence[str]) -> list[Range] | None:
    """Return the range of one inequality, or of two in opposite directions that both hold."""
    parsed = [_range(condition.strip()) for condition in conditions]
    if len(parsed) > 2 or any(each is None for each in parsed):
        return None
    first, *others = [each for each in parsed if each is not None]
    if not others:
        return [first]
    other = others[0]
    if first.upper != INFINITY:
        first, other = other, first
    if first.unknown != other.unknown or first.upper != INFINITY or other.lower != "-" + INFINITY:
        return None
    return [
        Range(
            unknown=first.unknown,
            opening=first.opening,
            lower=first.lower,
            upper=other.upper,
            closing=other.closing,
        )
    ]


def _listed(text: str) -> list[Range] | None:
    """Return the ranges of two inequalities with a comma: `x>1, x<3` means and, `x<1, x>3` or."""
    parts = split(text, (",", ";"))
    together = _both(parts) if len(parts) == 2 else None
    if together is None or _order(together[0].lower, together[0].upper) is None:
        return None
    return (
        [each for part in parts if (each := _range(part)) is not None]
        if together[0].is_empty
        else together
    )


def _range(text: str) -> Range | None:
    if (member := MEMBER.match(text)) and text[-1] in ")]":
        bounds = split(text[member.end() + 1 : -1], (",",))
        return (
            Range(
                unknown=member[1],
                opening=text[member.end()],
                lower=bounds[0],
                upper=bounds[1],
                closing=text[-1],
            )
            if len(bounds) == 2
            else None
        )
    text = without_grouping(text)
    relations = [
        (kind, at)
        for kind, at, depth in marks(text)
        if depth == 0 and (kind in RELATIONS or kind in ("=", "\\ne", ","))
    ]
    if not 1 <= len(relations) <= 2 or not all(kind in RELATIONS for kind, _ in relations):
        return None
    begins, ends = (
        [0, *(at + len(kind) for kind, at in relations)],
        [*(at for _, at in relations), len(text)],
    )
    parts = [text[begin:end].strip() for begin, end in zip(begins, ends, strict=True)]
    signs = [RELATIONS[kind] for kind, _ in relations]
    if signs[0][0] == ">":
        parts, signs = parts[::-1], signs[::-1]
    if not all(parts) or len({direction for direction, _ in signs}) != 1:
        return None
    unknowns = [bool(UNKNOWN.fullmatch(part)) for part in parts]
    if len(parts) == 3:
        return (
            _between(parts[1], parts[0], signs[0][1], parts[2], signs[1][1])
            if unknowns[1]
            else None
        )
    if unknowns[0] == unknowns[1]:
        return None
    if unknowns[0]:
        return _between(parts[0], "-" + INFINITY, False, parts[1], signs[0][1])
    return _between(parts[1], parts[0], signs[0][1], INFINITY, False)


def _between(unknown: str, lower: str, with_lower: bool, upper: str, with_upper: bool) -> Range:
    return Range(
        unknown=unknown,
        opening="[" if with_lower else "(",
        lower=lower,
        upper=upper,
        closing="]" if with_upper else ")",
    )


def _order(lower: str, upper: str) -> int | None:
    """Return the sign of `lower - upper`; None if one of them is not a number."""
    values = _value(lower), _value(upper)
    if values[0] is None or values[1] is None:
        return None
    return (values[0] > values[1]) - (values[0] < values[1])
