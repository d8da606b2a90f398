"""Continuous batching: requests join and leave a running batch between two decode steps.

    admit ─▶ prefill new prompts, copy them into slots, draw first tokens ─▶ compact ─▶ decode ─▶ draw ─▶ finished

Single-threaded and synchronous; `torch_engine.py` gives it a thread, callers and new weights. One step costs one pass of the
decoder over the sequences that run, reading the cache no further than the longest of them.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch

from rollout.decoder import Decoder
from rollout.decoder_weights import DecoderWeights
from rollout.engine import NO_VERSION, Generation, SamplingParams, VersionSpan
from rollout.kv_cache import KVCache
from rollout.prefixes import Prefix, PrefixCache
from rollout.slots import Plan, Slots
from storage.records import FinishReason

PREFILL_TOKENS_MAX = 2048
"""Padded tokens of one prefill pass (a single longer prompt still goes alone). Waiting prompts fill up a pass that is needed
anyway, so that it is rarely for one prompt only."""

PREFILL_AHEAD_MAX = 64
"""Waiting requests whose prompts are considered for such a pass."""


@dataclass(eq=False)
class Request:
    """One generation under way."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    limit: int
    """Tokens to generate at most."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)
    """(version, index of the first token it sampled), in order."""
    finish_reason: FinishReason = "abort"

    def generation(self) -> Generation:
        ends = [start for _, start in self.marks[1:]] + [len(self.tokens)]
        spans = (VersionSpan(version, start, end) for (version, start), end in zip(self.marks, ends, strict=False))
        return Generation(
            tokens=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            spans=tuple(span for span in spans if span.start < span.end),
            finish_reason=self.finish_reason,
        )


class ContinuousBatch:
    def __init__(self, decoder: Decoder, cache: KVCache, slots: Slots, capacity: int, device: torch.device) -> None:
        self._decoder, self._cache, self._slots = decoder, cache, slots
        self._capacity, self._device = capacity, device
        self._prefixes = PrefixCache()
        self._running: list[Request | None] = []
        """By slot; None is a hole that the next admission or compaction fills."""
        self._waiting: deque[Request] = deque()
        self._plan = Plan([])
        self._changed = False
        """Since the last step, requests joined or left: the plan and the longest context must be found again."""
        self._longest = 0
        """Tokens of the longest running context; the newest of them is not in the cache yet."""
        self._weights: DecoderWeights | None = None
        self.version = NO_VERSION

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def swap(self, version: int, weights: DecoderWeights) -> None:
        """The next token is sampled with `weights`; running requests keep the context computed so far."""
        if version == self.version:
            return
        self._weights, self.version = weights, version
        self._prefixes.clear()
        for request in self._running:
            if request:
                request.marks.append((version, len(request.tokens)))

    def drop(self, request: Request) -> None:
        """Forget a request that nobody waits for any more; one that has finished already is ignored."""
        if request in self._running:
            self._leave(self._running.index(request))
        elif request in self._waiting:
            self._waiting.remove(request)

    def step(self) -> list[Request]:
        """Let waiting requests in and generate one token of each running one; the requests that finished."""
        finished = self._admit()
        self._compact()
        return finished + self._decode()

    def _admit(self) -> list[Request]:
        holes = [slot for slot, request in enumerate(self._running) if request is None]
        fresh = range(len(self._running), self._capacity)
        entering = [(slot, self._waiting.popleft()) for slot in [*holes, *fresh][: len(self._waiting)]]
        if not entering:
            return []
        slots, requests = [slot for slot, _ in entering], [request for _, request in entering]
        self._running.extend([None] * (max(slots) + 1 - len(self._running)))
        logits = self._enter(slots, requests)
        for slot, request in entering:
            self._running[slot] = request
            request.marks.append((self.version, 0))
        self._changed = True
        sampling = [request.sampling for request in requests]
        self._slots.enter(slots, [len(request.prompt) for request in requests], sampling)
        drawn = self._slots.sample(logits, torch.tensor(slots, device=self._device), Plan(sampling))
        return self._record(slots, *drawn)

    def _enter(self, slots: Sequence[int], requests: Sequence[Request]) -> torch.Tensor:
        """Put the requests' prompts into the cache; the logits after each [M, V]."""
        slots_of: dict[tuple[int, ...], list[int]] = {}
        for slot, request in zip(slots, requests, strict=True):
            slots_of.setdefault(request.prompt, []).append(slot)
        prefixes = self._prefill(list(slots_of))
        for prompt, targets in slots_of.items():
            self._cache.fill(targets, prefixes[prompt].keys, prefixes[prompt].values)
        return torch.stack([prefixes[request.prompt].logits for request in requests])

    def _prefill(self, prompts: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Prefix]:
        """Each prompt's prefix, computed where it is not held, many in one pass."""
        found = {prompt: prefix for prompt in prompts if (prefix := self._prefixes.get(prompt))}
        missing = [prompt for prompt in prompts if prompt not in found]
        ahead = {request.prompt: None for request in islice(self._waiting, PREFILL_AHEAD_MAX)} if missing else {}
        todo = deque(missing + [prompt for prompt in ahead if prompt not in self._prefixes and prompt not in missing])
        while len(found) < len(prompts):
            for prompt, prefix in self._compute(_next_pass(todo)).items():
                self._prefixes.put(prompt, prefix)
                if prompt in missing:
                    found[prompt] = prefix
        return found

    def _compute(self, prompts: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Prefix]:
        assert self._weights is not None
        lengths = [len(prompt) for prompt in prompts]
        padded = [prompt + (0,) * (max(lengths) - len(prompt)) for prompt in prompts]
        tokens, ends = torch.tensor(padded, device=self._device), torch.tensor(lengths, device=self._device)
        keys, values, logits = self._decoder.prefill(self._weights, tokens, ends)
        return {
            # Clones, so that one kept prompt does not keep the whole pass in memory.
            prompt: Prefix(keys[:, p, :, :length].clone(), values[:, p, :, :length].clone(), logits[p])
            for p, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        }

    def _compact(self) -> None:
        """Move the last sequences into the holes, so that those in use stand at the front without gaps."""
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
            self._cache.move(sources, targets, max(_context(running[slot]) for slot in targets))
            self._slots.move(sources, targets)

    def _decode(self) -> list[Request]:
        """One more token of every running request."""
        if not self._running:
            return []
        assert self._weights is not None
        if self._changed:
            self._plan = Plan([request.sampling for request in self._running if request])
            self._longest = max(_context(request) for request in self._running)
            self._changed = False
        count = len(self._running)
        tokens, positions = self._slots.newest(count)
        logits = self._decoder.decode(self._weights, self._cache, tokens, positions, self._longest)
        self._longest += 1
        return self._record(range(count), *self._slots.sample(logits, slice(count), self._plan))

    def _record(self, slots: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]) -> list[Request]:
        """Append one token to the request in each of `slots`; those that ended leave their slots."""
        if math.isnan(sum(logprobs)):
            raise FloatingPointError(f"weights version {self.version} gives logits that are not numbers")
        finished = []
        for slot, token, logprob in zip(slots, tokens, logprobs, strict=True):
            request = self._running[slot]
            assert request is not None
            request.tokens.append(token)
            request.logprobs.append(logprob)
            if token in request.sampling.stop_ids:
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


def _context(request: Request | None) -> int:
    """Tokens of a running request's context, the newest included."""
    assert request is not None
    return len(request.prompt) + len(request.tokens)


def _next_pass(todo: deque[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Take prompts from the front of `todo` until one more would exceed PREFILL_TOKENS_MAX padded tokens."""
    taken = [todo.popleft()]
    longest = len(taken[0])
    while todo and (longest := max(longest, len(todo[0]))) * (len(taken) + 1) <= PREFILL_TOKENS_MAX:
        taken.append(todo.popleft())
    return taken
