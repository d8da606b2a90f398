"""The console of every command: what it is given to print is text, and nothing in that text is a
command to the terminal.

Two things would be: rich's own markup (`[/]`, `[link=…]`), which is switched off, and control
characters, which are taken out of every segment after rich has laid it out. They take no columns,
so the layout stays as it is.
"""

from collections.abc import Iterable
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from tasks.terminal_text import plain


class PlainConsole(Console):
    """A rich console without markup, emoji codes and highlighting, whose text is `plain`."""

    def __init__(
        self,
        file: IO[str] | None = None,
        width: int | None = None,
        force_terminal: bool | None = None,
    ) -> None:
        super().__init__(
            file=file,
            width=width,
            force_terminal=force_terminal,
            markup=False,
            emoji=False,
            highlight=False,
        )

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else plain(text), style, control)
