"""Operators that a computer algebra system does not know: derivatives, cross products, transposes.

Derivatives are replaced by symbols, so that algebra treats them as unknowns.

    m\\frac{dv}{dt}+bv = f  ──▶  m Q_{d1,v,t}+bv = f     x'' ──▶ Q_{p2,x}     \\dot{x} ──▶ Q_{o1,x}

A computer algebra system evaluates the derivative of one independent symbol with respect to another
to 0 and ignores primes. Without the replacement it would accept `bv=f` for `m\\frac{dv}{dt}+bv=f`.
Derivatives in different notations become different symbols.
"""

import re
from collections.abc import Iterator
from string import ascii_letters
from typing import Final

from rollout.rewards.math_answers.spelling.notations import GREEK_LETTER

BASE: Final = r"((?:\\[a-zA-Z]{1,20}|[a-zA-Z])(?:_(?:\w|\{[^{}]{0,20}\}))?)"
"""A function: `v`, `v_o`, `\\theta_{max}`."""
INDEX: Final = r"(_\w|_\{[^{}]{0,20}\})?"
"""An index after the dots or the primes: `\\dot{x}_0`."""
ORDER: Final = r"(?:\^ ?(?:(\d)|\{ ?(\d) ?\}))?"
VARIABLE: Final = r"(\\[a-zA-Z]{1,20}|[a-zA-Z])"

FRACTION: Final = re.compile(
    r"\\frac ?\{ ?(?P<d>d|\\partial|\\delta|D(?= ?[a-z\\])|\\text ?\{ ?d ?\})"
    + f"{ORDER} ?{BASE}"
    + r" ?\} ?\{ ?(?P=d) ?"
    + f"{VARIABLE} ?{ORDER}"
    + r" ?\}"
)
SLASH: Final = re.compile(rf"(?<![a-zA-Z\\])d ?{BASE} ?/ ?d ?{VARIABLE}(?![a-zA-Z])")
DOTS: Final = re.compile(
    rf"\\(d{{1,4}})ot(?![a-zA-Z]) ?(?:\{{ ?{BASE} ?\}}|{BASE}){INDEX}(\([a-zA-Z\d]\))?"
)
PRIMES: Final = re.compile(
    BASE
    + r"(?:('{1,4})|\^ ?(?:\{ ?((?:(?:\\prime|') ?){1,4})\}|(\\prime(?![a-zA-Z]))"
    + r"|\{ ?\((\d{1,2})\) ?\}))"
    + INDEX
    + r"(\([a-zA-Z\d]\))?"
)
CHANGED: Final = rf"((?:[a-zA-Z]|{GREEK_LETTER})(?:_(?:\w|\{{[^{{}}]{{0,20}}\}}))?)"
CHANGE: Final = (
    rf"(?:\\Delta(?![a-zA-Z])|(?:\\text ?)?\{{ ?\\Delta ?\}}) ?(?:{CHANGED}|\{{ ?{CHANGED} ?\}})"
)
DIFFERENCE: Final = re.compile(rf"\( ?{CHANGE} ?\)|{CHANGE}")
"""A change, such as `\\Delta v`."""
OTHER_DIFFERENCE: Final = re.compile(
    r"\\Delta ?(?:[_(|]"
    r"|\\(?:text|vec|bar|hat|dot|tilde|overline|math[a-z]{2,4}|ln|log)(?![a-zA-Z]))"
)
"""A change of something other than a letter: `\\Delta\\text{TC}`, `\\Delta_rH`."""
OPERATOR: Final = re.compile(
    r"\\frac ?\{ ?(?:d|\\partial) ?(?:\^[^{}]|\^ ?\{[^{}]{0,9}\})? ?\} ?"
    rf"\{{ ?(?:d|\\partial) ?{VARIABLE}[^{{}}]{{0,9}}\}}|(?<![a-zA-Z])d ?/ ?d ?{VARIABLE}"
)
"""The derivative of what follows: `\\frac{d}{dx}`."""
APPLICATION: Final = re.compile(
    rf"(?:(?:(?<![a-zA-Z\\^_])|(?<=[^a-zA-Z\\][a-zA-Z])|(?<=\A[a-zA-Z]))([a-zA-Z])|(?<![_^])({GREEK_LETTER}))"
    r" ?\(([^(),;]{1,60})\)"
)
"""A letter before round brackets: a function or a factor."""
FACTORS: Final = frozenset("dei")
"""Letters that are never functions: a differential, Euler's number, the imaginary unit."""
NOT_ALPHANUMERIC: Final = re.compile(r"[^0-9A-Za-z]")

ANGLE_NAME: Final = re.compile(r"\\(?:angle|triangle)(?![a-zA-Z]) ?([A-Z]{1,3})")
NABLA: Final = re.compile(r"\\nabla(?![a-zA-Z])(?: ?(\\times|\\cdot)(?![a-zA-Z]))?")
"""The gradient, the divergence or the curl."""
INVERSE_FUNCTION: Final = re.compile(r"([fgh]) ?\^ ?\{ ?-1 ?\} ?\(")
FUNCTION: Final = re.compile(r"([fgh]) ?\(")
BAR: Final = r"(?:\||\\vert(?![a-zA-Z]))"
MODULUS: Final = re.compile(rf"{BAR}((?:(?!\\vert)[^|]){{1,100}}){BAR}")
TRANSPOSED: Final = re.compile(
    r"\^ ?(?:T|\\top|\\text ?\{ ?T ?\}|\{ ?(?:T|\\top|\\text ?\{ ?T ?\}) ?\})"
)
"""Of anything, since algebra drops the T, also that of the power `(1+r)^T`."""
OF_WHOLE_NUMBERS: Final = re.compile(
    r"!!|\\(?:gcd|lcm|operatorname ?\{ ?(?:gcd|lcm) ?\})(?![a-zA-Z])[^a-zA-Z]*[a-zA-Z]"
)
"""Functions that algebra knows only of whole numbers, or not at all: to it `\\gcd(a,b)` is 1, and
`3!!` is (3!)!.
"""
MISREAD: Final = re.compile(
    r"\\(?:text|operatorname|hat|bar|vec|tilde|overline|overrightarrow|math[a-z]{2,4}) ?\{[^{}]*\}"
    r"|_(?:\\[a-zA-Z]+|\w|\{[^{}]*\})"
    r"|(?P<name>I|(?<![\d.])E|E(?![-+]?\d)|\\(?:gamma|Gamma(?! ?\())(?![a-zA-Z]))"
    r"(?P<index>_(?:\w|\\[a-zA-Z]+|\{(?:[^{}]|\\text ?\{[^{}]*\}){1,20}\}))?"
    r"|\\[a-zA-Z]+"
)
"""Names that algebra misreads (`name`), and names that contain them.

`I` is the imaginary unit to it, `\\gamma` is Euler's constant, and it cannot read `E_0`. `1E+3` has
no name.
"""
CROSS_PRODUCT: Final = re.compile(
    r"[A-Z] ?\\times ?[A-Z]|\\(?:vec|hat|overrightarrow|text) ?(?:\{ ?\w{1,2} ?\}|\w) ?\\times"
)
OPERAND: Final = r" ?\d{0,9}(?:[a-zA-Z(|]|\\(?!frac|sqrt|pi(?![a-zA-Z]))[a-zA-Z])"
TIMES: Final = re.compile(rf"(?<!\\pi)(?<!\\pi )(?<=[a-zA-Z)}}| ])\\times(?={OPERAND})")
"""The sign of a product that may be a cross product: `u\\times 2v`, but not `3\\times x`."""
DOT: Final = re.compile(rf"(?<!\\pi)(?<!\\pi )(?<=[a-zA-Z)}}| ])\\cdot(?={OPERAND})")
PRODUCT_SIGN: Final = r"\\(?:cdot|times)(?![a-zA-Z])"
FRACTIONAL_PART: Final = re.compile(
    rf"(?:[-+*/^\d)}}{{]|(?<![\\a-zA-Z])[a-zA-Z]|{PRODUCT_SIGN}) ?\\\{{"
    rf"|\\\}} ?(?:[-+*/^(a-zA-Z\d]|{PRODUCT_SIGN})"
)
"""Braces within a term: `n+\\{x\\}`, `2\\{x\\}`. After a command (`\\setminus\\{0\\}`) they are
a set.
"""
WHOLE: Final = re.compile(
    r"(?P<before>\A|=) ?(?P<bracket>\[|\\\{)(?![A-Z]+\]|\\begin)"
    r"(?=[^][(),;&=]{0,99}?(?<![a-zA-Z\\])[a-zA-Z])(?P<inside>[^][(),;&=]{1,100}?)(?:\]|\\\})\Z"
)
"""A last side with a letter, in brackets that no term has: `[x]`, `\\{x\\}`; not `[2(x+1)]`."""
TERM_IN_BRACKETS: Final = re.compile(
    r"(?<!\\)(?<!\]\^)(?<!\]\^\{\d)(?P<before>(?:[-+*/=({})\d]|\A|(?<!\])(?<!\] )\\(?:cdot|times)"
    r"(?![a-zA-Z])) ?)\[(?![A-Z]+\]|\\begin)"
    r"(?P<inside>-?(?=[^][]{0,60}?(?<![a-zA-Z\\])[a-zA-Z])"
    r"(?:[^][(),;&={}+-]|\{(?:[^][,;&={}]|\{[^][,;&={}]{0,30}\}){0,60}\}){1,60})\]"
    r"(?! ?(?:[_^[]|\\(?:cdot|times) ?\[))"
)
"""A single term with a letter in needless square brackets: `2[\\frac n2]`, `[x]+1`; no `[A][B]`."""
ADDED: Final = re.compile(r"[\w)}] ?[-+]")
FRACTION_BY_NUMBER: Final = re.compile(r"\\frac ?\{[^{}]{1,40}\} ?\{\d{1,9}\}")
FLOOR: Final = r"\g<before>\\lfloor \g<inside>\\rfloor "
WORD_BETWEEN: Final = re.compile(
    r"[\d)}] ?\\text ?\{[^{}]*[a-zA-Z]{2}[^{}]*\} ?(?:[-+]? ?[\d.(]|\\(?:frac|sqrt|pi)(?![a-zA-Z]))"
    r"|\d ?[a-zA-Z]{2,20}(?: [a-zA-Z]{2,20}){0,3} \d| (?:to|by|over|minus|plus|mod) "
)
"""A word between two numbers, which algebra takes for a factor: `3\\text{ to }1`, `5 ft 6 in`."""
SINGLE: Final = re.compile(r"\{ ?(\\[a-zA-Z]+|\w) ?\}")
"""Braces around a single letter, digit or command."""
TOKEN: Final = re.compile(r"\\[a-zA-Z]+|\d+|\S")
NAME_OR_LETTER: Final = re.compile(
    r"\\(?:operatorname|text) ?\{[^{}]*\}|(?P<letter>\\[a-zA-Z]+|[a-zA-Z])"
)
SUM: Final = re.compile(
    r"\\(?:sum|prod)(?![a-zA-Z]) ?(?:\^ ?(?:\{[^{}]{0,40}\}|\w|\\[a-z]{2,9}) ?)?"
    r"(?:_ ?(?:\{([^{}]{0,40})\}|(\w|\\[a-z]{2,9})))?"
)
INDEXED: Final = re.compile(
    r"_ ?(?:\{(?:[^{}]|\{[^{}]{0,20}\}){1,20}\}|[a-zA-Z]|\\[a-zA-Z]{2,10})|\^ ?\{ ?\([^{}]{0,20}"
    r"|(?:[a-zA-Z]|\\[a-z]{2,10})'{0,3} ?\( ?(?:[a-zA-Z]|\\[a-z]{2,10}) ?\)"
)
"""Something that may have another value for each index of a sum: `x_i`, `x^{(i)}`, `f(k)`."""
LIMIT: Final = re.compile(r"\\lim(?:inf|sup)?(?![a-zA-Z])")
PRODUCT_OF_CAPITALS: Final = re.compile(r"(?<![a-zA-Z\\{])[A-Z]{2,4}(?![a-zA-Z])")
"""It may be one of matrices: where two orders of it occur, their difference is not 0."""
SYMBOL: Final = re.compile(r"Q_\{([a-z])(\d{1,2}),([^{}]*)\}")
INVERSE: Final = re.compile(r"[A-Z]\}? ?\^ ?\{ ?-1 ?\}")
CAPITAL: Final = re.compile(r"[A-Z]")
COMMAND: Final = re.compile(r"\\[a-zA-Z]+")
LETTER: Final = re.compile(r"\\[a-zA-Z]+|[a-zA-Z]")
"""A letter or a command."""
PLAIN_FRACTION: Final = re.compile(r"\\frac ?\{(\w{1,20})\} ?\{(\w{1,20})\}")


def derivatives_as_symbols(text: str) -> str:
    """Replace each derivative of a single function in a tidy expression by a symbol.

    `\\frac{d}{dx} x^2` is unchanged: the algebra system computes it.
    """
    text = FRACTION.sub(_fraction, text)
    text = SLASH.sub(lambda match: _symbol("d", "1", match[1], match[2]), text)
    text = DOTS.sub(
        lambda match: _symbol(
            "o", str(len(match[1])), (match[2] or match[3]) + (match[4] or ""), match[5] or ""
        ),
        text,
    )
    return PRIMES.sub(_primed, text)


def differences_as_symbols(text: str) -> str:
    """Replace each `\\Delta v` by a symbol: algebra would cancel the factor `\\Delta`."""

    def symbol(match: re.Match[str]) -> str:
        name = _symbol("g", "", next(filter(None, match.groups())))
        # Alone in brackets, it would be the argument of a letter before them.
        return f"(1\\cdot{name})" if match[0].startswith("(") else f"{{{name}}}"

    return DIFFERENCE.sub(symbol, text)


def functions(*texts: str) -> set[str]:
    """Return the letters that one of the texts applies to several arguments, as in `f(n)=f(n-1)`.

    They are functions and no factors unless they also occur alone, or an argument has several
    letters, as in `m(g+a)`.
    """
    return {name for text in texts for name in _functions_of(text)}


def applications_as_symbols(text: str, names: set[str]) -> str:
    """Replace the value of a function, such as `f(n-1)`, by a symbol. `names`: as `functions`."""

    def symbol(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in names:
            return match[0]
        argument = "".join(
            each if each.isalnum() else f"{ord(each):02X}" for each in _plain(match[3])
        )
        return _symbol("f", "", name, argument)

    return APPLICATION.sub(symbol, text)


def _functions_of(text: str) -> Iterator[str]:
    arguments: dict[str, set[str]] = {}
    for match in APPLICATION.finditer(text):
        arguments.setdefault(match[1] or match[2], set()).add(_plain(match[3]))
    for name, found in arguments.items():
        letters = LETTER.findall(_without_applications(text, name))
        is_factor = len(found) < 2 or name in FACTORS or name in letters
        if not is_factor and all(map(_has_one_letter, found)):
            yield name


def _without_applications(text: str, name: str) -> str:
    """Return the text with only the arguments where a letter is applied to them."""
    return APPLICATION.sub(
        lambda match: match[3] if (match[1] or match[2]) == name else match[0], text
    )


def _has_one_letter(argument: str) -> bool:
    """Whether an argument has one variable at most."""
    return len(set(COMMAND.sub("", argument)) & set(ascii_letters)) < 2


def _plain(argument: str) -> str:
    """Write an argument without spaces, and `\\frac{n}{2}` as `n/2`."""
    return PLAIN_FRACTION.sub(r"\1/\2", argument).replace(" ", "")


def unknowns_as_symbols(text: str) -> str:
    """Replace the letters I, E, γ and Γ, which the algebra system misreads, by symbols.

    Otherwise it would read `I_1`, `I_2` and `I^2` as the imaginary unit, and `E(0)` as 0.
    """

    def symbol(match: re.Match[str]) -> str:
        if not match["name"]:
            return match[0]
        index = (match["index"] or "").replace("\\text", "")
        name = _symbol("v", "", match["name"], index)
        # In braces it would be a factor: `I(0)` would be I times 0.
        is_function = text[match.end() :].lstrip().startswith("(")
        return name if is_function else f"{{{name}}}"

    return MISREAD.sub(symbol, text)


def brackets_as_floors(answer: str, gold: str) -> tuple[str, str] | None:
    """Replace `[x]` in a term by its floor, and a last side `[x+1]` if only one text has one.

    Brackets in a term that hold a sum (`2[\\frac{a+b}{c}]`) are the floor only if a text has such a
    sign, or if they are the gold's, around a fraction by a number.
    None where only one text has a last side `\\{x\\}`.
    """
    matches = WHOLE.search(answer), WHOLE.search(gold)
    brackets = [match["bracket"] if match else "" for match in matches]
    if brackets[0] != brackets[1]:
        if "\\{" in brackets:
            return None
        answer, gold = WHOLE.sub(FLOOR, answer), WHOLE.sub(FLOOR, gold)
    is_floor = "\\lfloor" in answer + gold or any(
        FRACTION_BY_NUMBER.fullmatch(match["inside"]) for match in TERM_IN_BRACKETS.finditer(gold)
    )

    def floor(match: re.Match[str]) -> str:
        return match.expand(FLOOR) if is_floor or not ADDED.search(match["inside"]) else match[0]

    return TERM_IN_BRACKETS.sub(floor, answer), TERM_IN_BRACKETS.sub(floor, gold)


def in_one_notation(first: str, second: str) -> tuple[str, str]:
    """Write the primes or dots of one text like the fractions of the other.

    Where one text has symbols of fractions, all by one variable, primes mean derivatives by this
    variable, and dots by t: `y'` is `\\frac{dy}{dx}`.
    """
    return _like(first, second), _like(second, first)


def _like(text: str, other: str) -> str:
    symbols, others = SYMBOL.findall(text), SYMBOL.findall(other)
    notations = {notation for notation, _, _ in symbols}
    variables = {names.rpartition(",")[2] for _, _, names in others}
    if {notation for notation, _, _ in others} != {"d"} or len(variables) != 1:
        return text
    variable = variables.pop()
    if notations != {"p"} and not (notations == {"o"} and variable == "t"):
        return text

    def fraction(match: re.Match[str]) -> str:
        names = match[3] if "," in match[3] else f"{match[3]},{variable}"
        return f"Q_{{d{match[2]},{names}}}"

    return SYMBOL.sub(fraction, text)


def _fraction(match: re.Match[str]) -> str:
    above, below = match[2] or match[3] or "1", match[6] or match[7] or "1"
    if above != below:
        return match[0]
    return _symbol("c" if "partial" in match["d"] else "d", above, match[4], match[5])


def _primed(match: re.Match[str]) -> str:
    order = match[5] or str((match[2] or match[3] or match[4]).replace("\\prime", "'").count("'"))
    return _symbol("p", order, match[1] + (match[6] or ""), match[7] or "")


def _symbol(notation: str, order: str, *names: str) -> str:
    plain = [NOT_ALPHANUMERIC.sub("", name) for name in names]
    return f" Q_{{{','.join((notation + order, *filter(None, plain)))}}}"


def is_meaning_lost(answer: str, gold: str) -> bool:
    """Return whether one of two different texts has an operator that algebra drops or commutes.

    `A^T` (a transpose), `A\\times B` (a cross product), `AB^{-1}` (matrices); `\\angle ABC` is read
    as a product, `f^{-1}(x)` as a reciprocal, `\\nabla\\cdot F` as `\\nabla\\times F`, `\\gcd(a,b)`
    as 1, the fractional part in `n+\\{x\\}` as x, `3\\text{ to }1` as a product, `AB-BA` as 0, the
    limit of f as f, `\\sum_i x_i` as n times x, Δ as a factor, y as a constant in
    `\\frac{d}{dx}(xy)`, and z as a real number. `u\\times v` may be a cross product if the other
    text has such a sign too, or a dot.
    """
    if any(
        TIMES.search(one) and (TIMES.search(other) or DOT.search(other))
        for one, other in ((answer, gold), (gold, answer))
    ):
        return True
    angles = ANGLE_NAME.findall(answer), ANGLE_NAME.findall(gold)
    if angles[0] and angles[1] and angles[0] != angles[1]:
        return True
    if set(NABLA.findall(answer)) != set(NABLA.findall(gold)):
        return True
    if _has_modulus_of_z(answer) != _has_modulus_of_z(gold):
        return True
    for one, other in ((answer, gold), (gold, answer)):
        inverse = set(INVERSE_FUNCTION.findall(one)) - set(INVERSE_FUNCTION.findall(other))
        if inverse & set(FUNCTION.findall(other)):
            return True
    return any(
        TRANSPOSED.search(text)
        or OF_WHOLE_NUMBERS.search(text)
        or CROSS_PRODUCT.search(text)
        or FRACTIONAL_PART.search(text)
        or WORD_BETWEEN.search(text)
        or LIMIT.search(text)
        or OTHER_DIFFERENCE.search(text)
        or _has_indexed_sum(text)
        or _has_derivative_of_unknown(text)
        or _has_commutator(text)
        or (INVERSE.search(text) and len(set(CAPITAL.findall(COMMAND.sub("", text)))) > 1)
        for text in (answer, gold)
    )


def _has_commutator(text: str) -> bool:
    """Return whether a text has a product of capitals in two orders, as `AB-BA` has."""
    products = set(PRODUCT_OF_CAPITALS.findall(text))
    return len(products) > len({tuple(sorted(product)) for product in products})


def _has_indexed_sum(text: str) -> bool:
    """Return whether a text has a sum or a product of terms with its index, or with any index where
    its own is not written.
    """
    if not SUM.search(text):
        return False
    indices = _indices(text)
    return any(
        not indices or indices & set(LETTER.findall(indexed))
        for indexed in INDEXED.findall(SUM.sub("", text))
    )


def _indices(text: str) -> set[str]:
    """Return the letters of the lower limits of sums and products, as i of `\\sum_{i=1}`."""
    limits = [braced or letter for braced, letter in SUM.findall(text)]
    return {index for limit in limits for index in LETTER.findall(limit.partition("=")[0])}


def _has_derivative_of_unknown(text: str) -> bool:
    """Return whether a text has a derivative of something with another letter than its variable."""
    variables = {match[1] or match[2] for match in OPERATOR.finditer(text)}
    others = set(re.findall(r"[a-zA-Z]", COMMAND.sub("", OPERATOR.sub("", text))))
    return bool(variables) and bool(others - variables)


def in_one_spelling(text: str) -> list[str]:
    """Return the letters, numbers and commands of a text with all transposes as `A^T`, the index of
    sums over one index as `\\iota`, and single letters without braces.
    """
    indices = _indices(text)

    def renamed(match: re.Match[str]) -> str:
        return " \\iota " if match["letter"] in indices else match[0]

    if len(indices) == 1:
        text = NAME_OR_LETTER.sub(renamed, text)
    return TOKEN.findall(SINGLE.sub(r" \1 ", TRANSPOSED.sub("^T", text)))


def _has_modulus_of_z(text: str) -> bool:
    """Return whether a text has an absolute value of z, which is complex by custom."""
    return any("z" in COMMAND.sub("", inside) for inside in MODULUS.findall(text))
