import unicodedata

import pytest

from tasks.terminal_text import LINE_MAX, markdown, one_line, plain, quoted_line, visible


def test_characters_that_move_the_cursor_or_reverse_text_are_removed() -> None:
    text = "".join(map(chr, range(0x110000)))
    left = plain(text)
    assert {
        character
        for character in left
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")
    } == {"\t", "\n"}
    assert not set(left) & set(
        "\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff\U000e0041"
    )
    assert plain("αβ 🙂 ½ → \t\n e\u0301 \u200d") == "αβ 🙂 ½ → \t\n e\u0301 \u200d"


def test_characters_that_are_removed_elsewhere_can_be_made_visible() -> None:
    assert visible("a\x1b[31mb\u202ec\x9b\n\té🙂\ud800\U000e0041") == (
        "a\\x1b[31mb\\u202ec\\x9b\n\té🙂\\ud800\\ue0041"
    )
    text = "".join(map(chr, range(0x110000)))
    assert plain(visible(text)) == visible(text)


def test_a_quoted_line_is_one_line_and_unambiguous() -> None:
    assert quoted_line("a\n\t\\n\x1b") == '"a\\n\\t\\\\n\\x1b"'


def test_one_line_cannot_contain_another() -> None:
    assert one_line("done\r\nrun other: failed\n") == "done run other: failed"
    assert one_line("x" * 100_000) == "x" * LINE_MAX


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("a|b", r"a\|b"),
        ("![x](http://y)", r"\!\[x\]\(http://y\)"),
        ("<img src=x>", r"\<img src=x\>"),
        ("x\n\n# forged", r"x  \# forged"),
        ("- item", r"\- item"),
        ("1. item", r"1\. item"),
        ("tiny-1 8–9: the newest", "tiny-1 8–9: the newest"),
        ("`code` *bold* a_b ~x~ \\", r"\`code\` \*bold\* a\_b \~x\~ \\"),
    ],
)
def test_text_in_markdown_stays_text(text: str, escaped: str) -> None:
    assert markdown(text) == escaped
