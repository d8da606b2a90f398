"""Prompts that are generated: nothing is downloaded."""

from typing import Literal

from data_ops.prompts.chained_addition import problem
from data_ops.prompts.source import Generated
from data_ops.prompts.stream import PromptStream


class BuiltinPrompts(Generated):
    """`prompts: {builtin: chained_addition, split: train}`: endless and seeded."""

    builtin: Literal["chained_addition"]
    """Which generator."""
    split: Literal["train", "test"] = "train"
    """`train` or `test`; the two never share a problem."""

    def stream(self) -> PromptStream:
        """Return a stream that generates the problems."""
        return PromptStream(
            lambda index: problem(index, self.split, self.seed), self.limit, self.seed
        )
