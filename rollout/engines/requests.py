"""The checks of a request that are the same for every engine."""

from collections.abc import Sequence

import numpy as np

from rollout.engines.engine import ContextFullError, SamplingParams
from storage.errors import ConfigError


def checked_prompt(
    tokens: Sequence[int], sampling: SamplingParams, *, vocab: int, max_tokens: int
) -> tuple[int, ...]:
    """Return the prompt of a request that an engine can serve.

    Raises:
        ConfigError: the prompt is empty, or an id is outside the vocabulary.
        ContextFullError: the prompt leaves no space for an answer within `max_tokens`.
    """
    if len(tokens) >= max_tokens:
        raise ContextFullError(
            f"a prompt of {len(tokens)} tokens leaves no space for an answer; raise "
            f"rollout.engine.max_tokens (now {max_tokens}) or use shorter prompts"
        )
    prompt = tuple(np.asarray(tokens, dtype=np.int64).tolist())
    if not prompt:
        raise ConfigError("the prompt is empty; an engine continues at least one token")
    if not (min(prompt) >= 0 and max(prompt) < vocab):
        raise ConfigError(
            f"the prompt holds an id outside the vocabulary of {vocab}; is this the model's "
            "tokenizer?"
        )
    if not all(0 <= token < vocab for token in sampling.stop_ids):
        raise ConfigError(
            f"stop_ids {sampling.stop_ids} holds an id outside the vocabulary of {vocab}"
        )
    return prompt
