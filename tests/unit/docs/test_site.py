"""The configuration of the site, without the packages that build it."""

import re
import runpy
from collections import Counter

import pytest
import yaml

from tests.support.checkout import ROOT

DOCS = ROOT / "docs"


class _Loader(yaml.SafeLoader):
    """Ignores tags of Python objects."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
CONFIG = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=_Loader)
on_page_markdown = runpy.run_path(str(DOCS / "site" / "hooks.py"))["on_page_markdown"]


def _pages(entries: object) -> list[str]:
    if isinstance(entries, str):
        return [entries]
    parts = entries.values() if isinstance(entries, dict) else entries
    return [page for part in parts for page in _pages(part)]  # type: ignore[attr-defined]


def test_each_page_is_in_the_navigation_or_in_the_list_of_decisions() -> None:
    listed = re.findall(r"\]\((\S+\.md)\)", (DOCS / "decisions" / "index.md").read_text())
    named = [*_pages(CONFIG["nav"]), *(f"decisions/{name}" for name in listed)]
    assert sorted(named) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_no_line_of_the_changelog_is_there_twice() -> None:
    lines = [line.strip() for line in (ROOT / "CHANGELOG.md").read_text().splitlines()]
    assert [line for line, count in Counter(filter(None, lines)).items() if count > 1] == []


def test_the_sections_are_those_that_readers_look_for() -> None:
    sections = [name for entry in CONFIG["nav"] for name in entry]
    assert sections == [
        *("Start", "Concepts", "Recipes", "Operate", "Extend", "Format", "Benchmarks"),
    ]


def test_each_module_of_the_api_pages_exists() -> None:
    text = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    modules = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert len(modules) > 20
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), module


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("1. a\n   b\n\n       code\n\nend", "1. a\n    b\n\n        code\n\nend"),
        ("- a\n\n  b\n", "- a\n\n    b\n"),
        ("- a\n  - b\n    c", "- a\n    - b\n      c"),
        ("1. a\n\n   b\n2. c\n3. d", "1. a\n\n    b\n\n2. c\n3. d"),
        ("text\n   b", "text\n   b"),
        ("1. a\n\nend\n   b", "1. a\n\nend\n   b"),
        ("```\n- a\n  b\n```\n  c", "```\n- a\n  b\n```\n  c"),
    ],
)
def test_items_of_lists_are_continued_with_four_spaces(page: str, expected: str) -> None:
    assert on_page_markdown(page) == expected
