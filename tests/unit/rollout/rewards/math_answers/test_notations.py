"""Answers in many notations, by reference answer: equal ones and similar different ones."""

import pytest

from rollout.rewards.math_judge import judge

# fmt: off
TABLE: dict[str, tuple[list[str], list[str]]] = {
    # reference: (right answers, wrong answers)
    # derivatives: a separate unknown, never 0
    "m \\frac{d v}{d t}+b v=f": (
        ["m dv/dt = f - bv", "m\\frac{dv}{dt}+bv=f", "m\\dfrac{dv}{dt} + bv = f", "bv+m\\frac{dv}{dt}=f"],
        ["\\frac{dv}{dt}+bv=f", "bv=f"],
    ),
    "bv + m\\frac{dv}{dt}=f": ([], ["b v = f"]),
    "\\frac{d x}{d t}=k x-a": (
        ["\\frac{dx}{dt}=kx-a"],
        ["\\frac{dx}{dt}=-kx+a", "\\frac{dy}{dt}=kx-a", "0=kx-a", "kx=a", "2\\frac{dx}{dt}=kx-a", "\\frac{dx}{dt}=kx+a"],
    ),
    "I \\frac{d \\omega}{d t}+2 B \\omega=T": (
        ["I\\frac{d\\omega}{dt}+2B\\omega=T", "I\\frac{d\\omega}{dt}=T-2B\\omega"],
        ["2B\\omega=T", "J\\frac{d\\omega}{dt}+2B\\omega=T", "I\\frac{d\\omega}{dt}+B\\omega=T"],
    ),
    "\\frac{d^{2} v_{o}}{d t^{2}}+\\frac{v_{o}}{L C}=\\frac{v_{i}}{L C}": (
        ["\\frac{d^2v_o}{dt^2}+\\frac{v_o}{LC}=\\frac{v_i}{LC}"],
        [
            "\\frac{v_o}{LC}=\\frac{v_i}{LC}", "\\frac{dv_o}{dt}+\\frac{v_o}{LC}=\\frac{v_i}{LC}",
            "\\frac{d^2 v_o}{dt^2}-\\frac{v_o}{LC}=\\frac{v_i}{LC}",
        ],
    ),
    "\\frac{dv}{dt}": ([], ["0", "\\frac{dx}{dt}"]),
    "1": (["0.999...", "100\\%"], ["\\{\\{1\\}\\}", "\\frac{dx}{dt}+1", "1 hour and 30 minutes"]),
    "y": ([], ["\\frac{dy}{dx}+y", "\\bm{x}"]),
    "\\frac{dx}{dy}": ([], ["\\frac{dy}{dx}"]),
    "\\frac{\\partial v}{\\partial x}": ([], ["\\frac{\\partial u}{\\partial x}"]),
    "x^{\\prime}+\\frac{r}{V} x-r c=0": (
        ["x'+\\frac{r}{V}x-rc=0", "x'+\\frac{r}{V}x=rc"],
        ["x'+\\frac{r}{V}x+rc=0", "x''+\\frac{r}{V}x-rc=0"],
    ),
    "y^{\\prime}+r y-r x(t)=0": (["y'+ry=rx(t)"], ["y'-ry-rx(t)=0"]),
    "x+ry'": ([], ["x'+ry"]),
    "x+rx'": ([], ["x'+rx"]),
    "y^4+y=0": ([], ["y^{(4)}+y=0"]),
    "\\frac{dv}{dt}=a": (["dv/dt=a", "\\frac{\\mathrm{d}v}{\\mathrm{d}t}=a"], ["v/t=a"]),
    "\\frac{d}{dx}y": ([], ["0"]),
    "\\sin x": (["sin(x)"], ["\\frac{d}{dx}\\sin x", "cos(x)"]),
    "m l \\ddot{\\theta}(t)-m g \\sin \\theta(t)=f(t) \\cos \\theta(t)": (
        ["m l \\ddot\\theta(t)-m g \\sin\\theta(t)=f(t)\\cos\\theta(t)"],
        ["m l \\dot\\theta(t)-m g \\sin\\theta(t)=f(t)\\cos\\theta(t)"],
    ),
    "(gf)'": ([], ["(fg)'"]),
    # sets of sets
    "\\{1,\\{2\\}\\}": (["\\{1,\\{2\\}\\}", "\\{\\{2\\},1\\}"], ["\\{1,2\\}", "\\{\\{1\\},2\\}"]),
    "\\{1,2\\}": ([], ["\\{1,\\{2\\}\\}", "\\{\\{1,2\\}\\}", "\\{\\{1\\},\\{2\\}\\}"]),
    "\\emptyset": (["\\{\\}", "\\varnothing", "∅"], ["\\{\\emptyset\\}"]),
    "\\{\\emptyset\\}": (["\\{\\{\\}\\}"], ["\\emptyset"]),
    "\\{\\}": (["\\emptyset"], ["\\{\\{\\}\\}", "\\{0\\}"]),
    "\\{\\emptyset,1\\}": ([], ["\\{\\emptyset,\\{1\\}\\}"]),
    "\\{\\{5\\}\\}": ([], ["\\{5\\}"]),
    "1,2,3": (["1, 2 \\text{, and } 3", "\\{1,2,3\\}", "1, 2, and 3", "1;2;3"], []),
    "\\{\\{1,2\\},3\\}": ([], ["\\{\\{1,2\\},\\{3\\}\\}"]),
    "1,2": ([], ["\\{1\\},\\{2\\}"]),
    # a set of one tuple, and a tuple in two pairs of brackets
    "\\{(1,2)\\}": (
        ["\\{(1,2)\\}", "(1,2)", "((1,2))", "\\left\\{\\left(\\frac22,2\\right)\\right\\}"],
        ["\\{(2,1)\\}", "(2,1)", "((2,1))", "\\{1,2\\}"],
    ),
    "((3,1))": (["(3,1)", "\\{(3,1)\\}"], ["(1,3)", "\\{(1,3)\\}", "\\{1,3\\}"]),
    # points, names and values
    "(1,2)": (
        ["\\textbf{(B) }(1,2)", "y=2,x=1", "((1,2))"],
        ["(1{,}2)", "y=1,x=2", "b=1,a=2", "(a,b)=(2,1)", "1<x<2<y", "(1|2)"],
    ),
    "E_{1},E_{2}": (["E_1, E_2", "E_2, E_1"], ["E_1"]),
    "(x,y)=(1,2)": (["y=2,x=1", "(y,x)=(2,1)", "x=1,y=2"], ["(y,x)=(1,2)", "(x,y)=(2,1)"]),
    "x=1,y=2": (["1,2"], ["2,1", "\\{1,2\\}", "(2,1)", "a=1,b=2"]),
    # words and products of letters
    "listen": ([], ["silent"]),
    "stop": (["Stop"], ["pots", "spot"]),
    "even": (["Even"], ["veen"]),
    "yes": (["Yes."], ["sye", "yes, because"]),
    "abc": (["cba", "bac", "bc a"], ["abd", "\\text{cba}"]),
    "ABC": ([], ["CBA", "acb"]),
    "nRT": (["RTn"], []),
    "\\text{abc}": ([], ["cba", "\\text{cba}"]),
    # inequalities
    "(1,3)": (["x>1 \\text{ and } x<3", "x>1, x<3", "\\{x\\mid 1<x<3\\}", "3>x>1"], ["3\\geq x\\geq1", "3<x<1"]),
    "(3,1)": ([], ["3>x>1"]),
    "1<x<3": (["3>x>1", "x>1 \\text{ and } x<3"], []),
    "3>x>1": (["1<x<3", "(1,3)"], ["(3,1)"]),
    "[1,3]": (
        ["x\\ge1 \\text{ and } x\\le3", "x\\le3 \\text{ and } x\\ge1", "3\\geq x\\geq1"],
        ["x\\ge1 \\text{ or } x\\le3", "x>1 \\text{ and } x<3"],
    ),
    "(-\\infty,1)\\cup(3,\\infty)": (
        ["x<1 \\text{ or } x>3", "x>3 \\text{ or } x<1", "x<1, x>3"],
        ["x<1 \\text{ and } x>3", "x\\le1 \\text{ or } x>3", "x>1, x<3"],
    ),
    "x<1 \\text{ or } x>3": (["(-\\infty,1)\\cup(3,\\infty)"], []),
    "(0.75,0.5)": ([], ["\\frac12<x<\\frac34"]),
    "(a,b)": (["a<x<b", "b>x>a"], []),
    "x\\ne 3": (["x \\not= 3"], []),
    "x\\ge1 \\text{ and } x\\le3": (["[1, 3]"], ["[1, 3)", "x \\ge 1"]),
    "(-1,2]": (["]-1,2]", "(-1, 2]"], []),
    "[-1,2)": (["[-1,2["], ["(-1, 2]"]),
    "(-1,2)": (["]-1,2[", "\\left]-1,2\\right["], []),
    "(1,2)\\cup(3,4)": (["(1,2) U (3,4)", "(1,2)∪(3,4)"], ["(1,2)\\text{ or }(3,4)"]),
    "(3,\\infty)": (["\\{x: x>3\\}", "\\{x \\mid x>3\\}", "x\\gt3"], ["\\{x \\mid x<3\\}"]),
    "18": (
        [
            "US\\$18", "\\$18/hour", "\\textcolor{red}{18}", "\\color{red}18", "\\color{red}{18}", "\\Large 18",
            "\\hspace{2pt}18", "\\bold{18}", "\\bm{18}", "\\boldsymbol{18}", "18\u200b", "\ufeff18", "18\\newline", "18/day",
            "18/dollars", "18 USD", "\\$18.00",
        ],
        ["\\$18.5"],
    ),
    "[1,y)": (["1\\le x<y"], []),
    "(-\\infty,-\\sqrt2)\\cup(\\sqrt2,\\infty)": (["x<-\\sqrt2\\text{ or }x>\\sqrt2"], ["x<\\sqrt2\\text{ or }x>-\\sqrt2"]),
    "(1,3)\\cup(5,7)": (
        ["1<x<3\\text{ or }5<x<7", "x\\in(1,3)\\text{ or }x\\in(5,7)"],
        ["1<x<3\\text{ and }5<x<7", "1<x<3,\\ 5<x<7"],
    ),
    "[2,\\infty)": (["\\{x\\in\\mathbb{R}: x\\ge 2\\}"], ["\\{x\\in\\mathbb{Z}: x\\ge 2\\}"]),
    "x\\in[0,1]": ([], ["y\\in[0,1]"]),
    # parts of a whole, units
    "\\frac34": (
        ["\\frac34\\text{ of an hour}", "\\frac34 of an hour", "3/4 of a mile"],
        ["\\frac12\\text{ of an hour}", "\\frac34\\text{ of }12", "\\frac34\\text{ of half}"],
    ),
    "\\frac34\\text{ hour}": (["\\frac34\\text{ of an hour}"], []),
    "\\frac34\\text{ of an hour}": (["\\frac34"], []),
    "20\\%": (["20% of the people"], []),
    "5 km": (["5000 m"], []),
    "5\\text{ m}": (["500 cm", "5\\text{ meters}", "5 m^2", "5 minutes"], ["5 cm"]),
    "5\\text{ g}": (["0.005 kg"], ["5 kg"]),
    "5\\text{ km}": (["5"], ["5 m"]),
    "120\\text{ minutes}": (["2 hours"], []),
    "2\\text{ minutes}": ([], ["2 hours"]),
    "2\\text{ hours}": (["120 minutes"], []),
    "3\\text{ cm}^2": ([], ["3\\text{ m}^2"]),
    "3\\text{ m}^2": (["30000\\text{ cm}^2"], ["300\\text{ cm}^2"]),
    "5\\text{ m/s}": (["5\\text{ metres per second}"], ["5\\text{ km/h}"]),
    "5\\text{ cents}": (["5 cents"], ["5 dollars"]),
    "2.5\\text{ L}": ([], ["2.5 mL"]),
    "4": (["4 weeks", "f(2)=4"], ["12_2", "4 dozen"]),
    "48": (["4 dozen"], ["5 dozen"]),
    "2": (["2 of a kind", "log(100)", "\\log 100", "\\sqrt[4]{16}"], ["2 feet 3 inches"]),
    "\\frac12": (["1⁄2", "(A)\\frac12", "1∕2"], ["half of an hour"]),
    "\\pi": (["math.pi", "3.141593"], ["3.1416", "3.141594"]),
    "5\\text{ nm}": ([], ["5 mm"]),
    "10\\text{ m/s}": (["36 km/h"], []),
    "36\\text{ km/h}": (["10 m/s"], []),
    "7\\text{ days}": (["1 week"], []),
    "1\\text{ week}": (["7 days"], ["7"]),
    "12\\text{ months}": (["1 year"], []),
    "1\\text{ month}": ([], ["1 year"]),
    "90\\text{ min}": (["1.5 hours"], []),
    "1.5\\text{ min}": ([], ["1.5 hours"]),
    "24\\text{ eggs}": (["2 dozen"], []),
    "2\\sqrt3\\text{ m}": ([], ["2\\sqrt3\\text{ cm}"]),
    "50\\text{ cm}": (["\\frac12\\text{ m}"], []),
    "432\\text{ in}^2": (["3 ft^2"], []),
    "16\\text{ oz}": (["1 lb"], []),
    "45\\text{ minutes}": (["\\frac34\\text{ of an hour}"], []),
    "60": (["60 of the students"], []),
    "1\\text{ in}": (["2.54 cm"], []),
    # digits: thousands, bases, decimals
    "10,800": ([], ["10, 800"]),
    "1,600": (["１，６００", "1，600", "\\$1{,}600.00"], ["1, 600"]),
    "1110001_2": (["1110001_{two}", "1110001_{\\text{two}}", "(1110001)_2", "1110001", "1{,}110{,}001_2"], ["11100012"]),
    "255": (["255_{10}"], ["FF_{16}"]),
    "FF_{16}": (["(FF)_{16}"], []),
    "190_9": ([], ["189_9"]),
    "\\frac17": (["0.142857", "0.\\overline{142857}"], ["0.142858", "0.14286"]),
    "\\frac13": (["0.\\dot{3}", "0.3\\dot{3}", "0.333\\ldots", "0.333...", "0.333…"], ["0.333334", "0.3...", "0.(3)"]),
    "64": ([], ["2^2^3"]),
    "\\frac16": (["0.1666..."], ["0.166..."]),
    "\\sqrt2": (["np.sqrt(2)", "1.414214", "1.414213"], ["1.414215"]),
    "17": ([], ["19_8"]),
    "32": ([], ["1G_{16}"]),
    "171": ([], ["AB_{16}"]),
    "101_2": (["101_{\\text{two}}"], ["101_{three}"]),
    "1,200": ([], ["1, 200"]),
    "1,200,300": ([], ["1, 200, 300"]),
    "1,5": ([], ["1{,}5"]),
    # choices with their content
    "27.0": (["\\textbf{(B) } 27", "\\textbf{(B)}\\ 27", "\\text{(B) }27", "(B) 27", "27"], ["\\textbf{(D)}", "B"]),
    "3159.0": (["\\textbf{(C) }3159", "3159.", "3,159"], ["\\textbf{(C) }3158"]),
    "C": (["\\textbf{(C)}\\ 12", "C) 12", "C. 12", "Option C", "\\text{Option C}", "\\text{(C) }", "\\textbf{C}"], ["12"]),
    "(C) 12": (["C"], []),
    "27": (["B) 27"], ["\\text{(B) } 28", "\\text{(B) }-27", "(F) 27"]),
    "\\text{(B) }27": (["(B)", "27"], ["28", "(C)", "\\text{(C) }27"]),
    "\\text{red}": (["\\textbf{(B) }\\text{red}", "\\text{(B) red}"], ["\\text{(B) blue}"]),
    "B": (["\\text{(B) red}"], ["(A)B"]),
    # ratios, times
    "3:30 \\text{ PM}": (["15:30", "3:30"], []),
    "3:4": (["3 to 4", "3\\text{ to }4", "3\\colon4", "0.75"], ["4 to 3", "3:4:5"]),
    "3:4:5": (["6:8:10", "-3:-4:-5"], ["6:8:11", "0:4:5"]),
    "3:30\\text{ p.m.}": (["15:30"], []),
    # other spellings
    "silent": ([], ["listen"]),
    "\\frac{3}{4}": (["3/4 of the pizza"], ["3/4 of 16"]),
    "5": (["5=\\text{Total}", "(A)5", "A. 5", "5/kg", "5_{10}"], ["(101)_2", "5_2", "5_6", "5 of 6", "5 out of 6", "5\\text{ in }6"]),
    "37": (["37 ℃", "37°C", "37^\\circ\\text{C}", "37^{\\circ}F"], []),
    "113": (["\\mathbf{(113)}", "113\\\\", "**113**", "113:", "113i^4", "p+q = 113", "\\textbf{113}", "113\\,"], []),
    "\\frac{11}{4}": (["\\nicefrac{11}{4}", "2\\frac{3}{4}", "\\frac{22}{8}", "\\frac{-11}{-4}"], []),
    "\\frac78": (["⅞"], []),
    "0.5": (["\\textbf{(B) }\\frac12", "½"], ["-½", "D.5"]),
    "np.arcsin(10/13)": (["\\arcsin(10/13)"], ["\\arccos(10/13)", "\\arcsin(13/10)"]),
    "x^2-5x+6": (["x**2-5*x+6", "(x-2)(x-3)"], ["(x-2)(x+3)", "2x^2-10x+12"]),
    "\\frac{\\sqrt3}{2}": (["√(3)/2", "√3/2", "\\cos\\frac{\\pi}{6}"], ["√(3/2)"]),
    "\\sqrt{2}": (["sqrt{2}", "sqrt(2)"], []),
    "2\\sqrt{3}": (["\\textbf{(B) }2\\sqrt3", "2sqrt(3)", "2*sqrt(3)"], []),
    "\\frac{\\pi}{2}": (["pi/2", "\\frac{π}{2}", "\\frac{\\pi}{2}\\text{ radians}"], ["90^\\circ"]),
    "2\\pi": (["2pi"], ["\\pi^2"]),
    "\\pm5": (["+/-5", "±5", "+5, -5"], []),
    "-18": (["\u201118", "\u201018", "\ufe6318", "－18"], ["—18"]),
    "300": (["3•10^2", "3 ⋅ 10²", "3∙10^2"], []),
    "Odd": (["odd"], []),
    "3x^2": (["3*x**2"], []),
    "2\\pi r": (["2*pi*r"], []),
    "\\pi r^2": (["pi*r^2"], []),
    "e^{-t}": (["exp(-t)"], ["exp(t)"]),
    # the imaginary unit
    "-2+2 \\sqrt{3} i": (["-2+2i\\sqrt{3}", "4e^{2\\pi i/3}", "2(\\sqrt3 i-1)"], ["-2-2i\\sqrt{3}", "-2+2\\sqrt{3i}"]),
    "e^{i\\theta}": (["\\cos\\theta+i\\sin\\theta"], []),
    "e^{i\\pi/4}": (["\\frac{1+i}{\\sqrt2}"], []),
    "2i": (["(1+i)^2", "\\sqrt{-4}"], []),
    "i": (["e^{i\\pi/2}", "\\sqrt{-1}"], ["-i", "\\frac{1}{i}"]),
    "-3+2i": (["i(2+3i)"], []),
    "i^2": (["-1"], []),
    "-i": (["\\frac{1}{i}", "i^3"], ["\\sqrt{-1}"]),
    # equations
    "MR=SRMC": (["SRMC=MR", "MR = SRMC"], ["SRMC", "MR=SRAC"]),
    "f(3)=4": ([], ["f(2)=4"]),
    "f(2)=4": (["4"], ["f(1)=4"]),
    "x=0": ([], ["xy=0"]),
    "x=8": (["8=x", "x=y=8"], ["2x=8", "AB=8", "8=y", "9=x"]),
    "MR=MC": (["MR=MC"], ["MC", "MR", "P=MC"]),
}
# fmt: on


@pytest.mark.parametrize("gold", TABLE)
def test_an_answer_is_right_if_and_only_if_it_means_the_reference(gold: str) -> None:
    right, wrong = TABLE[gold]
    assert [answer for answer in right if not judge(answer, gold)] == []
    assert [answer for answer in wrong if judge(answer, gold)] == []


# fmt: off
RARE: list[tuple[str, str, bool]] = [
    # (answer, reference, whether it is right)
    ("x>=2", "x\\ge2", True), ("-1 <= x <= 5", "[-1,5]", True), ("-1 <= x < 5", "[-1,5]", False), ("x != 2", "x\\ne 2", True),
    ("5!=120", "120", True), ("5!=100", "100", False), ("x<=>y", "x\\le y", False),
    ("ln(2)", "\\ln 2", True), ("ln 2", "\\ln 2", True), ("2ln 2", "\\ln 4", True), ("ln 3", "\\ln 2", False),
    ("\\begin{cases}x=1\\\\y=2\\end{cases}", "(1,2)", True), ("\\begin{cases}x=2\\\\y=1\\end{cases}", "(1,2)", False),
    ("\\begin{cases}x+y=1\\\\x-y=2\\end{cases}", "(1,2)", False),
    ("\\begin{cases}x=1,\\\\y=2\\end{cases}", "(1,2)", True), ("\\begin{cases}x&=1\\\\y&=2\\end{cases}", "x=1, y=2", True),
    ("\\begin{cases}x=2,\\\\y=1\\end{cases}", "(1,2)", False), ("\\begin{cases}x&=2\\\\y&=1\\end{cases}", "(1,2)", False),
    ("\\begin{cases}1,n=0\\\\2,n=1\\end{cases}", "\\begin{cases}2,n=0\\\\1,n=1\\end{cases}", False),
    ("\\begin{aligned}x&=5\\end{aligned}", "5", True), ("\\begin{aligned}x&=5\\\\y&=6\\end{aligned}", "5", False),
    ("\\sqrt[3]2", "\\sqrt[3]{2}", True), ("\\sqrt[3]12", "2", False), ("\\sqrt[3]{-8}", "-2", True), ("\\sqrt[3]{-8}", "2", False),
    ("\\sqrt[4]{-16}", "-2", False), ("1{\\frac34}", "1.75", True), ("\\log_2{\\frac18}", "-3", True), ("\\sfrac{1}{2}", "\\frac12", True),
    ("x_{\\max}", "x_{max}", True), ("x_{\\max}", "x_{\\min}", False),
    ("USD 18", "18", True), ("\\text{USD }18", "18", True), ("USD 18", "19", False), ("Rs. 500", "500", True), ("\\text{Rs. }500", "500", True),
    ("10\\ \\mathrm{m\\cdot s^{-1}}", "10\\text{ m/s}", True), ("10\\ \\mathrm{m\\cdot s}", "10\\text{ km s}", False),
    ("9.8\\,\\frac{\\text{m}}{\\text{s}^2}", "9.8", True), ("9.8\\,\\frac{\\text{m}}{\\text{s}}", "9.8\\text{ km/s}", False),
    ("5\\,\\text{N}\\cdot\\text{m}", "5\\text{ N m}", True), ("4.5\\,\\text{\\AA}", "4.5", True),
    ("\\mathbb{R}\\backslash\\{2\\}", "\\mathbb{R}\\setminus\\{2\\}", True),
    ("\\mathbb{R}-\\{2\\}", "(-\\infty,2)\\cup(2,\\infty)", True), ("\\mathbb{R}-\\{3\\}", "\\mathbb{R}\\setminus\\{2\\}", False),
    ("(-\\infty,-1]\\cup[1,\\infty[", "(-\\infty,-1]\\cup[1,\\infty)", True), ("]0,1]\\cup]2,3[", "[0,1]\\cup[2,3]", False),
    ("]-\\infty;1[", "(-\\infty,1)", True), ("]-\\infty;1]", "(-\\infty,1)", False),
    ("|x|<1", "-1<x<1", True), ("|x|\\le1", "-1<x<1", False), ("|x|>1", "x<-1\\text{ or }x>1", True), ("|x|>1", "(-1,1)", False),
    ("|x|<1", "-1<y<1", False), ("|x|<-1", "(1,-1)", False),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "(1,2)", True), ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "(2,1)", False),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "[1,2]", False), ("(1,2)", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", True),
    ("\\text{The answer is }5", "5", True), ("the answer is: 5", "5", True), ("the answer is not 5", "5", False),
    ("the answer is \\frac{1}{2}", "0.5", True), ("Answer: 5", "5", True), ("\\text{Answer: }5", "5", True), ("Answer: 6", "5", False),
    ("x = 1 \\lor x = 2", "1,2", True), ("x = 1 \\lor x = 3", "1,2", False), ("p\\lor q", "p,q", False),
    ("4.5\\times{10^{33}}", "4.5e33", True), ("4.5\\cdot(10^{33})", "4.5e33", True), ("4.5\\times{10^{32}}", "4.5e33", False),
    ("25\\text{\\%}", "25\\%", True), ("24\\text{ \\%}", "25\\%", False),
    ("\\mathbb R", "\\mathbb{R}", True), ("x\\in\\mathbb R", "(-\\infty,\\infty)", True), ("\\mathbb Q", "\\mathbb{R}", False),
    ("\\frac{\\lambda_{red}}{\\sqrt2}", "\\lambda_{\\text {red}} / \\sqrt{2}", True),
    ("\\frac12mv_\\text{max}^2", "\\frac{mv_{max}^2}{2}", True), ("\\frac{\\lambda_{blue}}{\\sqrt2}", "\\lambda_{\\text {red}} / \\sqrt{2}", False),
    ("\\bar x=5", "\\bar{x}=5", True), ("\\bar x", "x", False), ("\\hat p=0.4", "\\hat{p}=0.4", True), ("\\hat y=2x+1", "\\hat{y}=2x+1", True),
    ("\\vec a+2\\vec b", "\\vec{a}+2\\vec{b}", True), ("\\vec a+2\\vec b", "2\\vec{a}+\\vec{b}", False), ("3\\hat i-4\\hat j", "3\\hat{i}-4\\hat{j}", True),
    ("\\frac{\\mathbf F}{m}", "\\frac{\\mathbf{F}}{m}", True), ("\\mathcal F", "\\mathcal{F}", True), ("\\tilde x", "\\hat{x}", False),
    ("\\hat\\theta", "\\hat{\\theta}", True), ("|\\vec a|=5", "|\\vec{a}|=5", True), ("\\mathrm e^x", "e^x", True), ("\\vec pq", "\\vec{pq}", False),
    ("{n \\choose k}", "\\binom{n}{k}", True), ("{n \\choose k}", "\\binom{k}{n}", False), ("{10\\choose 3}", "\\binom{10}{3}", True), ("{10\\choose3}", "120", True),
    ("2{n+1 \\choose k_{1}}", "2\\binom{n+1}{k_1}", True), ("\\frac{{n \\choose 2}}{n}", "\\frac{\\binom n2}{n}", True), ("{n \\choose k}", "\\frac{n}{k}", False),
    ("\\frac5{18}\\%", "\\frac5{18}", False), ("1/2\\%", "\\frac12", False), ("\\frac12", "\\frac12\\%", False), ("\\frac12\\%", "0.005", True), ("0.5\\%", "0.5", True),
    ("0\\%", "0", True), ("33\\frac13\\%", "33\\frac13", True),
    ("15\\text{ dollars a day}", "15", True), ("15\\text{ a day}", "15", True), ("\\$15\\text{ a day}", "15\\text{ dollars per day}", True), ("15\\text{ dollars a day}", "15\\text{ dollars an hour}", False),
    ("60\\text{ km an hour}", "1\\text{ km a minute}", True), ("2\\text{ and a day}", "2", False), ("\\frac34\\text{ of a day}", "18\\text{ hours}", True),
]
# fmt: on


@pytest.mark.parametrize(("answer", "reference", "is_right"), RARE)
def test_a_rare_spelling_is_read_as_the_usual_one(
    answer: str, reference: str, is_right: bool
) -> None:
    assert judge(answer, reference) is is_right
