"""Answers that look like a right one and are not, and right ones that look different."""

import pytest

from rollout.rewards.math_judge import judge

# fmt: off
TABLE: dict[str, tuple[list[str], list[str]]] = {
    # reference: (right answers, wrong answers)
    # equations to solve: not their right sides
    "5": (
        [
            "x=5", "x_1=5", "f(x)=5", "f(-1)=5", "v_{\\text{max}}=5", "5\\text{ m}=500\\text{ cm}=5\\text{ m}", "f^{-1}(3)=5", "\\angle ABC=5", "AB=5", "AB^2=5", "[ABC]=5",
            "\\text{area}=5", "P(A)=5", "|z|^2=5", "\\sin x=5", "m+n=5", "AB\\cdot AC=5", "x_1+x_2=5", "\\frac{m}{n}=5",
            "5 dollars", "\\$5", "€5", "y=2x=5",
        ],
        [
            "2x=5", "x+1=5", "-x=5", "\\frac{x}{2}=5", "x^2=5", "\\sqrt{x}=5", "2^x=5", "\\frac1x=5", "x(x+1)=5", "2\\theta=5",
            "2x_1=5", "n!=5", "\\binom n2=5", "|x-2|=5", "2AB=5", "2f(3)=5", "2\\pi r=5", "180-\\angle A=5",
        ],
    ),
    "\\sqrt{2}": (
        ["x=\\sqrt2", "AB=\\sqrt2"],
        ["2x=\\sqrt2", "x+1=\\sqrt2", "x^2=\\sqrt2", "a=17, b=\\sqrt2", "x=\\sqrt3, x=\\sqrt2", "a=17,b=\\sqrt2"],
    ),
    "3x": (["y=3x", "f(x)=3x", "y'=3x"], ["y-2=3x", "2y=3x"]),
    "(2,1)": (
        ["x=2, y=1", "y=1, x=2", "\\sin x=2, \\cos x=1", "f(1)=2, f(2)=1", "1+1=2, 1+0=1"],
        ["x+y=2, x-y=1", "(x+y=2, x-y=1)", "2x=2, y=1", "x=2, x-y=1", "x+y=2 \\text{ and } x-y=1"],
    ),
    "4, 9": (["x_1=4, x_2=9"], ["x^2=4, x^2=9", "2x=4 \\text{ or } 3x=9", "x+y=4, xy=9"]),
    # products that may be vectors
    "v\\times u": (["v × u"], ["u\\times v", "u\\cdot v", "v\\cdot u"]),
    "u\\times v+w": ([], ["v\\times u+w"]),
    "\\omega\\times r": ([], ["r\\times\\omega"]),
    "(a\\times b)\\times c": ([], ["a\\times(b\\times c)"]),
    "2\\pi r": (["2\\times\\pi\\times r", "r\\times 2\\pi"], []),
    "m\\times 2^n": (["2^n\\times m"], []),
    # derivatives in other notations
    "\\frac{dx}{dt}=kx-a": (["x'=kx-a", "\\dot x=kx-a", "x'(t)=kx-a"], ["x'=kx+a", "x''=kx-a", "y'=kx-a", "x=kx-a"]),
    "\\frac{dx}{ds}": (["x'"], ["\\dot x", "s'"]),
    "y''+y=0": (["\\frac{d^2y}{dx^2}+y=0"], ["\\frac{dy}{dx}+y=0", "\\frac{d^2y}{dx^2}+y'=0"]),
    # absolute values
    "-1<x<5": (
        ["|x-2|<3", "3>|x-2|", "|2-x|<3", "|2x-4|<6", "\\left|x-2\\right|<3"],
        ["|x-2|\\le3", "|x+2|<3", "|x-2|>3", "|y-2|<3", "|2x-2|<3", "|x-2|<-3"],
    ),
    "x\\le-1\\text{ or }x\\ge5": (["|x-2|\\ge3", "3\\le|x-2|"], ["|x-2|>3"]),
    "-\\frac12<x<\\frac32": (["|x-\\frac12|<1", "|x-0.5|<1"], ["|x+\\frac12|<1"]),
    # intervals are not their ends, and no true inequality is an empty set
    "-3<x<3": (["(-3,3)", "|x|<3", "x \\in (-3,3)"], ["\\pm3", "-3, 3", "\\{-3,3\\}", "x=-3, x=3"]),
    "|x|<3": (["-3<x<3", "(-3,3)"], ["\\{-3,3\\}", "x=\\pm3"]),
    "\\mathbb{R}": (["(-\\infty,\\infty)"], ["\\pm\\infty", "-\\infty, \\infty", "\\{-\\infty,\\infty\\}"]),
    "\\emptyset": (["x<1 \\text{ and } x>3", "\\{\\}"], ["1>0", "x<\\infty", "x^2\\ge0", "-\\infty<x<\\infty", "x<x+1"]),
    # money
    "\\$5": (["500 cents", "500¢", "5", "5 dollars", "US\\$5.00"], ["5 cents", "500 dollars", "5 euros", "€5", "\\$500"]),
    "75\\text{ cents}": (["\\$0.75", "75", "75¢"], ["\\$75", "0.75 cents"]),
    "£5": (["5", "5 pounds"], ["5 euros", "€5"]),
    # relations of several sides: all sides count, in any order
    "\\frac{x}{1}=\\frac{y}{2}=\\frac{z}{3}": (
        ["x=\\frac y2=\\frac z3", "\\frac z3=\\frac y2=x"], ["\\frac x1=\\frac y5=\\frac z3", "\\frac x1=\\frac z3", "\\frac z3"],
    ),
    "\\frac{a+b}{c}=\\frac{b+c}{a}=\\frac{c+a}{b}": (["\\frac{b+a}{c}=\\frac{b+c}{a}=\\frac{a+c}{b}"], ["\\frac{a+b}{c}=\\frac{c+a}{b}"]),
    "a=b=c": (["c=b=a", "b=c=a"], ["c", "a=c", "a=2b=c", "a=b", "a=b=c=d"]),
    "x=-y=z": ([], ["x=y=z", "z"]),
    "a=2b=4c": (["4c=2b=a"], ["a=3b=4c", "4c", "a=4c"]),
    "AB=BC=CD": (["CD=BC=AB"], ["AB=CD", "AB=AC=CD", "CD"]),
    "AB=2BC=3CD": ([], ["3CD"]),
    "x_1=2x_2=3x_3": ([], ["3x_3", "x_1=2x_3=3x_2"]),
    "a=b=c=1": (["1=a=b=c"], ["1", "a=1", "a=b=1"]),
    "\\angle A=\\angle B=60^\\circ": (["\\angle B=\\angle A=60"], ["60", "\\angle A=60^\\circ"]),
    # computations of several sides: the last one is the result
    "S_n=\\sum_{k=1}^n k=\\frac{n(n+1)}{2}": (["\\frac{n(n+1)}{2}", "S_n=\\frac{n^2+n}{2}"], ["\\frac{n(n-1)}{2}"]),
    "F=ma=m\\frac{v^2}{r}": (["\\frac{mv^2}{r}", "F=\\frac{mv^2}{r}"], ["\\frac{mv}{r}"]),
    "P=IV=I^2R": (["I^2R"], ["IR"]),
    "\\frac{dy}{dx}=\\frac{2x}{2y}=\\frac{x}{y}": (["\\frac{dy}{dx}=\\frac{x}{y}"], ["\\frac{dy}{dx}=\\frac{y}{x}"]),
    "P(A)=\\frac{|A|}{|S|}=\\frac{5}{18}": (["\\frac5{18}"], []),
    "f(n)=n+1-1=n": (["n"], ["n+1"]),
    # brackets around a whole side: the floor and the fractional part
    "\\left[\\frac n2\\right]": (["\\left\\lfloor\\frac{n}{2}\\right\\rfloor", "[n/2]"], ["\\frac n2", "\\frac{n}{2}"]),
    "\\lfloor\\frac n2\\rfloor": (["\\left[\\frac n2\\right]"], ["\\frac n2", "[\\frac n3]"]),
    "f(x)=x": (["x", "f(x)=(x)"], ["f(x)=[x]", "f(x)=\\{x\\}", "[x]"]),
    "f(x)=[x]": (["f(x)=\\lfloor x\\rfloor", "[x]"], ["f(x)=x", "f(x)=\\{x\\}", "x"]),
    "f(x)=\\{x\\}": (["\\{x\\}"], ["f(x)=x", "f(x)=[x]", "x"]),
    "S=\\{a\\}": (["\\{a\\}", "S=\\{a\\}"], ["\\{b\\}"]),
    "S=\\{5\\}": (["\\{5\\}", "5"], ["\\{6\\}"]),
    "\\{a\\}": (["S=\\{a\\}", "a"], ["S=\\{b\\}"]),
    "\\begin{bmatrix}a\\\\b\\end{bmatrix}": (["[\\begin{matrix}a\\\\b\\end{matrix}]"], []),
    "2(x+1)": (["[2(x+1)]", "2[x+1]"], ["[x+1]"]),
    "[(a+b)c]d": (["acd+bcd", "(a+b)cd"], []),
    # two points in one
    "(\\pm\\sqrt5,0)": (["(\\sqrt5,0),(-\\sqrt5,0)", "(-\\sqrt5,0) \\text{ and } (\\sqrt5,0)", "(\\pm\\sqrt{5},0)"], ["(\\sqrt5,0)", "(0,\\pm\\sqrt5)", "(\\pm5,0)", "\\pm\\sqrt5"]),
    "(\\sqrt5,0),(-\\sqrt5,0)": (["(\\pm\\sqrt5,0)", "(±\\sqrt5, 0)"], ["(\\pm\\sqrt5,1)", "(\\pm\\sqrt5,\\pm0)"]),
    "(4,\\pi/3),(4,-\\pi/3)": (["(4,\\pm\\pi/3)"], ["(\\pm4,\\pi/3)"]),
    # domains after an answer
    "f(x)=2x": (
        ["f(x)=2x \\text{ for all } x", "f(x)=2x, x\\in\\mathbb{R}", "f(x)=2x, \\forall x \\in \\mathbb R", "f(x)=2x \\text{ for all real } x", "2x, x \\in \\mathbb{R}"],
        ["f(x)=2x, x\\in\\mathbb{Q}", "f(x)=2x, x>0", "f(x)=3x, x\\in\\mathbb{R}", "f(x)=2x, x"],
    ),
    # ordinals, bases, hours and logarithms to base e
    "22": (["22nd", "\\textbf{22nd}"], ["2nd", "22d"]),
    "12": (
        ["12\\text{ more pages}", "12\\text{ left over}", "12 \\text{ o'clock}"],
        ["12\\text{ more}", "12\\text{ more than half}", "12 \\text{ more times}", "12\\text{ over}", "12\\text{ths}", "12 ths", "11 \\text{ o'clock}"],
    ),
    "\\frac35": (["3/5\\text{ths}", "3/5ths", "\\frac{3}{5}\\text{ths}", "\\dfrac35\\text{ ths}"], ["2/5\\text{ths}", "\\frac25\\text{ths}", "3\\text{ fifths and }1"]),
    "\\frac23": (["2/3\\text{rds}"], ["2/3\\text{ths of }2"]),
    "52_8": (
        ["52_{(8)}", "52 \\text{ (base 8)}", "52_{\\text{base }8}", "52\\text{ base }8", "52\\text{ (base eight)}", "52_{\\text{base 8}}", "52_{\\text{(base eight)}}", "52_{8}\\text{ (base 8)}", "52\\ (\\text{base }8)"],
        ["52_{(9)}", "52 \\text{ (base 9)}", "53 \\text{ (base 8)}", "52_{\\text{base }7}", "52\\text{ (base 18)}", "52\\text{ base }80", "52_{\\text{base 9}}", "52_8\\text{ (base 9)}", "52_8\\text{ (base 80)}"],
    ),
    "52": (["52 \\text{ (base 10)}"], ["52_{(8)}", "52 \\text{ (base 8)}", "52_{\\text{base }8}"]),
    "\\ln 2": (["\\log_e 2", "\\log_{e}(2)"], ["\\log_2 e", "\\log_{2e} 2", "\\log_e 3", "\\log 2e"]),
    "\\ln x": (["\\log_ex"], ["\\log_a x"]),
    # the argument of a function
    "f(n)=0,f(n)=2 n+K": (
        ["f(x)=0, f(x)=2x+K", "f(m)=2m+K, f(m)=0"],
        ["f(x)=0, f(n)=2x+K", "f(x)=0, f(x)=2x-K", "f(x)=0, f(x)=2n+K", "f(x)=0, g(x)=2x+K", "f(x)=2x+K"],
    ),
    "f(n)=n+1": (["f(x)=x+1", "f(x)=x+1, x\\in\\mathbb{R}"], ["f(x)=n+1", "f(n)=x+1", "f(x)=x-1", "g(x)=x+1", "f(a)=a+1", "f(x)=x+n"]),
    "f(x)=x\\exp(kx)": (["f(n)=n\\exp(kn)"], ["f(k)=k\\exp(k^2)", "f(k)=k\\exp(xk)", "f(m)=m\\exp(kx)"]),
    "f(x)=2x, f(y)=3y^2": ([], ["f(y)=2y, f(x)=3x^2"]),
    "P(A)=\\frac12": ([], ["P(B)=\\frac12"]),
    "f(n)=2n+K": (
        [
            "f(n)=2n+K \\text{ for some integer } K", "f(n)=2n+K \\text{ for any constant } K", "f(n)=2n+K \\text{ for some } K",
            "f(n)=2n+K, \\text{ where } K \\text{ is an arbitrary constant}",
        ],
        [
            "f(n)=2n-K \\text{ for some integer } K", "f(n)=2n+K \\text{ for some integer } n", "f(n)=2n+K \\text{ for some integer } L",
            "f(n)=2n+K \\text{ for some positive integer } K", "f(n)=2n \\text{ for some integer } K",
        ],
    ),
    "f(x)=C_1x+\\frac{C_2}{x}": (
        [
            "f(x)=C_1x+\\frac{C_2}{x}, C_1,C_2\\in\\mathbb{R}", "f(x)=C_1x+\\frac{C_2}{x} \\text{ for constants } C_1 \\text{ and } C_2",
            "f(x)=C_1x+\\frac{C_2}{x} \\text{ where } C_1, C_2 \\text{ are constants}",
        ],
        ["f(x)=C_1x-\\frac{C_2}{x}, C_1,C_2\\in\\mathbb{R}", "f(x)=C_1x+\\frac{C_2}{x}, C_1,C_3\\in\\mathbb{R}", "f(x)=C_1x, C_1, C_2\\in\\mathbb{R}"],
    ),
    "2k+m": (["2k+m, k,m\\in\\mathbb{Z}", "2k+m \\text{ for some integers } k, m"], ["2k+m, k,m\\in\\mathbb{R}", "2k+m \\text{ for some constants } k,m"]),
    "a, b": ([], ["a, b, k\\in\\mathbb{Z}"]),
    "-n, n": (["-n, n, n\\in\\mathbb{Z}"], ["-n, m, n\\in\\mathbb{Z}"]),
    "-n": (["-n, n\\in\\mathbb{Z}"], ["-n, n, n\\in\\mathbb{Z}"]),
    "3/1000": (["3/1000\\text{ths}"], []),
    "0<n<5": (["0<n<5 \\text{ for all } n"], ["0<n<5 \\text{ for some } n"]),
    "\\frac\\pi4+k\\pi": (["\\frac\\pi4+k\\pi, k\\in\\mathbb{Z}", "x=\\frac\\pi4+k\\pi,k\\in\\mathbb Z"], ["\\frac\\pi4+k\\pi, k\\in\\mathbb{N}", "\\frac\\pi4, k\\in\\mathbb{Z}"]),
    "x=1": (["x=1, x\\in\\mathbb{R}"], ["x=1, y\\in\\mathbb{R}"]),
    "(0,4)": (["0<x<4, x\\in\\mathbb{R}"], ["0<x<4, x\\in\\mathbb{Z}"]),
    "f(x)=2x, x>0": ([], ["f(x)=2x, x\\in\\mathbb{R}"]),
    # words between items
    "5\\text{ boys}, 7\\text{ girls}": (
        ["5\\text{ boys and }7\\text{ girls}", "7\\text{ girls and }5\\text{ boys}", "\\text{5 boys and 7 girls}"],
        ["7\\text{ boys and }5\\text{ girls}", "12"],
    ),
    # approximations after a named value
    "\\frac{14}{3}": (
        ["x=\\frac{14}{3}\\approx 4.67", "P(A)=\\frac{28}{6}=\\frac{14}{3}\\approx 4.667"],
        ["x=\\frac{14}{5}\\approx 4.67", "x=\\frac{14}{3}=4.67", "x=4\\approx\\frac{14}{3}"],
    ),
    "\\frac{c}{\\sqrt2}": (["v=\\frac{c}{\\sqrt2}\\approx 0.707c"], ["v=\\frac{c}{2}\\approx\\frac{c}{\\sqrt2}"]),
    "x=\\frac{14}{3}\\approx 4.67": (["\\frac{14}{3}", "\\frac{14}{3}\\approx 4.67"], ["4.67", "\\frac{14}{5}\\approx 4.67"]),
    "x=2\\sqrt2\\approx 2.83": (["x=2\\sqrt{2}", "x=\\sqrt8", "x=\\sqrt8\\approx 2.828", "\\sqrt8\\approx 2.83"], ["x=\\sqrt7\\approx 2.83", "y=2\\sqrt2", "x"]),
    # a change is one unknown
    "6": (["\\Delta x=6", "|\\Delta x|=6", "\\lvert\\Delta v\\rvert=6", "\\left|\\Delta\\theta\\right|=6", "(\\Delta x)^2=6", "\\Delta x^2=6", "\\Delta x\\Delta p=6"], ["2\\Delta x=6", "2|\\Delta x|=6", "\\frac{\\Delta x}{2}=6", "\\Delta x+1=6", "3\\Delta t_1=6"]),
    "\\frac{Q}{T}": (["\\Delta S=\\frac{Q}{T}"], ["2\\Delta S=\\frac{Q}{T}"]),
    # brackets around a term: the floor
    "\\left[\\frac n2\\right]+1": (["\\lfloor\\frac n2\\rfloor+1", "1+[n/2]"], ["\\frac n2+1", "\\frac{n+2}2", "[\\frac n2]+2"]),
    "2[\\frac n2]": (["\\lfloor\\frac n2\\rfloor\\cdot 2"], ["n"]),
    "n-\\left[\\frac{1+n}{2}\\right]": (["n-\\lfloor\\frac{n+1}{2}\\rfloor"], ["\\frac{n-1}{2}"]),
    "\\frac{x^2-1}{2x}": (["\\frac{1}{2}\\left[\\frac{x^2-1}{x}\\right]"], ["\\left[\\frac{x^2-1}{2x}\\right]"]),
    "\\frac{2(a+b)}{c}": (["2[\\frac{a+b}{c}]"], ["2\\lfloor\\frac{a+b}{c}\\rfloor"]),
    "2[\\frac{a+b}{c}]": (["\\frac{2(a+b)}{c}", "2[\\frac{b+a}{c}]"], []),
    "2\\lfloor\\frac{x+1}{2}\\rfloor": (["2[\\frac{x+1}{2}]"], ["x+1"]),
    # concentrations
    "\\frac{[I_2][H_2]}{[HI]^2}": (["\\frac{[H_2][I_2]}{[HI]^2}"], ["\\frac{[H_2][I_2]}{[HI]}"]),
    "\\frac{[C]^2}{[B][A]^2}": (["\\frac{[C]^2}{[A]^2[B]}", "\\frac{[C]^2}{[A]^{2}[B]}", "\\frac{[C]^2}{[A]^2\\cdot[B]}"], ["\\frac{[C]^2}{[A][B]^2}"]),
    "2[x+1]": (["2x+2"], ["2x+1"]),
    "\\sqrt[n]{x}+1": (["1+x^{1/n}"], ["\\sqrt{x}+1"]),
    # brackets after a name
    "\\{1,2,3\\}": (["S=\\{3,2,1\\}", "A\\cap B=\\{3,2,1\\}", "3, 2, 1"], ["S=(1,2,3)", "S=(3,2,1)", "A\\cap B=(1,2,3)", "\\text{S}=(1,2,3)"]),
    "(1,2,3)": (["P=(1,2,3)", "x=1, y=2, z=3"], ["S=\\{1,2,3\\}", "P=(1,3,2)"]),
    "S=\\{1,2,3\\}": (["3, 2, 1", "S=\\{1,3,2\\}"], ["(1,2,3)", "S=(1,2,3)"]),
    # a binomial coefficient in the braces of an argument
    "2^{\\binom{n}{2}}": (["2^{n \\choose 2}", "2^{{n \\choose 2}}"], ["2{n \\choose 2}", "2^{n \\choose 3}"]),
    "60": (["\\frac{10 \\choose 3}{2}", "\\frac{{10 \\choose 3}}2"], ["\\frac{10 \\choose 2}{2}"]),
    "\\frac{\\binom{5}{2}}{\\binom{10}{2}}": (["\\frac{5\\choose 2}{10\\choose 2}"], ["\\frac{5\\choose 2}{10\\choose 3}"]),
    "\\sqrt{\\binom{n}{2}}": (["\\sqrt{n\\choose 2}"], ["\\sqrt{n\\choose 3}"]),
    "\\frac{1}{2}\\binom{n}{2}": (["\\frac{1}{2}{n\\choose 2}", "\\frac12{n\\choose 2}"], []),
    # families with a real index
    "\\frac\\pi4+n\\pi": (["\\frac\\pi4+n\\pi, n\\in\\mathbb{Z}"], ["\\frac\\pi4+n\\pi, n\\in\\mathbb{R}"]),
    "x=\\frac{\\pi}{2}+2\\pi a": (["x=\\frac{\\pi}{2}+2\\pi a, a\\in\\mathbb{Z}"], ["x=\\frac{\\pi}{2}+2\\pi a, a\\in\\mathbb{R}"]),
    "2k+1": (["2k+1, k\\in\\mathbb{Z}"], ["2k+1, k\\in\\mathbb{R}"]),
    "f(x)=\\sin(\\pi x)": (["f(x)=\\sin(\\pi x), x\\in\\mathbb{R}"], []),
    "0<n<4": (["0<n<4, n\\in\\mathbb{R}"], ["0<n<4, n\\in\\mathbb{Z}"]),
    "f(x)=ax": (["f(x)=ax, a\\in\\mathbb{R}"], []),
    "f(x)=kx": (["f(x)=kx, k\\in\\mathbb{R}"], ["f(x)=kx, k\\in\\mathbb{N}"]),
    "kx": (["f(x)=kx, k\\in\\mathbb{R}"], []),
    "f(x)=k": (["f(x)=k, k\\in\\mathbb{R}"], []),
    "(k,2k)": (["(k,2k), k\\in\\mathbb{R}"], []),
    "a\\cos\\pi x": (["a\\cos\\pi x, a\\in\\mathbb{R}"], []),
    # times, as a unit
    "3": (
        ["3rd", "\\text{3rd}", "3\\text{ times}", "3\\text{ times a week}", "3\\text{ times per day}", "3 times"],
        ["3nd", "13rd", "3rds", "3\\text{rds}", "3^{rd}", "3\\text{ times }4", "3\\text{ times }x", "3\\text{ times more}", "3\\text{ times as many}", "3\\text{ times per dozen}", "2\\text{ times}"],
    ),
    "3\\text{ times a week}": (["3", "3\\text{ times per week}"], ["3\\text{ times a day}"]),
    # indices that are commands
    "\\frac{dM}{dt}=\\frac{10^{5} L_{\\odot}}{0.007 c^{2} M_{\\odot}^{6}} M^{6}": (
        ["\\frac{dM}{dt}=\\frac{10^5L_\\odot}{0.007c^2}(\\frac{M}{M_\\odot})^6"],
        ["\\frac{dM}{dt}=\\frac{10^5L_\\odot}{0.007c^2}(\\frac{M}{M_\\odot})^5", "\\frac{dM}{dt}=\\frac{10^5M_\\odot}{0.007c^2}(\\frac{M}{M_\\odot})^6"],
    ),
    "-\\tau\\ln\\Delta": (["t_\\Delta=-\\tau\\ln\\Delta"], ["t_\\Delta=\\tau\\ln\\Delta"]),
    "2M_\\odot": (["M_{\\odot}\\cdot 2"], ["2M", "2M_\\oplus", "2L_\\odot", "2"]),
    "\\frac{2}{x_{max}}": (["2\\frac{1}{x_\\max}"], ["\\frac{2}{x_\\min}"]),
    "1": (["\\ln e", "1st"], ["e", "11st", "1stx"]),
}
# fmt: on


@pytest.mark.parametrize("gold", TABLE)
def test_a_similar_answer_is_right_only_with_the_same_meaning(gold: str) -> None:
    right, wrong = TABLE[gold]
    assert [answer for answer in right if not judge(answer, gold)] == []
    assert [answer for answer in wrong if judge(answer, gold)] == []
