"""The rollout engine's contract: tokens in, tokens and log-probabilities out, every token stamped
with its weights version.

An engine knows nothing of text, prompts, rewards or the store. Whoever calls it hands it token ids
and, now and then, new weights. `docs/rollout_engine.md` states the same contract for an engine
written in another language; the suite in `tests/contract/test_rollout_engine.py` holds every engine
to it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollout.config import EngineConfig
from storage.import_path import PluginKind, resolve
from storage.records.rollouts import FinishReason
from storage.records.types import Float32, Int32, Json
from storage.records.weights import HostTensor

NO_VERSION = -1
"""What `Engine.version` says before the first weights were loaded."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are drawn. Example:
    `SamplingParams(temperature=0.8, stop_ids=(2,), seed=7)`.

    The order is temperature, then top-k, then top-p over what top-k left; log-probabilities are
    those of the distribution that remains, renormalised.
    """

    temperature: float = 1.0
    """0 is greedy: the likeliest token, with log-probability 0."""
    top_p: float = 1.0
    """In (0, 1]: keep the smallest set of likeliest tokens whose probability reaches it; 1 turns it
    off.
    """
    top_k: int = 0
    """Keep so many likeliest tokens; 0 turns it off."""
    max_new_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    """Generation ends after any of these; the stop token is part of the output."""
    seed: int = 0
    """Every random number of the request derives from it; what else the engine is doing changes
    nothing.
    """

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(
                f"sampling.temperature is {self.temperature}; it must be 0 (greedy) or more"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.top_k < 0:
            raise ValueError(f"sampling.top_k is {self.top_k}; it must be 0 (off) or more")
        if self.max_new_tokens < 1:
            raise ValueError(
                f"sampling.max_new_tokens is {self.max_new_tokens}; it must be 1 or more"
            )


@dataclass(frozen=True)
class VersionSpan:
    """Tokens `start` to `end` (exclusive) of a generation were sampled by `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Generation:
    """The answer to one request. Three tokens, the weights swapped after the first:

    Generation(tokens [40, 41, 2], logprobs [-0.2, -1.1, -0.1], spans (VersionSpan(4, 0, 1),
    VersionSpan(5, 1, 3)), "stop")
    """

    tokens: Int32
    """[N] what was sampled, a final stop token included; the prompt is not repeated. Empty only
    with `abort`.
    """
    logprobs: Float32
    """[N] natural log-probability of each token under the distribution it was drawn from."""
    spans: tuple[VersionSpan, ...]
    """Cover 0 to N without gap or overlap, none empty."""
    finish_reason: FinishReason
    """`stop`: a stop id; `length`: `max_new_tokens` or the longest context; `abort`: the engine was
    closed.
    """


class Engine(Protocol):
    """Generates for many requests at once while its weights move on."""

    @property
    def version(self) -> int:
        """The version that samples the next token; NO_VERSION before the first `load`."""

    def capacity(self) -> int:
        """Requests decoded together; more may be outstanding, they wait their turn."""

    def digest(self, version: int) -> str:
        """`weights_digest` of the tensors that were loaded as `version`; KeyError for a version
        never loaded.
        """

    async def generate(self, tokens: Sequence[int], sampling: SamplingParams) -> Generation:
        """Continue `tokens` [L]. Cancelling the await frees the request's place.

        Raises ConfigError when the prompt is empty, holds an unknown id or leaves no room in the
        longest context, when a stop id is no token, or when no weights were loaded yet;
        EngineFailedError when the engine broke or was closed.
        """

    async def load(self, version: int, tensors: Mapping[str, HostTensor]) -> None:
        """Swap in `tensors` (Hugging Face parameter names) between two tokens; running requests go
        on with their context.

        Returns once `version` samples. Raises ConfigError when the tensors do not fit the model,
        ValueError when `version` is older than the one held (the same version with the same digest
        is accepted and changes nothing).
        """

    async def close(self) -> None:
        """End what runs with `finish_reason="abort"` and free everything. May be called twice."""


class EngineFailedError(RuntimeError):
    """The engine can answer no request any more; the message names the first cause, which is
    chained to it.
    """


class MakesEngine(Protocol):
    def __call__(self, config: EngineConfig, model_config: Json) -> Engine:
        """Build an engine without weights; ConfigError when it cannot run this model or this
        configuration.
        """


ENGINES: dict[str, MakesEngine | str] = {"torch": "rollout.engines.torch.engine:TorchRolloutEngine"}
"""Built-in engines by import path, so that torch is imported only by those who use it."""


ENGINE = PluginKind(
    "rollout engine", Engine, "docs/rollout_engine.md", made_with=("config", "model_config")
)


def make_engine(config: EngineConfig, model_config: Json) -> Engine:
    """The engine that `config.name` names, for the model whose Hugging Face `config.json` holds
    `model_config`.
    """
    return resolve(config.name, ENGINES, ENGINE, "rollout.engine.name")(config, model_config)
