"""Commas that group the digits of a number, and commas between items."""

import pytest

from rollout.rewards.math_judge import judge

# fmt: off
TABLE: dict[str, tuple[list[str], list[str]]] = {
    # reference: (right answers, wrong answers)
    # tuples, intervals and sets against a single value
    "(0,100\\pi)": (["(0, 100\\pi)", "\\left(0,100\\pi\\right)"], ["100\\pi", "[0,100\\pi]"]),
    "[0,100\\pi]": (["0\\le x\\le100\\pi"], ["100\\pi", "(0,100\\pi)"]),
    "(0,500\\sqrt3)": ([], ["500\\sqrt3"]),
    "(1,200\\pi)": (["(1, 200\\pi)"], ["1200\\pi", "1,200"]),
    "100\\pi": (
        ["(100\\pi)", "\\{100\\pi\\}"],
        ["0,100\\pi", "(0,100\\pi)", "[0,100\\pi]", "\\{0,100\\pi\\}"],
    ),
    "144\\pi": ([], ["\\{0,144\\pi\\}", "(0,144\\pi)"]),
    "100\\sqrt3": ([], ["[0,100\\sqrt3]"]),
    "1100\\pi": (
        ["1,100\\pi", "1{,}100\\pi", "x=1,100\\pi", "\\frac{2,200\\pi}{2}"],
        ["[1,100\\pi]", "\\{1,100\\pi\\}", "(1,100\\pi)", "x=(1,100\\pi)"],
    ),
    "100+\\sqrt2": ([], ["(0,100+\\sqrt2)"]),
    "1200+\\sqrt2": (["1,200+\\sqrt2"], ["(1,200+\\sqrt2)", "1,1200+\\sqrt2"]),
    "\\sqrt{1200}": (["\\sqrt{1,200}"], ["\\sqrt{1,201}"]),
    "100": (
        ["\\max\\{64,100\\}=100", "\\max\\{64,80,100\\}"],
        ["(0,100)", "0,100", "\\{0,100\\}", "\\max\\{64,101\\}", "\\min\\{64,100\\}=100"],
    ),
    "50": (["\\frac{100}{2}"], ["\\frac{0,100}{2}"]),
    # unions and complements
    "(-\\infty,-100)\\cup(100,200)": (
        ["(-\\infty,-100)\\cup(100, 200)", "(100,200)\\cup(-\\infty,-100)"],
        ["(-\\infty,-100)\\cup(100200)"],
    ),
    "(2,12)\\cup(12,102)": (["(2,102)\\setminus\\{12\\}"], ["(2,102)\\setminus\\{13\\}", "(2,102)"]),
    "(-\\infty,5)\\cup(5,100)\\cup(100,\\infty)": (
        ["\\mathbb{R}\\setminus\\{5,100\\}", "\\mathbb{R}\\setminus\\{5, 100\\}"],
        ["\\mathbb{R}\\setminus\\{5100\\}", "\\mathbb{R}\\setminus\\{5,101\\}"],
    ),
    "(-\\infty,5100)\\cup(5100,\\infty)": ([], ["\\mathbb{R}\\setminus\\{5,100\\}"]),
    "(-\\infty,2]\\cup[102,\\infty)": (
        ["\\mathbb{R}\\setminus(2,102)"],
        ["\\mathbb{R}\\setminus[2,102]"],
    ),
    # two signs, and powers
    "\\pm1000": (["\\pm1,000", "\\pm1{,}000"], ["\\pm1,001", "1,000", "\\pm 1, 000"]),
    "\\pm1, 0": (["1, -1, 0"], ["\\pm1,000"]),
    "2^{1000}": (["2^{1\\,000}", "2^{1,000}"], ["2^1\\,000", "2^1{,}000"]),
    # arguments of functions, and indices
    "3500": (["3,500", "(3,500)"], ["\\max(3,500)", "\\min(3,500)", "\\{3,500\\}", "[3,500]"]),
    "24180": (["24,180"], ["\\gcd(24,180)"]),
    "12": (
        ["\\gcd(24,180)", "\\gcd(24,180)=12", "\\gcd(24, 180)=12"],
        ["\\gcd(24,181)=12", "\\gcd(24,180)=24"],
    ),
    "500": (["\\max(3,500)", "\\max(3,500)=500"], ["\\min(3,500)"]),
    "1": (["\\gcd(17,100)=1", "\\min(1,200)=1"], []),
    "3": (["\\log_{10}(1,000)=3", "\\gcd(111,123,345)"], ["\\max\\{x : x<3\\}"]),
    "\\ln 1200": (["\\ln(1,200)", "\\ln 1,200"], ["\\ln(1,201)"]),
    "\\max(3,x)": (["\\max\\{3,x\\}", "\\max\\left\\{ 3, x\\right\\}"], ["\\min\\{3,x\\}", "\\max\\{4,x\\}"]),
    "f(1200)": ([], ["f(1,200)"]),
    "a_{1200}": ([], ["a_{1,200}"]),
}
# fmt: on


@pytest.mark.parametrize(
    ("answer", "reference", "verdict"),
    [
        (answer, reference, verdict)
        for reference, labelled in TABLE.items()
        for verdict, answers in zip((True, False), labelled, strict=True)
        for answer in answers
    ],
)
def test_a_comma_in_brackets_separates_items(answer: str, reference: str, verdict: bool) -> None:
    assert judge(answer, reference) is verdict
