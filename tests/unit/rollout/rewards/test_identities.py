"""Right answers that need an identity of roots, logarithms or hyperbolic functions."""

import pytest

from rollout.rewards.math_judge import judge

# fmt: off
TABLE: dict[str, tuple[list[str], list[str]]] = {
    # reference: (right answers, wrong answers)
    "-\\tau \\ln \\Delta": (
        ["t_s=\\tau\\ln\\frac{1}{\\Delta}", "\\tau\\ln(1/\\Delta)", "\\tau \\ln \\Delta^{-1}"],
        ["\\tau\\ln\\Delta", "\\tau\\ln(\\frac{2}{\\Delta})", "\\tau\\log_2\\frac{1}{\\Delta}", "\\tau\\ln|\\frac1\\Delta|"],
    ),
    "-\\ln x": (["\\ln\\frac1x"], ["\\ln x", "\\ln|\\frac1x|", "-\\ln |x|", "-\\log_2 x"]),
    "\\ln a-\\ln b": (
        ["\\ln\\frac ab", "-\\ln\\frac ba"],
        ["\\ln a+\\ln b", "\\ln\\frac ba", "\\ln(ab)", "\\ln(a-b)", "\\log_2\\frac ab", "\\ln\\frac ac"],
    ),
    "\\ln\\frac ab": (["\\ln a-\\ln b"], ["\\ln b-\\ln a"]),
    "\\ln(x^2)": (["\\ln x^2"], ["2\\ln x", "2\\ln(-x)", "\\ln x"]),
    "\\frac{1}{2a}(\\exp{a*t} - \\exp{-a*t})": (
        ["x(t)=\\frac{\\sinh(at)}{a}", "\\frac{1}{a}\\sinh(at)"],
        ["\\frac{1}{a}\\cosh(at)", "\\frac{1}{2a}\\sinh(at)", "-\\frac{1}{a}\\sinh(at)", "\\frac{1}{a}\\sin(at)", "\\frac{1}{a}|\\sinh(at)|"],
    ),
    "\\tanh x": (["\\frac{e^{2x}-1}{e^{2x}+1}"], ["\\frac{e^{2x}+1}{e^{2x}-1}"]),
    "\\sqrt{4 \\pi G \\rho_{0} r_{0}^{2}}": (
        ["v(r)=r_0\\sqrt{4\\pi G\\rho_0}", "2r_0\\sqrt{\\pi G\\rho_0}"],
        ["-2r_0\\sqrt{\\pi G\\rho_0}", "r_0\\sqrt{2\\pi G\\rho_0}", "2\\rho_0\\sqrt{\\pi G r_0}", "2r\\sqrt{\\pi G\\rho}"],
    ),
    "\\frac{v_0}{r_0} \\frac{1}{(1+r/r_0)^{3/2}}": (
        ["\\frac{v_0}{r_0}(\\frac{r_0}{r+r_0})^{3/2}", "\\frac{v_0\\sqrt{r_0}}{(r+r_0)^{3/2}}"],
        ["\\frac{v_0}{r_0}(\\frac{r_0}{r-r_0})^{3/2}", "\\frac{v_0}{r_0}(\\frac{r_0}{r+r_0})^{1/2}", "\\frac{v_0}{r_0}(\\frac{r+r_0}{r_0})^{3/2}"],
    ),
    "v=\\sqrt{\\frac{2m_1gh}{m_1+m_2}}": (["v=\\frac{\\sqrt{2m_1gh}}{\\sqrt{m_1+m_2}}"], ["v=\\frac{\\sqrt{2m_1gh}}{\\sqrt{m_1-m_2}}"]),
    "y=-\\ln x": (["y=\\ln\\frac1x"], ["y=\\ln x", "z=\\ln\\frac1x", "y=-\\ln |x|"]),
    "x(t)=\\frac{\\sinh(at)}{a}": (
        ["x(t)=\\frac1{2a}(e^{at}-e^{-at})"], ["x(t)=\\frac1{2a}(e^{at}+e^{-at})", "y(t)=\\frac1{2a}(e^{at}-e^{-at})"]
    ),
    "e^x": (["\\frac{e^{2x}}{e^x}"], ["e^{e^{e^{e^{x}}}}"]),
    "\\sqrt{x^2}": ([], ["x", "-x"]),
    "\\sqrt{x_1^2}": ([], ["x_1"]),
    "\\sqrt{\\theta^2}": ([], ["\\theta"]),
    "\\sqrt{(x-500)^2}": ([], ["x-500", "500-x"]),
    "\\sqrt{(a_1-b_1)^2}": ([], ["a_1-b_1"]),
    "\\sqrt{\\sin^2\\theta}": ([], ["\\sin\\theta"]),
}
# fmt: on


@pytest.mark.parametrize("gold", TABLE)
def test_identities_are_proved_and_no_others(gold: str) -> None:
    right, wrong = TABLE[gold]
    assert [answer for answer in right if not judge(answer, gold)] == []
    assert [answer for answer in wrong if judge(answer, gold)] == []
