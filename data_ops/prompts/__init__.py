"""Sources of prompts: one file for each, and the one table of them."""

from typing import Annotated, Final, TypeAlias

from pydantic import Discriminator, Tag

from data_ops.prompts.builtin import BuiltinPrompts
from data_ops.prompts.custom import CustomPrompts
from data_ops.prompts.hub import HubPrompts
from data_ops.prompts.path import FilePrompts
from data_ops.prompts.window import WindowPrompts
from storage.config_union import ByKey, variants

PromptSource: TypeAlias = Annotated[
    Annotated[BuiltinPrompts, Tag("builtin")]
    | Annotated[FilePrompts, Tag("path")]
    | Annotated[HubPrompts, Tag("hub")]
    | Annotated[WindowPrompts, Tag("window")]
    | Annotated[CustomPrompts, Tag("custom")],
    Discriminator(ByKey(("builtin", "path", "hub", "window", "custom"))),
]
"""The table: a section `prompts` selects the source by which of these keys it has."""

PROMPT_SOURCES: Final = variants(PromptSource)
"""Key → the model of its settings."""
