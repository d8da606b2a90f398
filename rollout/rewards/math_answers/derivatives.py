"""Replacement of derivatives by symbols, so that algebra treats them as unknowns.

    m\\frac{dv}{dt}+bv = f  ──▶  m Q_{d1,v,t}+bv = f     x'' ──▶ Q_{p2,x}     \\dot{x} ──▶ Q_{o1,x}

A computer algebra system takes the derivative of one independent symbol with respect to another as
0 and does not read primes, so that `m\\frac{dv}{dt}+bv=f` and `bv=f` would be the same to it.
Derivatives in different notations are different.
"""

import re
from typing import Final

BASE: Final = r"((?:\\[a-zA-Z]{1,20}|[a-zA-Z])(?:_(?:\w|\{[^{}]{0,20}\}))?)"
"""A function: `v`, `v_o`, `\\theta_{max}`."""
INDEX: Final = r"(_\w|_\{[^{}]{0,20}\})?"
"""Behind the dots or the primes: `\\dot{x}_0`."""
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
UNKNOWN_TO: Final = re.compile(r"[^0-9A-Za-z]")


def derivatives_as_symbols(text: str) -> str:
    """The same tidy expression with a symbol in place of each derivative of a single function.

    `\\frac{d}{dx} x^2` stays as it is: it is to be computed.
    """
    text = FRACTION.sub(_fraction, text)
    text = SLASH.sub(lambda found: _symbol("d", "1", found[1], found[2]), text)
    text = DOTS.sub(
        lambda found: _symbol(
            "o", str(len(found[1])), (found[2] or found[3]) + (found[4] or ""), found[5] or ""
        ),
        text,
    )
    return PRIMES.sub(_primed, text)


def _fraction(found: re.Match[str]) -> str:
    above, below = found[2] or found[3] or "1", found[6] or found[7] or "1"
    if above != below:
        return found[0]
    return _symbol("c" if "partial" in found["d"] else "d", above, found[4], found[5])


def _primed(found: re.Match[str]) -> str:
    order = found[5] or str((found[2] or found[3] or found[4]).replace("\\prime", "'").count("'"))
    return _symbol("p", order, found[1] + (found[6] or ""), found[7] or "")


def _symbol(notation: str, order: str, *names: str) -> str:
    plain = [UNKNOWN_TO.sub("", name) for name in names]
    return f" Q_{{{','.join((notation + order, *filter(None, plain)))}}}"
