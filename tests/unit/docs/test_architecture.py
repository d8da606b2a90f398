"""`docs/architecture.md`: each path on it exists, and each package is on it."""

import re

from tests.support.checkout import ROOT
from tests.unit.test_house import PACKAGES

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_each_path_on_the_page_exists() -> None:
    words = set(re.findall(r"`([a-z_]+/[a-z_/.]*)`", PAGE))
    paths = {word for word in words if word.split("/")[0] in PACKAGES}
    assert "storage/weights/delta_applier.py" in paths
    assert sorted(path for path in paths if not (ROOT / path).exists()) == []


def test_each_package_has_a_picture() -> None:
    sections = dict(re.findall(r"^### (\w+):.*?\n\n(.*?)\n", PAGE, flags=re.MULTILINE))
    assert sections.keys() == set(PACKAGES)
    assert [name for name, first in sections.items() if not first.startswith("    ")] == []


def test_each_folder_of_a_package_is_on_the_page() -> None:
    section = dict(re.findall(r"^### (\w+):(.*?)(?=^##)", PAGE, re.M | re.S))
    missing = [
        f"{package}/{folder.name}"
        for package in PACKAGES
        for folder in (ROOT / package).iterdir()
        if (folder / "__init__.py").exists() and folder.name not in section[package]
    ]
    assert missing == []


def test_each_link_leads_to_a_page() -> None:
    links = re.findall(r"\]\(([\w/.-]+\.md)", PAGE)
    assert "extending/losses.md" in links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
