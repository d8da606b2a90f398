"""The child process that compares answers with math-verify: `python -m rollout.rewards.math_judge`.

    parent ──{"answer": "\\\\frac12", "reference": "0.5", "timeout_s": 5.0}──▶ child
           ◀──{"equal": true}──

A verdict must not depend on the questions before it, whose results fill the memory (sympy caches
them). So a comparison that exceeds RESIDENT_BYTES_MAX is judged in a child of its own: a child that
has judged before exits without an answer, and the parent asks a new one, whose answer ends with
`"last": true`. In a new child, an answer that needs too much memory is unreadable.

One JSON object per line. The first line that the child writes is `{"ready": true}`, or
`{"failed": reason}` before it exits. The child exits at the end of its standard input, and so no
later than its parent.

math-verify may compute without end, in Python and in C. The kernel ends the process after its CPU
time: an exception within Python would leave sympy's caches incomplete, which falsifies later
comparisons.
"""

import json
import logging
import sys
from dataclasses import replace
from fractions import Fraction
from functools import cache, lru_cache, partial
from inspect import signature
from random import Random
from typing import Any, Final, Literal

import psutil

from rollout.rewards.identities import identical
from rollout.rewards.latex_products import replace_products, with_product_of_pi
from rollout.rewards.math_answers.comparison import equal
from rollout.rewards.math_answers.numbers import is_long_decimal, read_number
from storage.machine.child_limits import limit_cpu, limit_memory, open_replies, reply

MEMORY_BYTES_MAX: Final = 2 << 30
RESIDENT_BYTES_MAX: Final = 512 << 20
"""Peak of resident memory after which a child answers no further question."""
REFERENCES_MAX: Final = 1024
"""Maximum number of cached parsed references; most of a comparison's time is parsing."""

RELATIVE_TOLERANCE: Final = 1e-6
"""Tolerance for values that math-verify, which rounds to six decimals, considers equal."""
DIGITS: Final = 30
"""Significant digits of a value that is computed for a comparison."""
POINTS: Final = 3
"""Number of points at which expressions with variables are compared."""


def main() -> None:
    replies = open_replies()
    limit_memory(MEMORY_BYTES_MAX)
    try:
        _adapt_math_verify()  # the import takes most of the start
    except (ImportError, AttributeError, KeyError) as error:
        reply(replies, {"failed": str(error)})
        return
    # It warns that its own timeout is off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    limit_cpu(0)
    reply(replies, {"ready": True})
    is_new = True
    for line in sys.stdin:
        request = json.loads(line)
        limit_cpu(request["timeout_s"])
        try:
            verdict, is_full = judge(request["answer"], request["reference"]), False
        except MemoryError:
            verdict, is_full = False, True
        limit_cpu(0)
        is_full = is_full or _peak_bytes() > RESIDENT_BYTES_MAX
        if is_full and not is_new:
            return
        reply(replies, {"equal": verdict, **({"last": True} if is_full else {})})
        if is_full:
            return
        is_new = False


def judge(answer: str, reference: str) -> bool:
    """Return whether an answer equals the reference; False if it is unreadable. No time limit.

    Raises MemoryError.
    """
    try:
        return bool(equal(answer, reference, algebraically_equal))
    except MemoryError:
        raise
    except Exception:  # math-verify and sympy may raise any class for a model's text: not equal
        return False


def algebraically_equal(answer: str, reference: str) -> bool:
    """Return whether math-verify finds two LaTeX expressions equal; False if one is unreadable."""
    from math_verify import verify

    gold, parsed = _in_one_domain(_parsed_reference(reference), _parsed(answer))
    if any(
        _is_constant_derivative(each) or _is_truth_value(each)
        for side in (gold, parsed)
        for each in side[:1]
    ):
        return False
    if gold and parsed and {_extent(gold[0]), _extent(parsed[0])} == {"finite", "range"}:
        return False  # math-verify finds `\\pm 3` equal to `-3<x<3`, and `1>0` to `\\emptyset`
    if (
        gold
        and parsed
        and (decimal := _decimal_of(answer, parsed[0], reference, gold[0])) is not None
    ):
        return decimal
    if gold and parsed and _has_functions(gold[0]) and _has_functions(parsed[0]):
        return _same_equation(gold[0], parsed[0]) or identical(gold[0], parsed[0])
    if bool(verify(gold, parsed, timeout_seconds=None, allow_set_relation_comp=True)):
        return not _far_apart(gold, parsed)
    return bool(gold and parsed) and (
        _same_equation(gold[0], parsed[0])
        or _is_symbol(gold[0], parsed[0])
        or identical(gold[0], parsed[0])
    )


@lru_cache(maxsize=REFERENCES_MAX)
def _parsed_reference(reference: str) -> list[Any]:
    return _parsed(reference)


def _parsed(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    spelling = replace(LatexExtractionConfig().normalization_config, units=False)  # `5t` is not 5
    latex = LatexExtractionConfig(boxed_match_priority=0, normalization_config=spelling)
    # first_match: if the whole text cannot be parsed, do not use a part of it as the answer
    _adapt_math_verify()
    parsed: list[Any] = parse(
        f"\\boxed{{{with_product_of_pi(text)}}}",
        [latex],
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return [_with_imaginary_unit(each) for each in parsed]


def _with_imaginary_unit(expression: Any) -> Any:
    """Replace the variable `i` by the imaginary unit, except for an index.

    Beside it, z and w become complex, and in equations and inequalities all variables: with a real
    z, `z = 1+2i` is false. Other variables are real, as in `x+iy`.
    """
    from sympy import I, Symbol
    from sympy.logic.boolalg import Boolean

    symbols = _symbols(expression)
    if all(symbol.is_real and symbol.name != "i" for symbol in symbols):
        return expression
    is_relation = isinstance(expression, Boolean)
    domain = {
        symbol: Symbol(symbol.name)
        if is_relation or symbol.name[0] in "zw"
        else Symbol(symbol.name, real=True)
        for symbol in symbols
    }
    # All at once, since sympy evaluates a relation after each replacement.
    return expression.xreplace(domain | {symbol: I for symbol in symbols if symbol.name == "i"})


def _in_one_domain(gold: list[Any], answer: list[Any]) -> tuple[list[Any], list[Any]]:
    """Make the variables complex that are so on either side, so that equal names are equal."""
    from sympy import Symbol

    every = [symbol for each in (*gold, *answer) for symbol in _symbols(each)]
    names = {symbol.name for symbol in every if not symbol.is_real}
    domain = {symbol: Symbol(symbol.name) for symbol in every if symbol.name in names}
    if not domain:
        return gold, answer
    first, second = (
        [each.subs(domain) if _symbols(each) else each for each in side] for side in (gold, answer)
    )
    return first, second


def _symbols(expression: Any) -> set[Any]:
    """Return the free variables of what math-verify has parsed, which may be a text."""
    from sympy import Basic, MatrixBase

    found: set[Any] = (
        expression.free_symbols if isinstance(expression, Basic | MatrixBase) else set()
    )
    return found


def _is_constant_derivative(expression: Any) -> bool:
    """Return whether an expression has a derivative such as `\\frac{d}{dx}y`.

    The function lacks the variable, so sympy evaluates the derivative to 0.
    """
    from sympy import Basic, Derivative

    derivatives = expression.atoms(Derivative) if isinstance(expression, Basic) else ()
    return any(
        variable not in derivative.expr.free_symbols
        for derivative in derivatives
        for variable in derivative.variables
    )


def _is_truth_value(expression: Any) -> bool:
    """Return whether sympy has evaluated a relation, such as `|z| = i`; false ones are equal."""
    from sympy.logic.boolalg import BooleanAtom

    return isinstance(expression, BooleanAtom)


def _extent(expression: Any) -> Literal["finite", "range", ""]:
    """Return whether an expression is a list of values, or an interval or inequality."""
    from sympy import And, Eq, Interval, Or, Reals, Set
    from sympy.core.relational import Relational

    if isinstance(expression, Interval | And | Or) or expression == Reals:
        return "range"
    if isinstance(expression, Relational) and not isinstance(expression, Eq):
        return "range"
    return "finite" if isinstance(expression, Set) and expression.is_finite_set else ""


@cache
def _adapt_math_verify() -> None:
    """Make math-verify's LaTeX parser distinguish `R` and `r`, and multiply numbers side by side.

    Raises ImportError, and AttributeError or KeyError if it is another parser than expected.
    """
    from math_verify import parser

    replace_products()
    settings = signature(parser.latex2sympy).parameters["conversion_config"].default
    parser.latex2sympy = partial(
        parser.latex2sympy, conversion_config=replace(settings, lowercase_symbols=False)
    )


def _decimal_of(answer: str, parsed: Any, reference: str, gold: Any) -> bool | None:
    """Return whether a decimal on one side is a long decimal of an irrational on the other.

    None if the sides are not a decimal and an irrational number.
    """
    readings = read_number(answer), read_number(reference)
    if (readings[0] is None) == (readings[1] is None):
        return None
    decimal, exact = (readings[0], gold) if readings[0] is not None else (readings[1], parsed)
    if decimal is None or decimal.decimals is None or exact.free_symbols:
        return None
    value = exact.doit().evalf(DIGITS)
    if not value.is_Float or abs(Fraction(str(value)) - decimal.value) <= abs(
        decimal.value
    ) / 10 ** (DIGITS - 5):
        return None  # `\\log_2 8` and `3.0`: the value is rational
    return is_long_decimal(decimal, Fraction(str(value)))


def _has_functions(expression: Any) -> bool:
    """Return whether an expression is an equation in an unknown function, such as x(t).

    sympy may try without end to solve it.
    """
    from sympy import Eq
    from sympy.core.function import AppliedUndef

    return isinstance(expression, Eq) and bool(expression.atoms(AppliedUndef))


def _same_equation(gold: Any, answer: Any) -> bool:
    """Return whether two equations are multiples of each other, as `2x-y+3=0` and `y=2x+3`."""
    from sympy import Eq, simplify

    if not isinstance(gold, Eq) or not isinstance(answer, Eq):
        return False
    ratio = simplify((gold.lhs - gold.rhs) / (answer.lhs - answer.rhs))
    return bool(ratio.is_number and ratio.is_finite and ratio.is_nonzero)


def _is_symbol(gold: Any, answer: Any) -> bool:
    """Return whether one side is a variable and equals the other side.

    math-verify compares a variable only by its name.
    """
    from sympy import Expr, Symbol, simplify

    both = isinstance(gold, Expr) and isinstance(answer, Expr)
    return (
        both
        and (isinstance(gold, Symbol) or isinstance(answer, Symbol))
        and simplify(gold - answer) == 0
    )


def _far_apart(golds: list[Any], answers: list[Any]) -> bool:
    """Return whether two expressions that math-verify considers equal have different values.

    math-verify's tolerance is absolute: it accepts `9.1 \\times 10^{-31} \\pi` for
    `1.6 \\times 10^{-19} \\pi`.
    """
    from sympy import Expr, MatrixBase, MatrixExpr
    from sympy.core.relational import Relational

    gold, answer = (
        side[0].doit() if isinstance(side[0], MatrixExpr) else side[0] for side in (golds, answers)
    )
    if isinstance(gold, MatrixBase) and isinstance(answer, MatrixBase):
        return gold.shape != answer.shape or any(map(_values_differ, gold.flat(), answer.flat()))
    if isinstance(gold, Relational) and isinstance(answer, Relational):
        return _terms_differ(gold, answer)
    return isinstance(gold, Expr) and isinstance(answer, Expr) and _values_differ(gold, answer)


def _values_differ(gold: Any, answer: Any) -> bool:
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    random = Random(0)
    for _ in range(POINTS if symbols else 1):
        point = {symbol: random.uniform(1, 2) for symbol in symbols}
        try:  # not Python's complex: `e^{-1000}` would be 0
            a, b = (each.doit().evalf(DIGITS, subs=point) for each in (gold, answer))
        except (ArithmeticError, AttributeError, TypeError, ValueError):
            return False  # `\max(x,i)` has no value: math-verify has compared it by rules
        if not (a.is_number and a.is_finite and b.is_number and b.is_finite):
            return False  # as above
        if abs(a - b) > RELATIVE_TOLERANCE * max(abs(a), abs(b)):
            return True
    return False


def _terms_differ(gold: Any, answer: Any) -> bool:
    """Return whether two relations with the same terms have other coefficients.

    A common factor is allowed: `2x<4` is `x<2`. Relations with different terms are not decided
    here.
    """
    from sympy import Expr, expand

    if not all(isinstance(side, Expr) for each in (gold, answer) for side in each.args):
        return False
    terms, others = (
        expand((each.lhs - each.rhs).doit()).as_coefficients_dict() for each in (gold, answer)
    )
    if not terms or terms.keys() != others.keys():
        return False
    ratios = [complex((terms[term] / others[term]).evalf(DIGITS)) for term in terms]
    return any(abs(each - ratios[0]) > RELATIVE_TOLERANCE * abs(ratios[0]) for each in ratios)


def _peak_bytes() -> int:
    """Return the peak of resident memory; where the kernel does not report it, the current size.

    math-verify catches a MemoryError itself, so that only the peak shows it. `getrusage` would
    include the memory of the parent.
    """
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            peaks = [line.split()[1] for line in status if line.startswith("VmHWM:")]
    except OSError:
        peaks = []
    return int(peaks[0]) << 10 if peaks else int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    main()
