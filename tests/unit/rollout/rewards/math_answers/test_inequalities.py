import pytest

from rollout.rewards.math_answers.inequalities import PARTS_MAX, solution_set
from rollout.rewards.math_judge import judge


@pytest.mark.parametrize(
    ("text", "unknown", "intervals"),
    [
        ("1<x\\le 3", "x", "(1,3]"),
        ("3>x\\ge 1", "x", "[1,3)"),
        ("b>x>a", "x", "(a,b)"),
        ("x\\ge 4", "x", "[4,\\infty)"),
        ("4<\\theta_1", "\\theta_1", "(4,\\infty)"),
        ("x<\\sqrt{2}", "x", "(-\\infty,\\sqrt{2})"),
        ("x\\ge1\\text{ and }x<3", "x", "[1,3)"),
        ("x<3 and x\\ge1", "x", "[1,3)"),
        ("x<1\\text{ or }x>3", "x", "(-\\infty,1)\\cup(3,\\infty)"),
        ("x\\in(1,3)\\text{ or }x\\in[5,7]", "x", "(1,3)\\cup[5,7]"),
        ("x>1, x<3", "x", "(1,3)"),
        ("x<1, x>3", "x", "(-\\infty,1)\\cup(3,\\infty)"),
        ("\\{x\\mid x>3\\}", "x", "(3,\\infty)"),
        ("\\{x\\in\\mathbb{R}: x>3\\}", "x", "(3,\\infty)"),
        ("x\\ne3", "x", "(-\\infty,3)\\cup(3,\\infty)"),
        ("\\{x\\mid x\\ne3,-1\\}", "x", "(-\\infty,-1)\\cup(-1,3)\\cup(3,\\infty)"),
        ("x\\ne1,000", "x", "(-\\infty,1000)\\cup(1000,\\infty)"),
        ("x\\ne\\pm2", "x", "(-\\infty,-2)\\cup(-2,2)\\cup(2,\\infty)"),
        ("1,000<x\\le2,500,000", "x", "(1000,2500000]"),
        ("x\\ge2, x\\ne5", "x", "[2,5)\\cup(5,\\infty)"),
        ("x\\ne5, x\\ge2", "x", "[2,5)\\cup(5,\\infty)"),
        ("x>0\\text{ and }x\\ne1,000", "x", "(0,1000)\\cup(1000,\\infty)"),
        ("\\{x\\mid x\\ge2, x\\ne5\\}", "x", "[2,5)\\cup(5,\\infty)"),
        ("x\\in[2,\\infty), x\\ne5", "x", "[2,5)\\cup(5,\\infty)"),
        ("k>2, k<102, k\\ne12", "k", "(2,12)\\cup(12,102)"),
        ("0\\le x\\le5, x\\ne0,5,7", "x", "(0,5)"),
        ("|x|<3, x\\ne1", "x", "(\\frac{-3}{1},1)\\cup(1,\\frac{3}{1})"),
        ("0\\le x\\le0, x\\ne0", "x", "\\emptyset"),
        ("3<x<1", "x", "\\emptyset"),
        ("1<x\\le1", "x", "\\emptyset"),
        ("1\\le x\\le1", "x", "[1,1]"),
        (" or ".join(["x<1"] * PARTS_MAX), "x", "\\cup".join(["(-\\infty,1)"] * PARTS_MAX)),
    ],
)
def test_an_inequality_is_read_as_an_interval(text: str, unknown: str, intervals: str) -> None:
    assert solution_set(text) == (unknown, intervals)


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "1<2", "1<2<3", "x<y", "1<x>3", "1<2x<3", "1<x<2<3", "x+1>0", "e<3", "\\pi>3", "x>", "<x", "x>1 and y<3",
        "x>1 or y<3", "x>1 and x>3", "x>1 and x<3 and x<2", "x>a, x<b", "x=3", "1<x=3", "x\\ne a", "x\\ne1, y\\ne3", "x\\ne1, x=3", "x\\ne\\pm a", "x\\ne1 or x\\ne3", "(1,3)",
        "\\{x\\in\\mathbb{Z}: x>3\\}",
        "x\\ge2, y\\ne5", "x\\ge2, x=5, x\\ne7", "x<1, x>3, x\\ne5", "x<1 or x>3, x\\ne5", "x\\ge2 or x\\ne5", "x>a, x\\ne5",
        " or ".join(["x<1"] * (PARTS_MAX + 2)),
    ],
)  # fmt: skip
def test_other_text_than_an_inequality_in_one_unknown_is_not_read(text: str) -> None:
    assert solution_set(text) is None


@pytest.mark.parametrize(
    ("answer", "reference", "verdict"),
    [
        ("x\\ge2, x\\ne5", "[2,5)\\cup(5,\\infty)", True),
        ("[2,5)\\cup(5,\\infty)", "x\\ge2\\text{ and }x\\ne5", True),
        ("5>x\\ge2\\text{ or }x>5", "x\\ge2, x\\ne5", True),
        ("x>0\\text{ and }x\\ne1", "(0,1)\\cup(1,\\infty)", True),
        ("2<k<102, k\\ne12", "(2,12)\\cup(12,102)", True),
        ("x\\ge0, x\\ne0", "(0,\\infty)", True),
        ("x\\ge2, x\\ne6", "[2,5)\\cup(5,\\infty)", False),
        ("x>2, x\\ne5", "[2,5)\\cup(5,\\infty)", False),
        ("x\\ge2, y\\ne5", "[2,5)\\cup(5,\\infty)", False),
        ("x\\ge2, x\\ne5, x\\ne7", "[2,5)\\cup(5,\\infty)", False),
        ("x\\ge2", "[2,5)\\cup(5,\\infty)", False),
        ("x\\ge2\\text{ or }x\\ne5", "[2,5)\\cup(5,\\infty)", False),
        ("y>0, y\\ne1", "x>0, x\\ne1", False),
        ("x>0", "x>0, x\\ne1", False),
        ("x\\ge2\\text{ or }x\\ne5", "x\\ge2, x\\ne5", False),
        ("x\\ne2\\text{ or }x\\ne3", "x\\ne2, x\\ne3", False),
        ("x\\ne2, x\\ne3", "x\\ne2\\text{ or }x\\ne3", False),
        ("x\\ne2\\text{ or }x\\ne3", "x\\ne2\\text{ or }x\\ne3", True),
        ("x\\ne\\pm1", "(-\\infty,-1)\\cup(-1,1)\\cup(1,\\infty)", True),
        ("x\\ne1,-1", "x\\ne\\pm1", True),
        ("x>0, x\\ne\\pm1", "(0,1)\\cup(1,\\infty)", True),
        ("x\\ne\\pm1", "\\mathbb{R}\\setminus\\{1\\}", False),
        ("x\\ne\\pm1", "\\mathbb{R}\\setminus\\{-1,1\\}", True),
        ("x\\in\\mathbb{R}, x\\ne1", "(-\\infty,1)\\cup(1,\\infty)", True),
        ("y \\in \\mathbb{R}, y \\neq 1", "(-\\infty,1)\\cup(1,\\infty)", True),
        ("x\\in\\mathbb{R} \\text{ and } x\\ne1", "(-\\infty,1)\\cup(1,\\infty)", True),
        ("x\\in\\mathbb{R}, x\\ne-2, x\\ne3", "(-\\infty,-2)\\cup(-2,3)\\cup(3,\\infty)", True),
        ("x\\in\\mathbb{R}, x>0", "x>0", True),
        ("x\\in\\mathbb{R}, x\\ne-1", "(-\\infty,1)\\cup(1,\\infty)", False),
        ("x\\in\\mathbb{R}, y\\ne1", "(-\\infty,1)\\cup(1,\\infty)", False),
        ("x\\in\\mathbb{Z}, x\\ne1", "(-\\infty,1)\\cup(1,\\infty)", False),
        ("x\\in\\mathbb{R} \\text{ or } x\\ne1", "(-\\infty,1)\\cup(1,\\infty)", False),
        ("x\\in\\mathbb{R}, x\\ge0", "x>0", False),
        ("x\\in\\mathbb{Z}, x>0", "x>0", False),
        ("y\\in\\mathbb{R}, x>0", "x>0", False),
        ("x\\le1,000", "(-\\infty,1000]", True),
        ("0<x<1,000", "(0,1000)", True),
        ("x\\ge1,000", "[1000,\\infty)", True),
        ("x\\ge1,000", "[1,\\infty)", False),
    ],
)
def test_a_range_without_points_is_a_union_of_intervals(
    answer: str, reference: str, verdict: bool
) -> None:
    assert judge(answer, reference) is verdict
