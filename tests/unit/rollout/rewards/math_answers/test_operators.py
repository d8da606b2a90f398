import pytest

from rollout.rewards.math_answers.operators import derivatives_as_symbols
from rollout.rewards.math_judge import judge


@pytest.mark.parametrize(
    ("text", "symbols"),
    [
        ("m\\frac{d v}{d t}+bv", "m Q_{d1,v,t}+bv"),
        ("\\frac{d^{2} v_{o}}{d t^{2}}", " Q_{d2,vo,t}"),
        ("\\frac{\\text{d}x}{\\text{d}t}", " Q_{d1,x,t}"),
        ("\\frac{\\partial u}{\\partial x}", " Q_{c1,u,x}"),
        ("\\omega\\frac{d\\omega}{dt}", "\\omega Q_{d1,omega,t}"),
        ("dv/dt", " Q_{d1,v,t}"),
        ("rx'+y''", "r Q_{p1,x}+ Q_{p2,y}"),
        ("x^{\\prime}", " Q_{p1,x}"),
        ("y^\\prime", " Q_{p1,y}"),
        ("y^{\\prime\\prime}(t)", " Q_{p2,y,t}"),
        ("f^{(4)}(x)", " Q_{p4,f,x}"),
        ("\\dot{x}_{0}t", " Q_{o1,x0}t"),
        ("\\dot{x_0}t", " Q_{o1,x0}t"),
        ("x_0'+x'_0", " Q_{p1,x0}+ Q_{p1,x0}"),
        ("\\dot{x}+\\ddot\\theta(t)", " Q_{o1,x}+ Q_{o2,theta,t}"),
    ],
)
def test_a_derivative_is_replaced_by_a_symbol(text: str, symbols: str) -> None:
    assert derivatives_as_symbols(text) == symbols


@pytest.mark.parametrize(
    "text",
    [
        "\\frac{d}{dx}x^2",
        "\\frac{d^2x}{dt}",
        "\\frac{dx}{ds+1}",
        "\\sin x",
        "x^{4}",
        "x^{(n)}",
        "(fg)'",
        "12'",
        "add/dtx",
    ],
)
def test_text_other_than_a_derivative_of_one_function_is_not_changed(text: str) -> None:
    assert derivatives_as_symbols(text) == text


@pytest.mark.parametrize(
    ("answer", "reference", "equal"),
    [
        ("\\frac{d}{dx}x^2=2x", "2x", True),
        ("\\frac{d}{dx}x^2=3x", "2x", False),
        ("\\frac{d}{dx}x^2", "2x", False),
        ("\\frac{d}{dx}y", "0", False),
        ("\\frac{d}{dt}(xy)", "0", False),
        ("x(t)+2=y", "y-x(t)=2", True),
        ("x(t)+2=y", "y+x(t)=2", False),
        ("(2+i)(2-i)+x", "x+5", True),
        ("2i\\sqrt{3}", "2\\sqrt{3} i", True),
        ("\\frac{1}{i}", "i", False),
        ("\\frac{(1-i)e^{2it}}{4}", "\\frac{e^{2 i t}}{(2+2 i)}", True),
        ("\\frac{(1+i)e^{2it}}{4}", "\\frac{e^{2 i t}}{(2+2 i)}", False),
        ("|x+iy|", "\\sqrt{x^2+y^2}", True),
        ("x-iy", "x+iy", False),
        ("x_{0}c+\\dot{x}_{0} s+0", "\\dot{x}_{0}s+x_{0}c", True),
        ("x_{0}c+x_{0} s", "\\dot{x}_{0}s+x_{0}c", False),
        ("\\sum_{i=1}^{n}i", "\\sum_{k=1}^{n}k", True),
        ("\\sum_{i=1}^{n}i", "\\sum_{k=1}^{n}2k", False),
        ("\\sum_{k=0}^\\infty(-1)^k x^{2k}", "\\sum_{n=0}^{\\infty}(-1)^n x^{2n}", True),
        ("\\sum_{k=1}^\\infty(-1)^k x^{2k}", "\\sum_{n=0}^{\\infty}(-1)^n x^{2n}", False),
        ("\\sum_j\\binom nj x^j", "\\sum_{k}\\binom{n}{k} x^k", True),
    ],
)
def test_derivatives_functions_and_the_imaginary_unit_are_compared_by_algebra(
    answer: str, reference: str, equal: bool
) -> None:
    assert judge(answer, reference) is equal


@pytest.mark.parametrize(
    ("answer", "reference", "equal"),
    [
        ("f(n)=f(n-2)+f(n-3)", "f(n)=f(n-1)+f(n-4)", False),
        ("f(n)-f(n-1)=f(n-4)", "f(n)=f(n-1)+f(n-4)", True),
        ("f(x+2)=f(x-2)", "f(x+1)=f(x-1)", False),
        ("T(n)=3T(n/3)+n", "T(n)=2T(n/2)+n", False),
        ("T(n)=n+2T(\\frac{n}{2})", "T(n)=2T(n/2)+n", True),
        ("a(n)=2a(n-1)+a(n-3)", "a(n)=a(n-1)+2a(n-2)", False),
        ("2nT(n-1)+2nT(n-4)", "2nT(n-2)+2nT(n-3)", False),
        ("\\phi(n+1)=\\phi(n-2)", "\\phi(n)=\\phi(n-1)", False),
        ("f(x)+g(y)=f(xy)", "f(x)+g(y)=f(x)f(y)", False),
        ("nT(n-1)+nT(n-4)", "nT(n-2)+nT(n-3)", False),
        ("A", "\\frac{P(AB)}{P(B)}", False),
        ("Y", "\\frac{E[XY]}{E[X]}", False),
        ("E[X]", "\\mathbb{E}[X]", True),
        ("2x^3-2x", "2x(x+1)(x-1)", True),
        ("2n^2", "n(n+1)+n(n-1)", True),
        ("k(a-b+c-d)", "k(a-b)+k(c-d)", True),
        ("A(1+r)(2+r)", "A(1+r)+A(1+r)^2", True),
        ("p^n-p^{n+1}+q^n-q^{n+1}", "p^n(1-p)+q^n(1-q)", True),
        ("2^{n+1}", "2^n(x+1)-2^n(x-1)", True),
        ("2^{\\lambda+1}", "2^\\lambda(x+1)-2^\\lambda(x-1)", True),
        ("2a_nx", "a_n(x+1)+a_n(x-1)", True),
        ("e(2x+1)", "e(x+1)+e(x)", True),
        ("2mx", "m(x-y)+m(x+y)", True),
    ],
)
def test_a_letter_before_brackets_is_a_function_where_it_has_several_arguments(
    answer: str, reference: str, equal: bool
) -> None:
    assert judge(answer, reference) is equal


@pytest.mark.parametrize(
    ("answer", "reference", "equal"),
    [
        ("\\frac{v}{t}", "a=\\frac{\\Delta v}{\\Delta t}", False),
        ("\\frac{\\Delta v}{t}", "\\frac{\\Delta v}{\\Delta t}", False),
        ("\\frac{v}{t}", "\\frac{\\Delta{v}}{\\Delta{t}}", False),
        ("\\frac{v}{t}", "\\frac{Δv}{Δt}", False),
        ("\\frac{Δv}{Δt}", "\\frac{\\Delta{v}}{\\Delta{t}}", True),
        ("\\frac{k(\\Delta x)^2}{2}", "\\frac{1}{2}k(\\Delta x)^2", True),
        ("\\frac{k\\Delta x}{2}", "\\frac{1}{2}k(\\Delta x)^2", False),
        ("y\\ln(\\Delta x)", "\\ln(\\Delta x)y", True),
        ("\\ln(y\\Delta x)", "\\ln(\\Delta x)y", False),
        ("k_B\\Delta T", "k_B(\\Delta T)", True),
        ("\\Delta x=v\\Delta t", "v\\Delta t", True),
        ("\\Delta{T}=v\\Delta t", "v\\Delta t", True),
        ("2\\Delta x=v\\Delta t", "v\\Delta t", False),
        ("\\Delta x=v\\Delta t", "v t", False),
        ("\\frac{v}{t}", "\\frac{{\\Delta}v}{{\\Delta}t}", False),
        ("\\frac{∆v}{∆t}", "\\frac{\\mathrm{\\Delta}v}{\\Delta t}", True),
        ("\\frac{\\text{TC}}{\\text{Q}}", "\\frac{\\Delta\\text{TC}}{\\Delta\\text{Q}}", False),
        ("\\frac{H}{S}", "\\frac{\\Delta_rH}{\\Delta_rS}", False),
        ("\\frac{\\ln Q}{\\ln P}", "\\frac{\\Delta\\ln Q}{\\Delta\\ln P}", False),
        ("\\frac{\\sqrt{\\Delta}-b}{2a}", "\\frac{-b+\\sqrt{\\Delta}}{2a}", True),
        ("\\alpha L\\Delta T", "\\alpha(\\Delta T)L", True),
        ("\\Delta v/\\Delta t", "\\frac{\\Delta v}{\\Delta t}", True),
        ("\\Delta x_1-\\Delta x_2", "\\Delta x_1+\\Delta x_2", False),
        ("-T\\Delta S+\\Delta H", "\\Delta G=\\Delta H-T\\Delta S", True),
        ("-N\\frac{\\Phi}{t}", "-N\\frac{\\Delta\\Phi}{\\Delta t}", False),
        ("\\frac{S}{q}", "\\frac{\\delta S}{\\delta q}", False),
        ("\\frac{v}{t}", "\\frac{Dv}{Dt}", False),
    ],
)
def test_a_difference_is_no_product(answer: str, reference: str, equal: bool) -> None:
    assert judge(answer, reference) is equal


@pytest.mark.parametrize(
    ("answer", "reference", "equal"),
    [
        ("\\left(\\frac1n\\sum_{i=1}^n x_i\\right)^2", "\\frac1n\\sum_{i=1}^n x_i^2", False),
        ("1-(1-p_i)^n", "1-\\prod_{i=1}^n(1-p_i)", False),
        ("x_i", "\\frac{\\sum m_ix_i}{\\sum m_i}", False),
        ("n\\sum_{i=1}^n (x^{(i)})^2", "\\left(\\sum_{i=1}^n x^{(i)}\\right)^2", False),
        ("nf\\frac{n+1}{2}", "\\sum_{k=1}^n f(k)", False),
        ("n\\sum x^2", "(\\sum x)^2", False),
        ("\\frac{n}{\\sum_{k=1}^{n} x_k}", "\\frac{n}{\\sum_{i=1}^n x_i}", True),
        ("\\frac{n}{\\sum_{k=1}^n x_i}", "\\frac{n}{\\sum_{i=1}^n x_i}", False),
        ("S_n=\\sum_{k=1}^{n}k=\\frac{n(n+1)}{2}", "S_n=\\frac{n(n+1)}{2}", True),
        (
            "f(x)=\\sum_{k=0}^{\\infty}\\frac{x^k}{k!}",
            "f(x)=\\sum_{n=0}^\\infty\\frac{x^n}{n!}",
            True,
        ),
        ("\\sum_{i=1}^{\\infty}a_{i}", "\\sum_{i=1}^\\infty a_i", True),
        ("\\sum_{i=1}^{\\infty}b_{i}", "\\sum_{i=1}^\\infty a_i", False),
        ("\\sum_{j=0}^n\\binom{n}{j}a_j", "\\sum_{k=0}^n\\binom{n}{k}a_k", True),
        ("\\sum_{j=0}^n\\binom{n}{k}a_j", "\\sum_{k=0}^n\\binom{n}{k}a_k", False),
        ("\\sum_{i=1}^n c_i\\sin i\\theta", "\\sum_{k=1}^n c_k\\sin k\\theta", True),
        ("\\sum_{i=1}^n c_i\\sin k\\theta", "\\sum_{k=1}^n c_k\\sin k\\theta", False),
        ("\\sum_k\\operatorname{dim}V_k", "\\sum_i\\operatorname{dim}V_i", True),
        ("\\sum_{i=1}^m x^{(2i)}", "\\sum_{i=1}^m (x^{(i)})^2", False),
        ("nx_\\mu", "\\sum_{\\mu=1}^n x_\\mu", False),
        ("nE_{\\text{kin},i}", "\\sum_{i=1}^n E_{\\text{kin},i}", False),
        ("nf'(k)", "\\sum_{k=1}^n f'(k)", False),
        ("\\sum^{\\infty}_{n=0}a_n", "\\sum^{\\infty}_{k=0}a_k", True),
        ("a_0\\sum_{n=1}^\\infty\\frac1{n^2}", "\\sum_{n=1}^\\infty\\frac{a_0}{n^2}", True),
        (
            "\\frac{1}{r^2}\\frac{d}{dr}\\left(r^2\\frac{dT}{dr}\\right)=0",
            "\\frac{1}{r}\\frac{d}{dr}\\left(r\\frac{dT}{dr}\\right)=0",
            False,
        ),
        (
            "\\frac1r\\frac{\\partial u}{\\partial r}",
            "\\frac1r\\frac{\\partial}{\\partial r}(r\\frac{\\partial u}{\\partial r})",
            False,
        ),
        ("\\sum_{i}\\sum_{j}a_{ji}x_i", "\\sum_{i}\\sum_{j}a_{ij}x_i", False),
        ("y", "\\frac{d}{dx}(xy)", False),
        ("\\frac{d}{dt}\\left(mv\\right)", "\\frac{d}{dt}(mv)", True),
    ],
)
def test_terms_with_an_index_and_derivatives_of_unknowns_equal_the_same_spelling_only(
    answer: str, reference: str, equal: bool
) -> None:
    assert judge(answer, reference) is equal


@pytest.mark.parametrize(
    ("answer", "reference", "equal"),
    [
        ("IR", "I^2R", False),
        ("RI^2", "I^2R", True),
        ("I_1R", "I_2R", False),
        ("I_1+I_2", "2I_1", False),
        ("I_{1}+I_2", "I_2+I_1", True),
        ("\\frac{\\mu_0 I^2}{2\\pi r}", "\\frac{\\mu_0 I}{2\\pi r}", False),
        ("\\frac{L}{i}", "\\frac{L}{I}", False),
        ("\\frac{\\Gamma}{2}", "\\frac{\\gamma}{2}", False),
        ("\\Gamma", "\\gamma", False),
        ("\\gamma^2-\\gamma", "\\gamma(\\gamma-1)", True),
        ("0.5772156649", "\\gamma", False),
        ("0", "I(0)", False),
        ("0", "I(0)e^{-\\frac{t}{RC}}", False),
        ("I(0)e^{t/(RC)}", "I(0)e^{-\\frac{t}{RC}}", False),
        ("I(0)\\exp(-t/(RC))", "I(0)e^{-\\frac{t}{RC}}", True),
        ("IR+Ir", "I(R+r)", True),
        ("0", "E(0)e^{-kt}", False),
        ("\\frac{E_1+2E_2}{3}", "\\frac13E_1+\\frac23E_2", True),
        ("\\frac{E_1-2E_2}{3}", "\\frac13E_1+\\frac23E_2", False),
        ("-V+3E", "3E-V", True),
        ("\\frac{e}{R}", "\\frac{E}{R}", False),
        ("2.5E-3\\pi", "0.0025\\pi", True),
    ],
)
def test_letters_that_the_parser_takes_for_constants_are_unknowns(
    answer: str, reference: str, equal: bool
) -> None:
    assert judge(answer, reference) is equal


@pytest.mark.parametrize(
    ("answer", "reference", "equal"),
    [
        ("P_0(1+r)", "P_0(1+r)^T", False),
        ("P_0(1+r)^{T}", "P_0(1+r)^T", True),
        ("5x^T", "5x", False),
        ("x^{\\top}Ax", "x^{T}Ax", True),
        ("m+n-1", "m+n-\\gcd(m,n)", False),
        ("1", "\\gcd(a,b)", False),
        ("ab", "\\operatorname{lcm}(a,b)", False),
        ("\\gcd(a,b)", "\\gcd(a, b)", True),
        ("3!!", "720", False),
    ],
)
def test_operators_that_the_parser_drops_equal_the_same_spelling_only(
    answer: str, reference: str, equal: bool
) -> None:
    assert judge(answer, reference) is equal
