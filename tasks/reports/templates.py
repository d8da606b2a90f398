"""Templates of the HTML pages, and the texts of times in them.

`style.html.j2` is the style of all pages.
"""

import time
from pathlib import Path
from typing import Any

import jinja2

from tasks.terminal_text import plain


def template(name: str) -> jinja2.Template:
    """Return a template of this folder. It escapes text, and removes control characters."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent, encoding="utf-8"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
    )
    return environment.get_template(name)


def _shown(value: Any) -> Any:
    """Remove control characters from text and markup; jinja2 escapes the text after this."""
    return type(value)(plain(value)) if isinstance(value, str) else value


def clock_time(time_s: float) -> str:
    """Return a Unix time as text, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_s))


def duration(seconds: float) -> str:
    """Return a duration as text, such as `2 min 05 s`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes:02d} min"
        if hours
        else f"{minutes} min {seconds:02d} s"
        if minutes
        else f"{seconds} s"
    )
