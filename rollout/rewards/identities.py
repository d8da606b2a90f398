"""Identities of roots, logarithms and hyperbolic functions, which math-verify does not prove.

    -\\ln x = \\ln\\frac1x      \\frac{e^x-e^{-x}}{2} = \\sinh x      \\sqrt{r_0^2} = r_0

Two short expressions are equal if algebra proves it for positive letters, and the values agree at
points of both signs at which the gold is real: `\\sqrt{x^2}` is not `x`. A letter with an index
(other than x, y and z) is a quantity of physics, and positive.
"""

from collections.abc import Iterator
from random import Random
from typing import Any, Final

OPERATIONS_MAX: Final = 40
"""Longer expressions are not compared."""
POINTS_POSITIVE: Final = 4
POINTS_SIGNED: Final = 16
DIGITS: Final = 30
TOLERANCE: Final = 1e-20
"""Relative difference of values that are equal."""
COORDINATES: Final = "xyz"


def identical(gold: Any, answer: Any) -> bool:
    """Return whether two expressions in the same letters are equal for all values of the gold.

    Of two equations with one left side, the right sides are compared.
    """
    from sympy import Eq, Expr, Symbol, exp, expand_log, simplify
    from sympy.functions.elementary.hyperbolic import HyperbolicFunction

    if isinstance(gold, Eq) and isinstance(answer, Eq) and gold.lhs == answer.lhs:
        gold, answer = gold.rhs, answer.rhs
    if not all(isinstance(each, Expr) and _is_elementary(each) for each in (gold, answer)):
        return False
    letters = sorted(gold.free_symbols, key=str)
    if not letters or gold.free_symbols != answer.free_symbols or _values_differ(gold, answer):
        return False
    positive = {letter: Symbol(letter.name, positive=True) for letter in letters}
    difference = (gold - answer).xreplace(positive).rewrite(HyperbolicFunction, exp)
    return bool(simplify(expand_log(difference)) == 0)


def _is_elementary(expression: Any) -> bool:
    from sympy import Add, Function, Mul, Number, NumberSymbol, Pow, Symbol, exp, log
    from sympy.functions.elementary.hyperbolic import HyperbolicFunction
    from sympy.functions.elementary.trigonometric import TrigonometricFunction

    functions = (exp, log, TrigonometricFunction, HyperbolicFunction)
    return all(letter.is_real for letter in expression.free_symbols) and (
        expression.count_ops() <= OPERATIONS_MAX
        and expression.has(Pow, Function)
        and not _is_tower(expression)
        and all(
            isinstance(part, (Add, Mul, Pow, Symbol, Number, NumberSymbol, *functions))
            for part in expression.atoms() | expression.atoms(Function, Add, Mul, Pow)
        )
    )


def _is_tower(expression: Any) -> bool:
    """Return whether an exponent has a letter in an exponent: its values have too many digits."""
    from sympy import Pow, exp

    return any(
        inner.exp.free_symbols
        for power in expression.atoms(Pow, exp)
        for inner in power.exp.atoms(Pow, exp)
    )


def _values_differ(gold: Any, answer: Any) -> bool:
    """Return whether the values differ at a point, or the gold is real at none."""
    is_compared = False
    for point in _points(sorted(gold.free_symbols, key=str)):
        value, other = (each.evalf(DIGITS, subs=point) for each in (gold, answer))
        if not (value.is_finite and value.is_real):
            continue
        if not other.is_finite or abs(value - other) > TOLERANCE * max(abs(value), abs(other)):
            return True
        is_compared = True
    return not is_compared


def _points(letters: list[Any]) -> Iterator[dict[Any, float]]:
    random = Random(0)
    for number in range(POINTS_POSITIVE + POINTS_SIGNED):
        yield {
            letter: random.uniform(0.1, 3)
            * (1 if number < POINTS_POSITIVE or _is_positive(letter) else random.choice((1, -1)))
            for letter in letters
        }


def _is_positive(letter: Any) -> bool:
    return "_" in letter.name and letter.name[0] not in COORDINATES
