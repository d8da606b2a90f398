"""The console of every command, which prints stored text without interpreting it.

rich's markup (`[/]`, `[link=…]`) is disabled. Control characters are removed from every segment
after rich has laid it out; they have no width, so the layout does not change.
"""

from collections.abc import Iterable
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from tasks.terminal_text import plain

WIDTH = 80
"""Of a terminal whose width is not known."""


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
        if self.width < 1:  # COLUMNS=0: nothing at all would be printed
            self.width = WIDTH

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments of rich with plain text."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else plain(text), style, control)
