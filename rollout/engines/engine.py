"""The contract of a rollout engine: tokens in; tokens, log-probabilities and weights versions out.

The caller gives it token ids and new weights; an engine has no access to text, prompts, rewards or
the store. `docs/extending/rollout_engine.md` has the contract for engines in other languages, and
every engine must pass `tests/contract/test_rollout_engine.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol, runtime_checkable

from rollout.config import EngineConfig
from storage.errors import AstraFlowError, ConfigError
from storage.import_path import PluginKind, foreign_code, resolve
from storage.records.rollouts import FinishReason
from storage.records.types import Float32, Int32, Json
from storage.records.weights import HostTensor, StoredAdapter

NO_VERSION = -1
"""`Engine.version` before the first weights are loaded."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request. Example:
    `SamplingParams(temperature=0.8, stop_ids=(2,), seed=7)`.

    Applied in the order temperature, top-k, top-p over what top-k kept. Log-probabilities are those
    of the remaining distribution, renormalised.
    """

    temperature: float = 1.0
    """0 is greedy: the likeliest token, with log-probability 0."""
    top_p: float = 1.0
    """In (0, 1]: keep the smallest set of likeliest tokens whose probability reaches it; 1: off."""
    top_k: int = 0
    """Number of likeliest tokens to keep; 0: off."""
    max_new_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    """Generation ends after any of these; the stop token is part of the output."""
    seed: int = 0
    """Determines every random number of the request, independent of concurrent requests."""

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
    """The answer to one request. Three tokens, with a weight swap after the first:

    Generation(
        tokens=[40, 41, 2],
        logprobs=[-0.2, -1.1, -0.1],
        spans=(VersionSpan(4, 0, 1), VersionSpan(5, 1, 3)),
        finish_reason="stop",
    )
    """

    tokens: Int32
    """[N] sampled tokens without the prompt, with a final stop token. Empty only for `abort`."""
    logprobs: Float32
    """[N] natural log-probability of each token under the distribution it was drawn from."""
    spans: tuple[VersionSpan, ...]
    """Cover 0 to N without gaps or overlaps; none is empty."""
    finish_reason: FinishReason
    """`stop`: a stop id; `length`: `max_new_tokens` or the longest context; `abort`: the engine was
    closed.
    """


class Engine(Protocol):
    """Generate for many concurrent requests, across changes of the weights."""

    @property
    def version(self) -> int:
        """The version that samples the next token; NO_VERSION before the first `load`."""

    def capacity(self) -> int:
        """Number of requests decoded together; further ones wait in a queue."""

    def digest(self, version: int) -> str:
        """`weights_digest` of the tensors that were loaded as `version`; KeyError for none."""

    async def generate(self, tokens: Sequence[int], sampling: SamplingParams) -> Generation:
        """Continue `tokens` [L]. Cancelling the await frees the request's slot.

        Raises:
            ContextFullError: `tokens` leave no space in the longest context.
            ConfigError: `tokens` are empty, an id is outside the vocabulary, or no weights are
                loaded yet.
            RequestRefusedError: the engine does not answer this request; others go on.
            EngineFailedError: the engine broke or was closed.
        """

    async def load(self, version: int, tensors: Mapping[str, HostTensor]) -> None:
        """Replace the weights between two tokens; running requests keep their context.

        Returns when `version` samples. The current version with the same digest changes nothing.

        Args:
            tensors: by Hugging Face parameter name.

        Raises:
            ConfigError: the tensors do not fit the model.
            ValueError: `version` is older than the current one, or has another digest.
        """

    async def close(self) -> None:
        """Abort all requests (`finish_reason="abort"`) and free all resources. Idempotent."""


@runtime_checkable
class AdapterEngine(Protocol):
    """The optional part of an engine that applies adapters itself; others get merged weights."""

    @property
    def serves_adapters(self) -> bool:
        """Whether the settings say so."""

    async def load_adapter(
        self, version: int, adapter: StoredAdapter, tensors: Mapping[str, HostTensor]
    ) -> None:
        """Do what `load` does with W, A and B of a version (`storage/formats/adapters.py`).

        Running requests keep the adapter with which they began, to their last token.
        """


@runtime_checkable
class SharingEngine(Protocol):
    """The optional part of an engine whose servers can serve several policies at once."""

    def another(self, model_config: Json) -> Engine:
        """Return an engine of another policy, with the same settings, that uses the same servers.

        ConfigError for another model. The servers end when all their engines were closed.
        """


class ContextFullError(ConfigError):
    """The longest context has no space for an answer to the tokens of a request."""


class GenerationAbortedError(RuntimeError):
    """An engine ended a request before its answer was complete."""


class RequestRefusedError(AstraFlowError):
    """An engine that works does not answer a request; the message has its reason."""


class EngineFailedError(RuntimeError):
    """The engine cannot process further requests; the message names the first cause."""


class MakesEngine(Protocol):
    def __call__(self, config: EngineConfig, model_config: Json) -> Engine:
        """Build an engine without weights; ConfigError for a model or settings it cannot run."""


ENGINES: dict[str, MakesEngine | str] = {
    "torch": "rollout.engines.torch.engine:TorchRolloutEngine",
    "sglang": "rollout.engines.sglang.engine:SglangRolloutEngine",
}
"""Built-in engines by import path, so that torch is imported only where it is used."""


ENGINE = PluginKind(
    "rollout engine",
    Engine,
    "docs/extending/rollout_engine.md",
    constructor_args=("config", "model_config"),
)


def make_engine(config: EngineConfig, model_config: Json, beside: Engine | None = None) -> Engine:
    """Build the engine that `config.name` names.

    Args:
        model_config: the model's `config.json`.
        beside: engine of another policy of the worker, whose servers it uses with `sglang.shared`.

    Raises:
        ConfigError: the name is unknown, or the class or its `capacity` is not that of an engine.
    """
    if config.sglang.shared and isinstance(beside, SharingEngine):
        return beside.another(model_config)
    engine = resolve(config.name, ENGINES, ENGINE, "rollout.engine.name")(config, model_config)
    with foreign_code(f"rollout.engine.name: capacity() of {config.name}"):
        capacity: Any = engine.capacity()
    if isinstance(capacity, bool) or not isinstance(capacity, Integral) or capacity < 1:
        raise ConfigError(
            f"rollout.engine.name: capacity() of {config.name} returned {capacity!r}; it must "
            "return the number of requests decoded together, an integer of at least 1"
        )
    return engine
