"""Sums and products that are left to compute, and expressions that are one term."""

import pytest

from rollout.rewards.math_answers.equations import has_sum_or_product, is_left_to_compute
from rollout.rewards.math_judge import judge


@pytest.mark.parametrize(
    "text",
    [
        # a sum behind each end of an operand
        "7+8",
        "7 - 8",
        "|7|+8",
        "\\vert7\\vert-\\vert8\\vert",
        "180^\\circ-45^\\circ",
        "20%-8%",
        "\\lfloor7\\rfloor+5",
        "\\lceil7\\rceil+5",
        "(7)+5",
        "\\sqrt{9}+5",
        "3!+4!",
        "\\ln e+11",
        "\\pi-3",
        "7{+}5",
        "2^{7+5}",
        "|3-5|",
        "5\\text{ cm}+3",
        # a product with a sign and without one
        "7\\cdot8",
        "7*8",
        "8\\div2",
        "\\sqrt2\\sqrt8",
        "|7||8|",
        "2|5|",
        "1.5|2|",
        "\\frac{1}{2}3!4!",
        "8!/3!5!",
        "\\sqrt{3!3!}",
        "\\sqrt[3]{3!(3!)^2}",
        "8!/(3!)5!",
        "8!/(3!)(5!)",
        "\\frac{5!}{(2)(2)}",
        "\\frac{2(3)}{3!}",
        "\\frac{(7+8)3!}{2}",
        "2(5!)",
        "7(|-3|)",
        "\\sqrt{\\frac{9}{2}}\\sqrt2",
        "\\sqrt[10]{32}\\sqrt2",
        "2\\lfloor5.5\\rfloor",
        "50%(24)",
        "50%24",
        "3!4!",
        "(3)(4)",
        "\\lfloor7.5\\rfloor\\lceil7.5\\rceil",
        "\\gcd(4,6)\\sqrt{16}",
        "|7|\\frac{1}{2}",
        "\\max(2,3)\\binom{4}{2}",
    ],
)
def test_a_sum_or_a_product_is_found(text: str) -> None:
    assert has_sum_or_product(text)


@pytest.mark.parametrize(
    "text",
    [
        "-5",
        "+5",
        "2^{-3}",
        "2^-3",
        "|-5|",
        "-|-5|",
        "||-5||",
        "\\pi|-5|",
        "|5|\\pi|-5|",
        "(-5)",
        "\\lfloor-2.5\\rfloor",
        "\\max(-3,-5)",
        "\\sin-30^\\circ",
        "1.5e+3",
        "\\frac{-3}{-4}",
        "24/2",
        "2\\sqrt3",
        "3\\ln 2",
        "2\\pi",
        "\\pi\\sqrt2",
        "\\frac{1}{2}\\ln 2",
        "\\log_{2}8",
        "\\log_{2}(8)",
        "\\log_2|-8|",
        "\\sin^2(30^\\circ)",
        "\\sqrt{\\frac{9}{4}}",
        "\\frac{8!}{3!5!}",
        "\\frac{8!}{(3!)(5!)}",
        "\\frac{(8)!}{(3)!(5)!}",
        "\\frac{10!}{5!2^5}",
        "10!/(2^{5}5!)",
        "8!/(3!5!)",
        "11! / (4! 4! 2!)",
        "{11!}/{(4!4!2!)}",
        "\\frac{11!}{4!4!2}",
        "\\frac{11!}{2(4!)^2}",
        "\\frac{11!}{2(4!)^{2}}",
        "\\frac{11!}{(2(4!)^2)}",
        "\\frac{7!}{(3)3!}",
        "\\frac{8!}{2!^32!(5!)}",
        "\\frac{2(5!)}{3!}",
        "\\frac{72}{(2^2)(3^2)}",
        "11!/(2(4!)^2)",
        "5!",
        "!5",
        "\\gcd(12,18)",
        "\\lfloor\\sqrt{80}\\rfloor",
        "\\cos 90^\\circ",
        "\\sqrt[3]{27}",
        "(3!)!",
        "12%",
    ],
)
def test_one_term_has_neither(text: str) -> None:
    assert not has_sum_or_product(text)


@pytest.mark.parametrize(
    ("text", "is_left"),
    [
        ("\\frac{d}{dx}\\sin x", True),
        ("\\frac{d\\sin x}{dx}", True),
        ("\\frac{d^2\\sin x}{dx^2}", True),
        ("\\frac{d(x^2)}{dx}", True),
        ("\\frac{dx^2}{dx}", True),
        ("\\frac{de^{2x}}{dx}", True),
        ("\\frac{d 3x}{dx}", True),
        ("\\frac{d\\sin x}{dx}=\\cos x", False),
        ("\\frac{dy}{dx}", False),
        ("\\frac{d^2y}{dx^2}", False),
        ("\\frac{dv^2}{dt}", False),
        ("\\frac{d\\theta}{dt}", False),
        ("\\frac{d[A]}{dt}", False),
        ("\\frac{df(x)}{dx}", False),
    ],
)
def test_a_derivative_of_an_expression_is_left_to_compute(text: str, is_left: bool) -> None:
    assert is_left_to_compute(text) is is_left


@pytest.mark.parametrize(
    ("answer", "reference", "is_right"),
    [
        ("|7|+|8|-|3|", "12", False),
        ("180^\\circ-45^\\circ", "135^\\circ", False),
        ("20\\%-8\\%", "12\\%", False),
        ("\\lfloor7\\rfloor+\\lfloor5\\rfloor", "12", False),
        ("50\\%(24)", "12", False),
        ("|7||8|", "56", False),
        ("3!4!", "144", False),
        ("\\frac{8!}{3!5!}", "56", True),
        ("8!/(3!5!)", "56", True),
        ("\\frac{11!}{4!\\,4!\\,2}", "34650", True),
        ("\\dfrac{11!}{2\\left(4!\\right)^2}", "34650", True),
        ("\\frac{11!}{4!4!2}", "17325", False),
        ("2(5!)", "240", False),
        ("\\sqrt{\\frac{9}{2}}\\sqrt2", "3", False),
        ("2\\times10^{2+3}", "200000", False),
        ("x^2_1", "x_1^2", True),  # an index behind a power is no numeral's base
        ("\\frac{v^2_0}{2g}", "\\frac{v_0^2}{2g}", True),
        ("|-5|", "5", True),
        ("|7||8|=56", "56", True),
        ("\\lfloor7\\rfloor+5=12", "12", True),
        ("|7|+5", "\\frac{24}{2}", True),  # the reference is left to compute, too
        ("\\frac{d\\sin x}{dx}", "\\cos x", False),
        ("\\frac{dx^2}{dx}=2x", "2x", True),
        ("\\frac{dx^2}{dx}=3x", "2x", False),
        ("10^2\\cdot10^3", "100000", False),
        ("2\\times10^3\\times10^4", "2\\times10^7", False),
        ("1.5e3\\times10^2", "150000", False),
        ("2\\times10^7", "20000000", True),
        ("10\\times10^4", "100000", True),
        ("[-\\infty,1]\\cup[3,\\infty]", "(-\\infty,1]\\cup[3,\\infty)", False),
        ("(-\\infty,1]\\cup[3,\\infty)", "(-\\infty,1]\\cup[3,\\infty)", True),
        ("[-\\infty,\\infty]", "\\mathbb{R}", False),
        ("(-\\infty,\\infty)", "\\mathbb{R}", True),
        ("7\\text{ mln}", "7", False),
        ("7\\text{ doz}", "7", False),
    ],
)
def test_an_answer_that_is_left_to_compute_is_wrong(
    answer: str, reference: str, is_right: bool
) -> None:
    assert judge(answer, reference) is is_right
