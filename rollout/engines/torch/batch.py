"""Continuous batching: requests join and leave a running batch between two decode steps.

    admit ─▶ prefill new prompts, copy them into slots ─▶ compact ─▶ decode ─▶ draw ─▶ finished

Single-threaded and synchronous; `engine.py` runs it in a thread. A step costs one decoder pass over
the running sequences, which reads the cache up to the longest of them.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

import numpy as np
import torch

from rollout.engines.engine import NO_VERSION, Generation, SamplingParams, VersionSpan
from rollout.engines.torch.decoder import Decoder
from rollout.engines.torch.decoder_weights import DecoderWeights
from rollout.engines.torch.kv_cache import KVCache
from rollout.engines.torch.prefixes import Prefix, PrefixCache
from rollout.engines.torch.slots import Slots, StepPlan
from storage.records.rollouts import FinishReason

Tokens: TypeAlias = tuple[int, ...]

PREFILL_TOKENS_MAX = 2048
"""Most padded tokens of one prefill pass; a longer prompt has its own pass. Waiting prompts fill a
pass that is needed anyway.
"""

PREFILL_AHEAD_MAX = 64
"""Waiting requests whose prompts are considered for such a pass."""


@dataclass(eq=False, kw_only=True)
class Request:
    """One generation in progress."""

    prompt: Tokens
    sampling: SamplingParams
    limit: int
    """Most tokens to generate."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_starts: list[tuple[int, int]] = field(default_factory=list)
    """(version, index of the first token that it samples), in order."""
    finish_reason: FinishReason = "abort"
    failure: str = ""
    """Why there is no answer; empty where there is one."""

    def generation(self) -> Generation:
        """Return the tokens generated so far."""
        ends = [start for _, start in self.version_starts[1:]] + [len(self.tokens)]
        spans = (
            VersionSpan(version, start, end)
            for (version, start), end in zip(self.version_starts, ends, strict=False)
        )
        return Generation(
            tokens=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            spans=tuple(span for span in spans if span.start < span.end),
            finish_reason=self.finish_reason,
        )


class ContinuousBatch:
    """The running requests by slot, and the queue of waiting ones."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, slots: Slots, capacity: int, device: torch.device
    ) -> None:
        self._decoder, self._cache, self._slots = decoder, cache, slots
        self._capacity, self._device = capacity, device
        self._prefixes = PrefixCache()
        self._running: list[Request | None] = []
        """Request of each slot; None: free until the next admission or compaction."""
        self._waiting: deque[Request] = deque()
        self._plan = StepPlan([])
        self._changed = False
        """Whether requests joined or left since the last step, so that plan and longest context are
        outdated.
        """
        self._longest = 0
        """Length of the longest running context; its newest token is not in the cache yet."""
        self._weights: DecoderWeights | None = None
        self.version = NO_VERSION

    @property
    def busy(self) -> bool:
        """Whether a step has work."""
        return bool(self._waiting) or any(self._running)

    def add(self, request: Request) -> None:
        """Enqueue a request."""
        self._waiting.append(request)

    def swap(self, version: int, weights: DecoderWeights) -> None:
        """Sample from the next token on with `weights`; running requests keep their cache."""
        if version == self.version:
            return
        self._weights, self.version = weights, version
        self._prefixes.clear()
        for request in self._running:
            if request:
                request.version_starts.append((version, len(request.tokens)))

    def drop(self, request: Request) -> None:
        """Remove a cancelled request; one that has finished already is ignored."""
        if request in self._running:
            self._leave(self._running.index(request))
        elif request in self._waiting:
            self._waiting.remove(request)

    def step(self) -> list[Request]:
        """Admit waiting requests, generate one token of each running one; return the finished."""
        self._admit()
        self._compact()
        return self._decode() if self._running else []

    def _admit(self) -> None:
        """Assign free slots to waiting requests; fill the cache up to their last prompt token.

        The next decode step processes this last token, so that a new request needs no extra pass.
        """
        holes = [slot for slot, request in enumerate(self._running) if request is None]
        free = [*holes, *range(len(self._running), self._capacity)][: len(self._waiting)]
        if not free:
            return
        requests = [self._waiting.popleft() for _ in free]
        prefixes = self._prefixes_of([request.prompt[:-1] for request in requests])
        self._running.extend([None] * (max(free) + 1 - len(self._running)))
        for slot, request in zip(free, requests, strict=True):
            if prefix := prefixes.get(request.prompt[:-1]):
                self._cache.fill(slot, prefix.keys, prefix.values)
            request.version_starts.append((self.version, 0))
            self._running[slot] = request
        self._slots.enter(
            free,
            [request.prompt for request in requests],
            [request.sampling for request in requests],
        )
        self._changed = True

    def _prefixes_of(self, texts: Sequence[Tokens]) -> dict[Tokens, Prefix]:
        """Return the prefix of each text, from the prefix cache or by shared prefill passes.

        The empty text has none.
        """
        prefixes = {text: prefix for text in texts if (prefix := self._prefixes.get(text))}
        missing = {text: None for text in texts if text and text not in prefixes}
        ahead = islice(self._waiting, PREFILL_AHEAD_MAX if missing else 0)
        candidates = {request.prompt[:-1]: None for request in ahead}
        todo = deque(
            [
                *missing,
                *(
                    text
                    for text in candidates
                    if text and text not in missing and text not in self._prefixes
                ),
            ]
        )
        while missing.keys() - prefixes.keys():
            for text, prefix in self._compute(_next_pass(todo)).items():
                self._prefixes.put(text, prefix)
                if text in missing:
                    prefixes[text] = prefix
        return prefixes

    def _compute(self, texts: Sequence[Tokens]) -> dict[Tokens, Prefix]:
        assert self._weights is not None
        longest = max(map(len, texts))
        padded = torch.tensor(
            [text + (0,) * (longest - len(text)) for text in texts], device=self._device
        )
        keys, values = self._decoder.prefill(self._weights, padded)
        # Clones, so that a cached prefix does not keep the whole pass in memory.
        return {
            text: Prefix(
                keys[:, row, :, : len(text)].clone(), values[:, row, :, : len(text)].clone()
            )
            for row, text in enumerate(texts)
        }

    def _compact(self) -> None:
        """Move the last sequences into free slots, so that the slots in use are 0 … N−1."""
        running, sources, targets = self._running, list[int](), list[int]()
        for hole in [slot for slot, request in enumerate(running) if request is None]:
            while running and running[-1] is None:
                running.pop()
            if hole >= len(running):
                break
            sources.append(len(running) - 1)
            targets.append(hole)
            running[hole] = running.pop()
        if sources:
            self._cache.move(sources, targets, self._longest)
            self._slots.move(sources, targets)

    def _decode(self) -> list[Request]:
        """Generate one token of every running request; return the finished ones."""
        assert self._weights is not None
        if self._changed:
            requests = [request for request in self._running if request]
            self._plan = StepPlan([request.sampling for request in requests])
            self._longest = max(len(request.prompt) + len(request.tokens) for request in requests)
            self._changed = False
        count = len(self._running)
        tokens, positions = self._slots.newest(count)
        logits = self._decoder.decode(self._weights, self._cache, tokens, positions, self._longest)
        self._longest += 1
        return self._record(*self._slots.sample(logits, self._plan))

    def _record(self, tokens: Sequence[int], logprobs: Sequence[float]) -> list[Request]:
        """Append one token to the request of each slot; return the finished, their slots freed.

        A request whose logits are not numbers is finished, too, as a failure.
        """
        finished = []
        for slot, (request, token, logprob) in enumerate(
            zip(self._running, tokens, logprobs, strict=True)
        ):
            assert request is not None
            request.tokens.append(token)
            request.logprobs.append(logprob)
            if math.isnan(logprob):
                request.failure = (
                    f"weights version {self.version} gives logits that are not numbers"
                )
                self._cache.clear(slot)
            elif token in request.sampling.stop_ids:
                request.finish_reason = "stop"
            elif len(request.tokens) == request.limit:
                request.finish_reason = "length"
            else:
                continue
            self._leave(slot)
            finished.append(request)
        return finished

    def _leave(self, slot: int) -> None:
        self._running[slot] = None
        self._changed = True


def _next_pass(todo: deque[Tokens]) -> list[Tokens]:
    """Remove texts from the front of `todo`: one, or up to PREFILL_TOKENS_MAX padded tokens."""
    texts = [todo.popleft()]
    longest = len(texts[0])
    while todo and (longest := max(longest, len(todo[0]))) * (len(texts) + 1) <= PREFILL_TOKENS_MAX:
        texts.append(todo.popleft())
    return texts
