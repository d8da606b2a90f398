"""Prompts from outside of AstraFlow, by import path (`docs/extending/sources.md`)."""

from collections.abc import Mapping
from functools import partial
from numbers import Integral
from typing import Any, Final, Protocol

from data_ops.prompts.source import GENERATED_MAX, Generated
from data_ops.prompts.stream import PromptStream
from storage.errors import ConfigError
from storage.import_path import PluginKind, construct, find_class, foreign_code
from storage.records.rollouts import Prompt
from storage.run import orders


class IndexedPrompts(Protocol):
    """Prompts by their number. The same arguments must always give the same prompts."""

    def size(self) -> int | None:
        """Return how many prompts there are; None for an endless source."""

    def prompt(self, index: int) -> Prompt:
        """Return prompt `index`, from 0, with an id that no other prompt of the source has."""


PROMPTS: Final = PluginKind("source of prompts", IndexedPrompts, "docs/extending/sources.md")


class CustomPrompts(Generated):
    """`prompts: {custom: "my_package.my_module:MyPrompts", args: {level: 3}}`."""

    custom: str
    """Import path `package.module:Name` of the class."""
    args: dict[str, Any] = {}
    """Passed to its constructor."""

    def stream(self) -> PromptStream:
        """Import the class and return a stream of its prompts. Raises ConfigError where that is
        impossible.
        """
        keys = "prompts.custom", "prompts.args"
        source: IndexedPrompts = construct(self.find, self.custom, self.args, keys)
        sizes = [size for size in (self.limit, self._size(source)) if size is not None]
        return PromptStream(partial(self._prompt, source), min(sizes, default=None), self.seed)

    def _size(self, source: IndexedPrompts) -> int | None:
        with foreign_code(f"prompts.custom: size() of {self.custom}"):
            size: Any = source.size()
        if size is None:
            return None
        if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
            raise ConfigError(
                f"prompts.custom: size() of {self.custom} returned {size!r}; it must return the "
                "number of prompts, at least 1, or None for an endless source"
            )
        count = int(size)
        if self.limit is None and count > GENERATED_MAX:
            raise ConfigError(
                f"prompts.custom: size() of {self.custom} returned {count:,}, more than "
                f"{GENERATED_MAX:,}; set prompts.limit to at most that, or return None, for an "
                "endless source that is not shuffled"
            )
        return count

    def _prompt(self, source: IndexedPrompts, index: int) -> Prompt:
        with foreign_code(f"prompts.custom: prompt({index}) of {self.custom}"):
            prompt: Any = source.prompt(index)
            if isinstance(prompt, Prompt) and isinstance(prompt.fields, Mapping):
                prompt = Prompt(prompt.id, dict(prompt.fields))  # it may compute its values
        if not isinstance(prompt, Prompt):
            fault = f"a {type(prompt).__name__}"
        elif not isinstance(prompt.id, str) or not isinstance(prompt.fields, Mapping):
            fault = (
                f"a Prompt with a {type(prompt.id).__name__} as id and a "
                f"{type(prompt.fields).__name__} as fields"
            )
        elif unstorable := orders.fault_of(prompt):
            raise ConfigError(
                f"prompts.custom: prompt({index}) of {self.custom} cannot be stored: {unstorable}; "
                "correct the source"
            )
        else:
            return prompt
        raise ConfigError(
            f"prompts.custom: prompt({index}) of {self.custom} returned {fault}; it must return a "
            "Prompt, with text as id and a dict as fields"
        )

    def find(self) -> Any:
        """Import the class and check it without making an object.

        Raises ConfigError when it is not a source of prompts, or takes other arguments than `args`.
        """
        return find_class(self.custom, PROMPTS, self.args)
