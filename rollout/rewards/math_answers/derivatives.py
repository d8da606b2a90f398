"""Replacement of derivatives by symbols, so that algebra treats them as unknowns.

    m\\frac{dv}{dt}+bv = f  ──▶  m Q_{d1,v,t}+bv = f     x'' ──▶ Q_{p2,x}     \\dot{x} ──▶ Q_{o1,x}

A computer algebra system evaluates the derivative of one independent symbol with respect to another
to 0 and ignores primes. Without the replacement it would accept `bv=f` for `m\\frac{dv}{dt}+bv=f`.
Derivatives in different notations become different symbols.
"""

import re
from typing import Final

BASE: Final = r"((?:\\[a-zA-Z]{1,20}|[a-zA-Z])(?:_(?:\w|\{[^{}]{0,20}\}))?)"
"""A function: `v`, `v_o`, `\\theta_{max}`."""
INDEX: Final = r"(_\w|_\{[^{}]{0,20}\})?"
"""An index after the dots or the primes: `\\dot{x}_0`."""
ORDER: Final = r"(?:\^ ?(?:(\d)|\{ ?(\d) ?\}))?"
VARIABLE: Final = r"(\\[a-zA-Z]{1,20}|[a-zA-Z])"

FRACTION: Final = re.compile(
    r"\\frac ?\{ ?(?P<d>d|\\partial|\\text ?\{ ?d ?\})"
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
NOT_ALPHANUMERIC: Final = re.compile(r"[^0-9A-Za-z]")


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
