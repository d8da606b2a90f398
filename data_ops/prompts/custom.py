"""Prompts from outside of AstraFlow, by import path (`docs/extending/sources.md`)."""

from typing import Any, Final, Protocol

from data_ops.prompts.source import PromptSettings
from data_ops.prompts.stream import PromptStream
from storage.errors import ConfigError
from storage.import_path import PluginKind, constructor_fault, resolve
from storage.records.rollouts import Prompt


class IndexedPrompts(Protocol):
    """Prompts by their number. The same arguments must always give the same prompts."""

    def size(self) -> int | None:
        """Return how many prompts there are; None for an endless source."""

    def prompt(self, index: int) -> Prompt:
        """Return prompt `index`, from 0, with an id that no other prompt of the source has."""


PROMPTS: Final = PluginKind("source of prompts", IndexedPrompts, "docs/extending/sources.md")


class CustomPrompts(PromptSettings):
    """`prompts: {custom: "my_package.my_module:MyPrompts", args: {level: 3}}`."""

    custom: str
    """Import path `package.module:Name` of the class."""
    args: dict[str, Any] = {}
    """Passed to its constructor."""

    def stream(self) -> PromptStream:
        """Import the class and return a stream of its prompts. Raises ConfigError where that is
        impossible.
        """
        try:
            source: IndexedPrompts = self.find()(**self.args)
        except ConfigError as error:
            raise ConfigError(f"prompts.custom: {error}") from error
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"prompts.args: {self.custom} refuses {self.args}: {error}"
            ) from error
        sizes = [size for size in (self.limit, source.size()) if size is not None]
        return PromptStream(source.prompt, min(sizes, default=None), self.seed)

    def find(self) -> Any:
        """Import the class and check it without making an object.

        Raises ConfigError when it is not a source of prompts, or takes other arguments than `args`.
        """
        source: Any = resolve(self.custom, {}, PROMPTS)
        if wrong := constructor_fault(source, PROMPTS, self.args):
            raise ConfigError(
                f"{self.custom} does not take args {self.args} ({wrong}); correct them"
            )
        return source
