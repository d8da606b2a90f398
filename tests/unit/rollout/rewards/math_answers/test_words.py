import pytest

from rollout.rewards.math_answers.words import labelled_choice, same_time, same_words


@pytest.mark.parametrize(
    ("answer", "gold", "verdict"),
    [
        ("\\text{Friday}", "friday", True),
        ("stop", "pots", False),
        ("no", "on", False),
        ("Yes.", "yes", True),
        ("\\text{No solutions}", "no solution", True),
        ("no real solution", "\\text{no real solutions}", True),
        ("\\text{solutions}", "\\text{no solutions}", False),
        ("\\text{Co}", "\\text{CO}", False),
        ("CO", "\\text{Co}", False),
        ("\\text{mg}", "\\text{Mg}", False),
        ("Mg", "\\text{Mg}", True),
        ("\\text{NAF}", "\\text{NaF}", False),
        ("\\text{NO}", "no", True),
        ("\\text{No}", "no", True),
        ("\\text{DNE}", "dne", True),
        ("YES", "\\text{Yes}", True),
        ("\\text{Red}", "red", True),
        ("abc", "cba", None),
        ("ab", "AB", None),
        ("abcd", "abdc", False),
        ("\\text{abc}", "cba", False),
        ("\\text{(B)}", "b", True),
        ("Option B", "(B)", True),
        ("\\text{choice (B)}", "C", False),
        ("a(b-c)", "ab-ac", None),
        ("well-known", "Well-known", True),
        ("mgR-mgr", "mgr-mgR", None),
        ("F(b)-F(a)", "f(b)-f(a)", None),
        ("F(x)", "f(x)", None),
    ],
)
def test_four_letters_are_a_word_and_three_can_be_a_product(
    answer: str, gold: str, verdict: bool | None
) -> None:
    assert same_words(answer, gold) is verdict


@pytest.mark.parametrize(
    ("text", "letter", "content"),
    [
        ("\\text{(B)}27", "B", "27"),
        ("\\text{(B) red}", "B", "\\text{red}"),
        ("\\text{(B) 27}", "B", "27"),
        ("(B)27", "B", "27"),
        ("B. 27", "B", "27"),
        ("B)\\frac{1}{2}", "B", "\\frac{1}{2}"),
        ("\\text{(B)}", "", "\\text{(B)}"),
        ("\\text{(A) or (B)}", "", "\\text{(A) or (B)}"),
        ("\\text{(A)}5\\text{(B)}6", "", "\\text{(A)}5\\text{(B)}6"),
        ("(A)(B)", "", "(A)(B)"),
        ("(F)27", "", "(F)27"),
        ("A(5)", "", "A(5)"),
        ("(A)-5", "", "(A)-5"),
    ],
)
def test_the_letter_before_a_choice_is_removed(text: str, letter: str, content: str) -> None:
    assert labelled_choice(text) == (letter, content)


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        ("5:30", "5:30\\text{ p.m.}", True),
        ("17:30", "5:30 PM", True),
        ("17:30", "5:30 am", False),
        ("5 pm", "5:00 PM", True),
        ("5:30", "5:30", None),
        ("17:30", "5:30", None),
        ("5", "5", None),
        ("12 AM", "0:00", True),
        ("12:30 a.m.", "00:30", True),
        ("12:30 a.m.", "12:30", True),
        ("12 PM", "0:00", False),
        ("12 AM", "12 PM", False),
    ],
)
def test_times_of_day_are_equal_without_a_contradicting_part(
    answer: str, gold: str, same: bool | None
) -> None:
    assert same_time(answer, gold) is same
