"""Sampling state of the running sequences on the device, one slot each.

    integers [4, slots]   newest token, its position, random counter, top-k
    reals    [2, slots]   1 / temperature, top-p

Two packed tensors, so that a sequence enters or moves with two copies. `batch.py` assigns slots to
requests.

Shapes: N slots in use (always 0 … N−1), V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rollout.engines.engine import SamplingParams
from rollout.engines.torch.sampling import COUNTER_STEP, draw, first_counter, truncate, uniform

_TOKEN, _POSITION, _COUNTER, _TOP_K = range(4)
_INVERSE_TEMPERATURE, _TOP_P = range(2)


class Slots:
    """The packed tensors of all slots."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._device = device
        self._integers = torch.zeros((4, slots), dtype=torch.int64, device=device)
        self._step = torch.tensor([[1], [COUNTER_STEP]], device=device)
        """Increments of position and counter per token."""
        self._reals = torch.ones((2, slots), dtype=torch.float32, device=device)

    def enter(
        self,
        slots: Sequence[int],
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
    ) -> None:
        """Initialize `slots` for new requests.

        The last token of a prompt becomes the newest token; the tokens before it are in the cache.
        """
        integers = (
            [prompt[-1] for prompt in prompts],
            [len(prompt) - 1 for prompt in prompts],
            [first_counter(p.seed) for p in params],
            [p.top_k for p in params],
        )
        reals = (
            [1 / p.temperature if p.temperature else 1.0 for p in params],
            [p.top_p for p in params],
        )
        self._integers[:, slots] = torch.tensor(integers, device=self._device)
        self._reals[:, slots] = torch.tensor(reals, device=self._device)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy each source slot to the target slot at the same index."""
        self._integers[:, targets] = self._integers[:, sources]
        self._reals[:, targets] = self._reals[:, sources]

    def newest(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the newest tokens and their positions, both [N] int64."""
        return self._integers[_TOKEN, :count], self._integers[_POSITION, :count]

    def sample(self, logits: Tensor, plan: "StepPlan") -> tuple[list[int], list[float]]:
        """Draw the next token of slots 0 … N−1 from `logits` [N, V]; advance the slots.

        Returns tokens and log-probabilities, both [N]. Only here the host waits for the device.
        """
        count = len(logits)
        integers, reals = self._integers[:, :count], self._reals[:, :count]
        greedy = logits[plan.greedy].argmax(-1) if plan.greedy else None
        if plan.tempered:
            logits = logits * reals[_INVERSE_TEMPERATURE][:, None]
        if rows := plan.truncated:
            logits[rows] = truncate(logits[rows], integers[_TOP_K][rows], reals[_TOP_P][rows])
        tokens, logprobs = draw(logits, uniform(integers[_COUNTER]))
        if greedy is not None:
            # The clamp keeps NaN, by which `batch.py` notices logits that are no numbers.
            tokens[plan.greedy] = greedy
            logprobs[plan.greedy] = logprobs[plan.greedy].clamp(0.0, 0.0)
        integers[_TOKEN] = tokens
        integers[_POSITION : _COUNTER + 1] += self._step
        return self._to_host(tokens, logprobs)

    def _to_host(self, tokens: Tensor, logprobs: Tensor) -> tuple[list[int], list[float]]:
        if self._device.type == "cpu":
            return tokens.tolist(), logprobs.tolist()
        # One transfer for both: float64 holds every token id and every float32 exactly.
        rows = torch.stack((tokens.double(), logprobs.double())).tolist()
        return [int(token) for token in rows[0]], rows[1]


class StepPlan:
    """The rows of a batch with other sampling than temperature 1 without truncation."""

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        unusual = [
            (row, p) for row, p in enumerate(params) if p.temperature != 1 or p.top_k or p.top_p < 1
        ]
        self.greedy = [row for row, p in unusual if p.temperature == 0]
        self.truncated = [row for row, p in unusual if p.temperature and (p.top_k or p.top_p < 1)]
        self.tempered = any(p.temperature not in (0, 1) for _, p in unusual)
