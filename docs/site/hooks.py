"""Changes of the pages for the site, which `mkdocs.yml` names; the pages are written for GitHub.

GitHub's Markdown continues a list item with lines that are indented like its text, by two or three
spaces, and begins the next item at any line. Python-Markdown requires four spaces, and an empty
line after an indented paragraph.
"""

import re

ITEM = re.compile(r"( *)(\d+\. |[-*] )")
FENCE = "```"
INDENT = 4


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return a page with the same lists for Python-Markdown."""
    result: list[str] = []
    width, is_code = 0, False
    for line in markdown.split("\n"):
        if line.startswith(FENCE):
            is_code = not is_code
        item = None if is_code else ITEM.match(line)
        if item and not item[1]:
            if width and result[-1].startswith(" "):
                result.append("")
            width = len(item[2])
        elif width and line.startswith(" " * width):
            line = " " * (INDENT - width) + line
        elif line:
            width = 0
        result.append(line)
    return "\n".join(result)
