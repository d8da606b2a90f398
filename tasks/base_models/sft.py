"""Supervised warm-up of a causal language model: weighted next-token loss, phase after phase.

Muon moves the matrices of the layers and AdamW the rest (a phase without `muon_lr` is AdamW's
alone). Deterministic in the examples on one thread. Knows nothing of what the examples mean, of
tokenizers, policies or stores.

Shape legend: B examples, T tokens of the longest, N tokens that carry loss, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from storage.records.types import Float32, Int32
from tasks.base_models.muon import Muon

Example: TypeAlias = tuple[Int32, Float32]
"""Tokens [L] and the weight of each in the loss [L]; what is not to be learned weighs 0."""
Progress: TypeAlias = Callable[[str, float], None]
"""Called with the phase's name and the finished share of it after every iteration."""

GRAD_NORM_MAX = 1.0
MICRO_BATCH = 16
"""Examples of one forward pass: those of about the same length go together, which saves padding."""


@dataclass(frozen=True, kw_only=True)
class TrainingPhase:
    """One stretch of training with its own data and learning rates."""

    name: str
    examples: Iterator[Example]
    iterations: int
    lr: float
    """AdamW's."""
    muon_lr: float | None = None
    """Of the layers' matrices; None leaves them to AdamW."""
    warmup_iterations: int = 0
    """The rates rise linearly from 0 over so many."""
    decay_share: float = 0.0
    """The last share of the iterations over which the rates fall linearly to `final_factor`."""
    final_factor: float = 1.0
    betas: tuple[float, float] = (0.9, 0.98)
    momentum: float = 0.95
    weight_decay: float = 0.01

    def factor(self, iteration: int) -> float:
        """What the learning rates are multiplied with in iteration 0, 1, 2, …"""
        rising = min(1.0, (iteration + 1) / max(1, self.warmup_iterations))
        falls_from = self.iterations * (1 - self.decay_share)
        fallen = max(0.0, iteration - falls_from) / max(1.0, self.iterations - falls_from)
        return rising * (1 - fallen * (1 - self.final_factor))


def warm_up(
    model: nn.Module, phases: Sequence[TrainingPhase], batch_size: int, progress: Progress
) -> dict[str, float]:
    """Train `model` (a causal language model of transformers: a decoder and a head on its hidden
    states) in place.

    Returns the weighted mean loss of each phase's last batch, by the phase's name.
    """
    last_loss: dict[str, float] = {}
    model.train()
    for phase in phases:
        optimizers = _optimizers(model, phase)
        for iteration in range(phase.iterations):
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = group["full_lr"] * phase.factor(iteration)
            last_loss[phase.name] = _accumulate_gradient(
                model, list(islice(phase.examples, batch_size))
            )
            torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_NORM_MAX)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            progress(phase.name, (iteration + 1) / phase.iterations)
    model.eval()
    return last_loss


def weighted_loss_sum(model: Any, tokens: Tensor, weights: Tensor) -> Tensor:
    """Sum of weight × −log p over the tokens [B, T] that carry weight [B, T]; logits are made for
    those N only.

    Padding stands on the right, where the causal mask hides it from every token that counts.
    """
    hidden = model.base_model(tokens, use_cache=False).last_hidden_state
    counts = weights[:, 1:] != 0
    logits = model.get_output_embeddings()(hidden[:, :-1][counts])
    losses = F.cross_entropy(logits, tokens[:, 1:][counts], reduction="none")
    return (losses * weights[:, 1:][counts]).sum()


def _accumulate_gradient(model: nn.Module, examples: list[Example]) -> float:
    """The gradient of the weighted mean loss of the whole batch, micro-batch by micro-batch;
    returns that loss.
    """
    mean_loss = 0.0
    total = float(sum(weights[1:].sum() for _, weights in examples))
    by_length = sorted(examples, key=lambda example: len(example[0]))
    for start in range(0, len(by_length), MICRO_BATCH):
        loss = weighted_loss_sum(model, *_padded(by_length[start : start + MICRO_BATCH])) / total
        torch.autograd.backward(loss)
        mean_loss += loss.item()
    return mean_loss


def _padded(examples: list[Example]) -> tuple[Tensor, Tensor]:
    """Tokens int64 [B, T] and weights float32 [B, T], filled with zeros on the right."""
    T = max(len(tokens) for tokens, _ in examples)
    tokens, weights = (
        np.zeros((len(examples), T), np.int64),
        np.zeros((len(examples), T), np.float32),
    )
    for row, (example_tokens, example_weights) in enumerate(examples):
        tokens[row, : len(example_tokens)] = example_tokens
        weights[row, : len(example_weights)] = example_weights
    return torch.from_numpy(tokens), torch.from_numpy(weights)


def _optimizers(model: Any, phase: TrainingPhase) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers where the phase has a rate for it, AdamW for
    everything else.
    """
    embeddings = {
        id(part.weight) for part in (model.get_input_embeddings(), model.get_output_embeddings())
    }
    matrices = [
        p
        for p in model.parameters()
        if p.ndim == 2 and id(p) not in embeddings and phase.muon_lr is not None
    ]
    taken = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in taken]
    made: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=phase.lr, betas=phase.betas, weight_decay=phase.weight_decay)
    ]
    if phase.muon_lr is not None:
        made.append(
            Muon(
                matrices, lr=phase.muon_lr, momentum=phase.momentum, weight_decay=phase.weight_decay
            )
        )
    for group in (group for optimizer in made for group in optimizer.param_groups):
        group["full_lr"] = group["lr"]
    return made
