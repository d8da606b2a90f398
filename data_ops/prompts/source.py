"""The settings that sources of prompts share. A source is a model with
`stream() -> PromptStream`.
"""

from pydantic import Field

from storage.config_model import Frozen, Rows, Seed


class PromptSettings(Frozen):
    """What every source has."""

    limit: Rows | None = None
    """Use only the first so many prompts."""
    seed: Seed = 0
    """Of the shuffling of every epoch, and of the generator of a built-in source."""


class Columns(PromptSettings):
    """Which columns of a row become the prompt."""

    question: str = "question"
    """Column that holds the problem."""
    answer: str = "answer"
    """Column that holds the reference answer."""
    answer_after: str | None = Field(default=None, min_length=1)
    """Keep only what follows the last occurrence of this text in the answer column (GSM8K: `####`).
    """
