"""Answers with a part that changes their value: false equations, words, units, operators."""

import pytest

from rollout.rewards.math_judge import judge

# fmt: off
TABLE: dict[str, tuple[list[str], list[str]]] = {
    # reference: (right answers, wrong answers)
    # all sides of an equation that can be computed
    "100": ([], ["5! = 100"]),
    "120": (["5! = 120"], []),
    "11": ([], ["\\binom52=11"]),
    "10": (["\\binom52=10"], []),
    "2": (["\\frac{4}{\\sqrt4}=2"], ["\\ln 10=2", "√12"]),
    "3": (
        ["\\log_2 8=3", "3=\\log_2 8", "|-3|=3", "\\sqrt[3]{27}\\text{ cm}=3\\text{ cm}", "A=\\ell=3", "S=\\pi r=3", "?=3"],
        ["\\log_2 9=3", "7=\\log_2 8", "\\pi=3", "\\sqrt{10}=3", "x=\\sqrt{10}=3", "√13"],
    ),
    "4": ([], ["|{-3}|=4", "2√12"]),
    "6": ([], ["2\\pi=6", "(1+\\sqrt2)^2=6"]),
    "7": ([], ["e^2=7"]),
    "1": ([], ["\\cos\\pi=1", "1 ninth", "1 million five hundred thousand"]),
    "-1": (["\\cos\\pi=-1"], []),
    "\\frac12": (["\\sin30^\\circ=\\frac12"], ["\\sin 45^\\circ=\\frac12"]),
    "12.57": (["V=4\\pi=12.57"], ["V=5\\pi=12.57"]),
    "12.56": (["V=4\\pi=12.56"], []),
    "-12.57": (["V=-4\\pi=-12.57"], ["V=4\\pi=-12.57"]),
    "1.26\\times10^{8}": (["4\\pi\\times10^{7}=1.26\\times10^{8}"], ["4\\pi\\times10^{6}=1.26\\times10^{8}"]),
    "60": (["\\theta=\\frac{\\pi}{3}=60^\\circ", "\\arccos\\frac12=60^\\circ"], ["\\frac{\\pi}{4}=60^\\circ"]),
    "70.7": (["\\frac{\\sqrt2}{2}=70.7\\%"], ["\\frac{\\sqrt3}{2}=70.7\\%"]),
    # roots and fractions without braces
    "2\\sqrt3": (["√12", "2\\sqrt3\\text{ cm}"], ["√1 2", "2\\sqrt3\\text{ thirds}"]),
    "\\sqrt{10}": (["√10"], ["√1"]),
    "\\frac{\\pi}{4}": (["\\frac\\pi4", "\\tan^{-1}1"], ["\\frac4\\pi"]),
    "\\frac{x}{y}": (["\\frac{x}y", "\\frac xy"], ["\\frac yx"]),
    # words that change a value
    "5": (
        ["5 apples per day", "5 seconds", "5 square units"],
        [
            "5 eighths", "5 millionths", "5 hundred thousand", "5 crore", "5 quadrillion", "5 point two", "5 below zero",
            "5 remainder three", "5 through nine", "5 doubled", "5 cubed", "5 inverse", "5 millions",
        ],
    ),
    "500000": (["5 hundred thousand"], ["5 hundred"]),
    "5 feet": (["5 ft", "60 inches"], ["5 feet six inches", "5 inches"]),
    "2 hours": (["120 minutes"], ["2 hours thirty minutes"]),
    # different words
    "25\\% \\text{ gain}": (["25\\%", "25"], ["25\\% \\text{ loss}"]),
    "30^\\circ\\text{ S}": (["30"], ["30^\\circ\\text{ N}"]),
    "5 miles south": (["5"], ["5 miles north"]),
    "2 units right": (["2"], ["2 units left"]),
    "\\text{4 August}": (["4 August"], ["\\text{4 July}"]),
    "90^\\circ \\text{ clockwise}": (["90"], ["90^\\circ\\text{ counterclockwise}"]),
    "6 losses": (["6", "6 loss"], ["6 wins"]),
    "5 cm": (["5 Centimeters", "5 cm^2"], ["5 Meters", "5 KM"]),
    "5 cents": (["5 Cents"], ["5 Dollars"]),
    "4\\text{ km/h}": (["4 kph"], ["4 Mph"]),
    "5\\text{ J}": (["0.005\\text{ kJ}"], ["5\\text{ kJ}"]),
    "5\\text{ MW}": (["5000\\text{ kW}"], ["5\\text{ mW}"]),
    "5 kg": ([], ["5 ton"]),
    "5 liters": ([], ["5 gallons"]),
    "5\\text{ mm}": (["5000\\,\\mu\\text{m}"], ["5\\,\\mu\\text{m}"]),
    "5^\\circ": (["5\\text{ degrees}"], ["5\\text{ rad}"]),
    "5^\\circ\\text{C}": (["5\\text{ degrees Celsius}"], ["5\\text{ K}", "5^\\circ\\text{F}"]),
    # operators that algebra drops or commutes
    "A": ([], ["A^T"]),
    "AB": (["BA"], ["A^TB"]),
    "B": ([], ["ABA^{-1}"]),
    "B^{-1}A": (["X=B^{-1}A"], ["AB^{-1}"]),
    "B\\times A": (["B \\times A"], ["A\\times B"]),
    "\\vec b\\times\\vec a": ([], ["\\vec a\\times\\vec b"]),
    "\\angle BCA": (["\\angle BCA"], ["\\angle ABC"]),
    "\\frac{1}{T}": (["T^{-1}"], []),
    # matrices
    "\\begin{pmatrix}9.1\\times10^{-31}\\\\0\\end{pmatrix}": ([], ["\\begin{pmatrix}1.6\\times10^{-19}\\\\0\\end{pmatrix}"]),
    "\\begin{pmatrix}1/3\\\\1\\end{pmatrix}": (
        ["\\begin{pmatrix}0.333333\\\\1\\end{pmatrix}"], ["\\begin{pmatrix}0.3333334\\\\1\\end{pmatrix}"],
    ),
    "|x|<9.1\\times10^{-31}": ([], ["|x|<1.6\\times10^{-19}"]),
    # numbers side by side, lists
    "125": ([], ["$12$$5$"]),
    "56": ([], ["\\$5\\$6", "5\\hspace{1cm}6"]),
    "2,3": (["3,2", "\\{2,2,3\\}"], ["2,2,3"]),
    "3,5,5": (["5,3,5"], ["3,3,5"]),
    "1,1,1": ([], ["1,1"]),
    # dates and calculations
    "2020-05-01": (["2020-05-01"], ["2020-01-05"]),
    "2/4/2020": ([], ["1/2/2020"]),
    "556-1235": ([], ["555-1234"]),
    "2-1": (["1"], ["3-2"]),
    "24/50": (["12/25", "0.48"], []),
    "12": ([], ["7--5"]),
    "28": ([], ["20--8"]),
}
# fmt: on


@pytest.mark.parametrize("gold", TABLE)
def test_an_answer_with_a_changed_value_is_refused_and_the_true_one_accepted(gold: str) -> None:
    right, wrong = TABLE[gold]
    assert [answer for answer in right if not judge(answer, gold)] == []
    assert [answer for answer in wrong if judge(answer, gold)] == []


# fmt: off
LEFT_TO_DO: list[tuple[str, str, bool]] = [
    # (answer, reference, whether it is right)
    # equations that are still to be solved
    ("x^2+1=0", "0", False), ("x^2-5x+6=0", "0", False), ("y=x^2-1=0", "0", False), ("(x-1)(x-2)=0", "0", False),
    ("f(x)=x^2-1=0", "0", False), ("x^2-4=(x-2)(x+2)=0", "0", False), ("\\lambda^2-3\\lambda+2=0", "0", False),
    ("x-\\frac{1}{2}=0", "0", False), ("2^x-1=0", "0", False), ("\\text{Solve } x^2-1=0", "0", False),
    ("a+b=0", "0", True), ("a+b+c=0", "0", True), ("m-n=0", "0", True), ("f(1)+f(-1)=0", "0", True), ("f(-1)+1=0", "0", False),
    ("|x-y|=0", "0", True), ("\\Delta=b^2-4ac=0", "0", True), ("\\Delta=k^2-4=0", "0", True), ("\\cos(A+B)=0", "0", True),
    ("\\text{slope}=\\frac{y_2-y_1}{x_2-x_1}=0", "0", True), ("\\text{x-intercept}=0", "0", True), ("2x-2x=0", "0", False),
    ("\\sin^2 x+\\cos^2 x-1=0", "0", True), ("x^{-1}=0", "0", False), ("a_1+a_2=0", "0", True),
    ("x=0", "0", True), ("y=5-5=0", "0", True), ("x_{n-1}=0", "0", True),
    ("\\lim_{n\\to\\infty}\\frac{n+1}{n^2}=0", "0", True), ("\\int_0^1 (2x-1)\\,dx=0", "0", True),
    ("m+n=7", "7", True), ("100m+n=503", "503", True), ("2x=5", "5", False),
    # operators with an index, products of roots, functions of numbers
    ("\\sum_{i=1}^{10} i", "55", False), ("\\prod_{i=1}^{5} i", "120", False), ("\\sum_{i=0}^\\infty \\frac{1}{3^i}", "\\frac32", False),
    ("\\lim_{i\\to\\infty}\\frac{1}{i}", "0", False), ("\\sum_{i=1}^{10} i=55", "55", True), ("\\sum_{i=1}^{10} i=56", "56", False),
    ("\\sum_{k=1}^{n} k", "\\frac{n(n+1)}{2}", False), ("\\sqrt{2}\\sqrt{8}", "4", False), ("\\sqrt2\\sqrt8=4", "4", True),
    ("\\int_0^1 e^x dx", "e-1", False), ("\\int_0^1 e^x dx=e-1", "e-1", True), ("\\int_0^1 e^x dx\\approx 1.718", "e-1", False),
    ("\\sum_{k=1}^n k=\\frac{n^2+n}{2}", "\\frac{n(n+1)}{2}", True), ("(\\int_0^a x dx, 1)", "(\\frac{a^2}{2}, 1)", False),
    ("\\lim_{h\\to0}\\frac{(x+h)^2-x^2}{h}", "2x", False),
    ("\\sqrt2\\sqrt3", "\\sqrt6", True), ("\\binom84", "70", True), ("\\gcd(12,18)", "6", True), ("\\max(3,5)", "5", True),
    ("\\lfloor\\sqrt{80}\\rfloor", "8", True), ("\\cos 90^\\circ", "0", True), ("2^3 3^2", "72", False),
    # numerals in a base
    ("1010_2", "10", False), ("10_{10}", "10", True), ("FF_{16}", "255", False), ("1111_2=15", "15", True), ("5_2", "5", False),
    ("1111_2=15_{10}", "15", True), ("1111_2=15_{10}", "15_{10}", True), ("255_{10}=FF_{16}", "FF_{16}", True),
    ("15=1111_2", "1111_2", True), ("15_{10}=1111_2", "15", False), ("14_{10}=1111_2", "1111_2", False), ("254_{10}=FF_{16}", "FF_{16}", False),
    # values without their names
    ("7, 5", "AB=5, BC=7", False), ("5, 7", "AB=5, BC=7", True), ("BC=7, AB=5", "AB=5, BC=7", True),
    ("7, 5", "a_1=5, a_2=7", False), ("7, 5", "f(1)=5, f(2)=7", False), ("7, 5", "x'=5, y'=7", False),
    ("7, 5", "\\text{boys}=5, \\text{girls}=7", False), ("7, 5", "5 \\text{ boys}, 7 \\text{ girls}", False),
    ("5, 7", "5 \\text{ boys}, 7 \\text{ girls}", True), ("7 girls, 5 boys", "5 \\text{ boys}, 7 \\text{ girls}", True),
    ("7, 5", "5 cm, 7 cm", True), ("7, 5", "x_1=5, x_2=7", True), ("7, 5", "\\lambda_1=5, \\lambda_2=7", True),
    ("7, 5", "t_1=5, t_2=7", True), ("7, 5", "k_1=5, k_2=7", True), ("7, 5", "\\theta_1=5, \\theta_2=7", True), ("7, 6", "t_1=5, t_2=7", False),
    ("7, 5", "\\text{x-intercept}=5, \\text{y-intercept}=7", False), ("7, 5", "f(-1)=5, f(1)=7", False),
    ("7, 5", "a_{n-1}=5, a_{n+1}=7", False), ("5, 3", "-x=3, y=5", False), ("5, 4", "2\\theta=4, \\alpha=5", False),
    ("1, 4", "\\sigma^2=4, \\mu=1", False),
    # lists of equations, which have no names
    ("y=x+2, y=2-x", "x+y-2=0, x-y+2=0", True), ("y=-2x, y=2x", "2x-y=0, 2x+y=0", True), ("y=3, y=2x", "2x-y=0, y-3=0", True),
    ("y=x+2, y=3-x", "x+y-2=0, x-y+2=0", False), ("y=-2x, y=3x", "2x-y=0, 2x+y=0", False),
    # words after a number
    ("0.3 \\text{ repeating}", "0.3", False), ("0.3\\text{ (recurring)}", "0.3", False), ("5 mil", "5", False), ("5 grand", "5", False),
    ("5\\text{ k}", "5", False), ("5\\text{ k dollars}", "5", False), ("5 kilo", "5", False), ("5\\text{ permille}", "5", False),
    ("5\\text{ ppm}", "5\\%", False), ("5\\text{ ppb}", "5", False), ("5\\text{ k}\\Omega", "5", True), ("300\\text{ K}", "300", True),
    # notations that algebra misreads
    ("|z|^2", "z^2", False), ("\\lvert z\\rvert^2", "z^2", False), ("|zx|", "|xz|", True), ("|x|^2", "x^2", True),
    ("f^{-1}(x)", "\\frac{1}{f(x)}", False), ("f^{-1}(x)=\\frac{x-1}{2}", "\\frac{x-1}{2}", True), ("x^{-1}(x+1)", "\\frac{x+1}{x}", True),
    ("\\nabla\\cdot F", "\\nabla\\times F", False), ("\\triangle ACB", "\\triangle ABC", False),
    ("VI", "IV", False), ("P=VI", "P=IV", True), ("\\text{I and II}", "\\text{I, II}", True), ("\\text{I and II}", "I, II", True),
    ("\\text{I and III}", "\\text{I, II}", False), ("\\text{I or II}", "\\text{I and II}", False),
    # numbers side by side, of which math-verify makes mixed numbers, and functions
    ("x+2(3)", "x+6", True), ("x+2(3)", "x+5", False), ("x-2(1/2)", "x-1", True), ("x-2(1/2)", "x-\\frac{5}{2}", False),
    ("x+2(3)(4)(5)", "x+120", True), ("x+2[3]", "x+6", True), ("x+2((3))", "x+6", True), ("x+2\\left(3\\right)", "x+6", True),
    ("(x+1)(3)(2)", "6x+6", True), ("(x+1)(3)(2)", "5x+5", False), ("x+(-3)(2)", "x-6", True), ("x+(-3)(2)", "x-5", False),
    ("x+(2)3", "x+6", True), ("x+(3)\\frac{1}{2}", "x+\\frac{3}{2}", True), ("x+3(\\frac12)", "x+\\frac32", True),
    ("x+\\frac{4}{2}(3)", "x+6", True), ("x+\\frac{4}{2}\\frac{6}{2}", "x+6", True), ("x+\\frac{4}{2}\\frac{6}{2}", "x+5", False),
    ("\\sqrt{2(3)}", "\\sqrt6", True), ("\\sqrt{2(3)}", "\\sqrt5", False), ("e^{2(3)}", "e^6", True), ("e^{(2)(3)}", "e^5", False),
    ("\\frac{5!}{2!(3)(2)}", "10", True), ("\\frac{5!}{2!(3)(2)}", "12", False), ("\\frac{5!}{2!(2)(5)}", "\\frac{60}{7}", False),
    ("x+2\\frac12", "x+\\frac52", True), ("x+2\\frac12", "x+1", False), ("x+2\\frac{1}{2}\\frac{1}{3}", "x+\\frac13", True),
    ("x+2 3", "x+5", False), ("x+2 3", "x+6", False), ("e^0(3)x", "3x", True), ("x+(6/2)(2)", "x+6", True), ("x+[2](3)", "x+6", True),
    ("\\frac{\\binom{4}{2}\\binom{3}{1}}{\\binom{7}{3}}", "\\frac{18}{35}", True),
    ("\\frac{\\binom{4}{2}\\binom{3}{1}}{\\binom{7}{3}}", "\\frac{9}{35}", False), ("x+13\\binom42", "x+78", True),
    ("\\binom{3}{1}\\frac{1}{3}\\left(\\frac{2}{3}\\right)^2", "\\frac49", True), ("\\binom{5}{2}\\frac{1}{32}", "\\frac{5}{16}", True),
    ("\\binom{3}{1}\\frac{1}{3}\\left(\\frac{2}{3}\\right)^2", "\\frac{40}{27}", False), ("\\Gamma(2)(3)", "3\\Gamma(2)", True),
    ("2\\frac12x", "\\frac{5x}{2}", True), ("2\\frac12x", "x", False), ("2\\frac12\\pi", "\\frac{5\\pi}{2}", True),
    ("2\\frac12\\frac13x", "\\frac{x}{3}", True), ("2\\frac12(3)x", "3x", True), ("2\\frac62x", "6x", True), ("-2\\frac12x", "-\\frac{5x}{2}", True),
    ("\\frac{d}{dx}(x^2)(3)", "6x", False), ("3\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}3\\\\6\\end{pmatrix}", True),
    ("22\\frac12^\\circ+\\alpha", "22.5^\\circ+\\alpha", True), ("22\\frac12^\\circ+\\alpha", "11^\\circ+\\alpha", False),
    ("{3}\\frac{1}{2}+x", "3.5+x", True), ("2\\frac12(2x+1)", "5x+\\frac52", True), ("2\\frac12(2x+1)", "2x+1", False),
    ("1\\frac12\\frac{x}{3}", "\\frac{x}{2}", True), ("2\\frac12\\left(\\frac13\\right)^2x", "\\frac{x}{9}", True),
    ("2\\frac12 3^2x", "9x", True), ("2\\frac22x", "2x", True),
    ("n\\equiv 0\\ (6)", "n\\equiv 0\\ (4)", False), ("n\\equiv 1\\ (6)", "n\\equiv 1\\pmod 6", True), ("n\\equiv 1 (6)", "n\\equiv 2(3)", False),
    ("n\\equiv 1\\quad(6)", "n\\equiv 1\\pmod 6", True), ("y\\equiv x^2(6)", "y\\equiv x^2\\pmod 6", False),
    ("\\pi(3)^2", "9\\pi", True), ("\\frac13\\pi(3)^2(4)", "12\\pi", True), ("\\pi(3)", "\\pi+3", False),
    ("x+\\log_2(8)", "x+3", True), ("x+\\log_{\\frac12}(8)", "x-3", True),
    ("x\\sin^2(3)", "x\\sin^2 3", True), ("x\\log_{2}(8)", "3x", True), ("x+0.5(2)", "x+1", True),
    # the case of letters in a formula
    ("G(m-M)", "G(M-m)", False), ("GM-Gm", "G(M-m)", True), ("VR-Vr", "Vr-VR", False), ("f(b)-f(a)", "F(b)-F(a)", False),
    # one side of an equation that has no name
    ("0", "y''+y=0", False), ("y=-y''", "y''+y=0", True), ("1", "|x|+|y|=1", False), ("|y|+|x|=1", "|x|+|y|=1", True),
    # powers with the exponent of a year
    ("\\frac{1}{3}(4^{2023}-1)", "\\frac{4^{2023}-1}{3}", True), ("\\frac{2^{2024}-2}{2}", "2^{2023}-1", True),
    ("2^{2023}-2", "2^{2023}-1", False), ("\\frac{4^{2024}-1}{3}", "\\frac{4^{2023}-1}{3}", False), ("1", "1-\\frac{1}{2^{2023}}", False),
]
# fmt: on


@pytest.mark.parametrize(("answer", "reference", "is_right"), LEFT_TO_DO)
def test_an_answer_that_is_not_finished_or_means_something_else_is_refused(
    answer: str, reference: str, is_right: bool
) -> None:
    assert judge(answer, reference) is is_right
