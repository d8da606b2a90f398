"""The embedded engine: continuous batching in one thread, on a CPU or a GPU.

    event loops ──generate──▶ inbox ──▶ ┌ thread ────────────────────┐ ──call_soon_threadsafe──▶
    any thread ──load: convert──▶ swap ▶ │ swap · drop · admit · step │            answers
                                         └────────────────────────────┘

Between two steps the thread processes the inbox; without work it sleeps. `batch.py` does the
batching, `decoder.py` the model.
"""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rollout.config import DTYPES, EngineConfig
from rollout.engines.engine import (
    NO_VERSION,
    EngineFailedError,
    Generation,
    RequestRefusedError,
    SamplingParams,
)
from rollout.engines.requests import checked_prompt
from rollout.engines.torch.architecture import read_architecture
from rollout.engines.torch.batch import ContinuousBatch, Request
from rollout.engines.torch.decoder import Decoder
from rollout.engines.torch.decoder_weights import DecoderWeights, fuse
from rollout.engines.torch.delivery import settle
from rollout.engines.torch.kv_cache import KVCache
from rollout.engines.torch.slots import Slots
from storage.coordination.system_threads import in_system_thread
from storage.errors import ConfigError
from storage.formats.safetensors import weights_digest
from storage.records.types import Json
from storage.records.weights import HostTensor

WAITING_MAX = 65_536
"""Requests that may wait for a slot."""

Answer = asyncio.Future[Generation]
Loaded = asyncio.Future[None]


@dataclass(frozen=True, eq=False)
class _Swap:
    version: int
    weights: DecoderWeights
    done: Loaded


@dataclass
class _Inbox:
    """Calls that arrived since the last step; guarded by the engine's condition."""

    requests: list[Request] = field(default_factory=list)
    cancelled: list[Request] = field(default_factory=list)
    swaps: list[_Swap] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.requests or self.cancelled or self.swaps)


class TorchRolloutEngine:
    """`rollout.engines.engine.Engine` by torch, within this process."""

    def __init__(self, config: EngineConfig, model_config: Json) -> None:
        """Check the model's architecture and start the thread.

        The key-value cache is allocated by the first `load`, whose weights must fit the
        architecture: a `config.json` alone does not decide how much memory is used.

        Raises:
            ConfigError: the model, device or dtype cannot run.
        """
        self._config = config
        self._architecture = read_architecture(model_config)
        self._check_context()
        self._device, self._dtype = _device(config), _dtype(config)
        self._allocation = threading.Lock()
        self._batch: ContinuousBatch | None = None
        """None before the first `load`."""
        self._arrived = threading.Condition()
        self._inbox = _Inbox()
        self._answers: dict[Request, Answer] = {}
        self._digests: dict[int, str] = {}
        self._version = NO_VERSION
        self._closing = False
        self._failure: EngineFailedError | None = None
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        return self._version

    def capacity(self) -> int:
        return self._config.max_concurrent

    def digest(self, version: int) -> str:
        return self._digests[version]

    async def generate(self, tokens: Sequence[int], sampling: SamplingParams) -> Generation:
        request = self._request(tokens, sampling)
        answer: Answer = asyncio.get_running_loop().create_future()
        with self._arrived:
            self._check_open()
            if len(self._answers) >= WAITING_MAX:
                raise ConfigError(
                    f"{WAITING_MAX} requests wait for the engine; have fewer outstanding, or more "
                    "workers"
                )
            self._answers[request] = answer
            self._inbox.requests.append(request)
            self._arrived.notify()
        try:
            return await answer
        except asyncio.CancelledError:
            with self._arrived:
                if self._answers.pop(request, None):
                    self._inbox.cancelled.append(request)
                    self._arrived.notify()
            raise

    async def load(self, version: int, tensors: Mapping[str, HostTensor]) -> None:
        digest, weights = await in_system_thread(self._convert, tensors)
        done: Loaded = asyncio.get_running_loop().create_future()
        with self._arrived:
            self._check_open()
            newest = max(self._digests, default=NO_VERSION)
            if version < newest or digest != self._digests.get(version, digest):
                raise ValueError(
                    f"the engine holds version {newest} and was given other weights as version "
                    f"{version}"
                )
            self._digests[version] = digest
            self._inbox.swaps.append(_Swap(version, weights, done))
            self._arrived.notify()
        await done

    async def close(self) -> None:
        with self._arrived:
            self._closing = True
            self._arrived.notify()
        await in_system_thread(self._thread.join)

    # The next methods run in the caller's thread …

    def _request(self, tokens: Sequence[int], sampling: SamplingParams) -> Request:
        max_tokens = self._config.max_tokens
        prompt = checked_prompt(
            tokens, sampling, vocab=self._architecture.vocab, max_tokens=max_tokens
        )
        if not self._digests:
            raise ConfigError(
                "the engine has no weights yet; load a version before the first generate"
            )
        return Request(
            prompt=prompt,
            sampling=sampling,
            limit=min(sampling.max_new_tokens, max_tokens - len(prompt)),
        )

    def _check_open(self) -> None:
        if self._failure:
            raise EngineFailedError(str(self._failure)) from self._failure.__cause__
        if self._closing:
            raise EngineFailedError("the engine was closed")

    def _check_context(self) -> None:
        max_tokens, max_positions = self._config.max_tokens, self._architecture.max_positions
        if max_tokens > max_positions:
            raise ConfigError(
                f"rollout.engine.max_tokens is {max_tokens}, but the model's "
                f"max_position_embeddings is {max_positions}; lower the former"
            )

    def _convert(self, tensors: Mapping[str, HostTensor]) -> tuple[str, DecoderWeights]:
        weights = fuse(self._architecture, tensors, self._device, self._dtype)
        with self._allocation:
            self._batch = self._batch or self._allocate()
        return weights_digest(tensors), weights

    def _allocate(self) -> ContinuousBatch:
        slots, max_tokens = self._config.max_concurrent, self._config.max_tokens
        try:
            cache = KVCache(self._architecture, slots, max_tokens, self._device, self._dtype)
        except RuntimeError as error:
            raise ConfigError(
                f"no memory for the key-value cache of {slots} sequences of {max_tokens} tokens on "
                f"{self._device} ({error}); "
                "lower rollout.engine.max_concurrent or max_tokens"
            ) from error
        decoder = Decoder(self._architecture, max_tokens, self._device, self._dtype)
        return ContinuousBatch(decoder, cache, Slots(slots, self._device), slots, self._device)

    # … and from here on in the engine's own thread.

    def _run(self) -> None:
        # OpenMP has one number per thread, so it is set within this one.
        torch.set_num_threads(self._config.threads)
        try:
            with torch.inference_mode():
                while batch := self._process_inbox():
                    self._deliver(batch.step())
        except Exception as error:  # the outermost loop of the thread: the callers get any error
            failure = EngineFailedError(f"the torch engine broke: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._end(failure)
        else:
            self._end(None)

    def _process_inbox(self) -> ContinuousBatch | None:
        """Sleep until there is work, then apply the inbox; None when the engine must close."""
        with self._arrived:
            self._arrived.wait_for(
                lambda: self._inbox or self._closing or (self._batch and self._batch.busy)
            )
            batch = self._batch
            if self._closing or batch is None:  # the first load allocates it before its swap
                return None
            inbox, self._inbox = self._inbox, _Inbox()
        for swap in inbox.swaps:
            batch.swap(swap.version, swap.weights)
            self._version = swap.version
        for request in inbox.requests:
            batch.add(request)
        for request in inbox.cancelled:
            batch.drop(request)
        settle([(swap.done, None) for swap in inbox.swaps])
        return batch

    def _deliver(self, finished: Sequence[Request]) -> None:
        if not finished:
            return
        with self._arrived:
            answers = [(self._answers.pop(request, None), request) for request in finished]
        settle([(answer, _result(request)) for answer, request in answers if answer])

    def _end(self, failure: EngineFailedError | None) -> None:
        """Resolve all outstanding calls: with `failure`, or as aborted."""
        with self._arrived:
            self._failure, self._closing = failure, True
            answers, self._answers = self._answers, {}
            swaps = self._inbox.swaps
        closed = failure or EngineFailedError("the engine was closed")
        settle([(swap.done, closed) for swap in swaps])
        settle([(answer, failure or request.generation()) for request, answer in answers.items()])
        self._batch = None


def _result(request: Request) -> Generation | RequestRefusedError:
    return RequestRefusedError(request.failure) if request.failure else request.generation()


def _device(config: EngineConfig) -> torch.device:
    name = f"cuda:{config.devices[0]}" if config.devices else config.device
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # the device "meta" has no values
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        raise ConfigError(f"rollout.engine.device {name!r} cannot be used here: {error}") from error
    return device


def _dtype(config: EngineConfig) -> torch.dtype:
    if config.dtype not in DTYPES:
        raise ConfigError(
            f"rollout.engine.dtype is {config.dtype!r}; use one of {', '.join(DTYPES)}"
        )
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype
