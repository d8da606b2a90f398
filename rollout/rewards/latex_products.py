"""Products of numbers for math-verify, whose LaTeX parser makes mixed numbers of them.

It adds an integer to the number behind it: `x+2(3)` is x+5 for it, and `\\binom42\\binom31` is 9.
Here only a numeral before a fraction of numerals is a mixed number: `x+2\\frac12` is x+5/2.
"""

import re
from typing import Any, Final

FRACTION: Final = r"\\frac ?\{ ?(\d+) ?\} ?\{ ?(\d+) ?\}"
MIXED: Final = re.compile(rf"\{{?\d+\}}?{FRACTION}(?:\^\{{?\\circ\}}?)?")
NUMERALS: Final = re.compile(r"\d+ \d+")
NUMBER: Final = re.compile(rf"[(\[{{]*(?:\d+(?:\.\d+)?|{FRACTION})[)\]}}]*(?:\^.*)?")
PI_BEFORE_NUMBER: Final = re.compile(rf"\\pi ?(?=\( ?(?:[\d./ ]+|{FRACTION} ?)\))")


def replace_products() -> None:
    """Make math-verify's parser multiply numbers side by side. Raises AttributeError if it is
    another parser than expected.
    """
    from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy as Converter

    for name in ("convert_postfix_list", "convert_postfix", "mul_flat", "mat_mul_flat"):
        getattr(Converter, name)
    Converter.convert_postfix_list = _product


def with_product_of_pi(text: str) -> str:
    """Write `\\pi(3)` as `\\pi\\cdot (3)`, because math-verify reads it as a function."""
    return PI_BEFORE_NUMBER.sub(r"\\pi\\cdot ", text)


def _product(converter: Any, factors: Any, first: int = 0) -> Any:
    """Convert the factors from `first`, which are side by side, to one unevaluated product.

    A list is an operator such as `\\frac{d}{dx}`, for the factors behind it.

    Raises ValueError for two numerals side by side, and for an operator without an operand.
    """
    from sympy import Derivative, Expr, Matrix

    left = converter.convert_postfix(factors[first])
    texts = [factor.getText() for factor in factors[first : first + 3]]
    if NUMERALS.fullmatch(" ".join(texts[:2])):
        raise ValueError("two numerals side by side")
    if _begins_mixed_number(texts):
        first += 1
        left += converter.convert_postfix(factors[first])
    is_operator = isinstance(left, list) and len(left) == 1
    if first + 1 == len(factors):
        if is_operator:
            raise ValueError("an operator without an operand")
        return left
    if not (is_operator or isinstance(left, Expr | Matrix)):
        return left
    right = _product(converter, factors, first + 1)
    if is_operator:
        return Derivative(right, left[0])
    if any(getattr(side, "is_Matrix", False) for side in (left, right)):
        return converter.mat_mul_flat(left, right)
    return converter.mul_flat(left, right)


def _begins_mixed_number(texts: list[str]) -> bool:
    """Return whether factors begin with a mixed number, as `2\\frac12x` does.

    `2\\frac12\\frac13` and `2\\frac62x` do not.
    """
    mixed = MIXED.fullmatch("".join(texts[:2]))
    if mixed is None or len(texts) == 2:
        return mixed is not None
    return int(mixed[1]) < int(mixed[2]) and not NUMBER.fullmatch(texts[2])
