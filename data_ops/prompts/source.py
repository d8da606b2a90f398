"""Settings that sources of prompts share. A source is a model with `stream() -> PromptStream`."""

from typing import Annotated

from pydantic import Field

from storage.config_model import CountOrNone, Frozen, Rows, RowsOrNone, Seed

GENERATED_MAX = 10_000_000
"""Prompts of a finite source that generates them: each epoch shuffles all their numbers."""


class PromptPosition(Frozen):
    """A position in a stream of prompts, as the cursor of an order."""

    epoch: CountOrNone = 0
    """Epochs of the source that were taken."""
    position: RowsOrNone = 0
    """Prompts of the epoch that were taken."""


class PromptSettings(Frozen):
    """Settings of every source."""

    limit: Rows | None = None
    """Use only the first `limit` prompts."""
    seed: Seed = 0
    """Of the shuffling of every epoch, and of the generator of a built-in source."""


class Generated(PromptSettings):
    """Settings of a source that makes each prompt from its number."""

    limit: Annotated[Rows, Field(le=GENERATED_MAX)] | None = None
    """Use only the first `limit` prompts."""


class Columns(PromptSettings):
    """Columns of a row that become the prompt."""

    question: str = "question"
    """Column that holds the problem."""
    answer: str = "answer"
    """Column that holds the reference answer."""
    answer_after: str | None = Field(default=None, min_length=1)
    """Keep only what follows the last occurrence of this text in the answer column (GSM8K: `####`).
    """
