"""Supervised fine-tuning of a causal language model in phases, with a weighted next-token loss.

Muon updates the matrices of the layers and AdamW the other parameters (all of them in a phase
without `muon_lr`). Deterministic in the examples on one thread.

Shape legend: B examples, T tokens of the longest, L tokens of one, N tokens with a weight other
than 0, H hidden size, V vocabulary.
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
"""Tokens [L] and the weight of each in the loss [L]; 0 for tokens that are not learned."""
Progress: TypeAlias = Callable[[str, float], None]
"""Called after every iteration with the name of the phase and its finished share."""

GRAD_NORM_MAX = 1.0
MICRO_BATCH = 16
"""Examples of one forward pass; sorted by length, which saves padding."""


@dataclass(frozen=True, kw_only=True)
class TrainingPhase:
    """A part of the training, with its data and learning rates."""

    name: str
    examples: Iterator[Example]
    iterations: int
    lr: float
    """Learning rate of AdamW."""
    muon_lr: float | None = None
    """Learning rate of Muon for the layers' matrices; None: AdamW updates them too."""
    warmup_iterations: int = 0
    """Iterations over which the learning rates rise linearly from 0."""
    decay_share: float = 0.0
    """Share of the iterations, at the end, over which they fall linearly to `final_factor`."""
    final_factor: float = 1.0
    betas: tuple[float, float] = (0.9, 0.98)
    momentum: float = 0.95
    weight_decay: float = 0.01

    def factor(self, iteration: int) -> float:
        """Return the factor of the learning rates in iteration 0, 1, 2, …"""
        warmup = min(1.0, (iteration + 1) / max(1, self.warmup_iterations))
        decay_start = self.iterations * (1 - self.decay_share)
        decay = max(0.0, iteration - decay_start) / max(1.0, self.iterations - decay_start)
        return warmup * (1 - decay * (1 - self.final_factor))


def warm_up(
    model: nn.Module, phases: Sequence[TrainingPhase], batch_size: int, progress: Progress
) -> dict[str, float]:
    """Train `model`, a causal language model of transformers, in place.

    Returns the weighted mean loss of the last batch of each phase, by phase name.
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


def weighted_loss_sum(model: Any, tokens_BT: Tensor, weights_BT: Tensor) -> Tensor:
    """Compute Σ weight × −log p; logits are computed only for tokens with a weight other than 0.

    Padding is on the right, where the causal mask excludes it.
    """
    hidden_BTH = model.base_model(tokens_BT, use_cache=False).last_hidden_state
    targets_BT, target_weights_BT = tokens_BT[:, 1:], weights_BT[:, 1:]
    weighted_BT = target_weights_BT != 0
    logits_NV = model.get_output_embeddings()(hidden_BTH[:, :-1][weighted_BT])
    losses_N = F.cross_entropy(logits_NV, targets_BT[weighted_BT], reduction="none")
    return (losses_N * target_weights_BT[weighted_BT]).sum()


def _accumulate_gradient(model: nn.Module, examples: list[Example]) -> float:
    """Accumulate the gradient of the weighted mean loss of a batch; return the loss."""
    mean_loss = 0.0
    total = float(sum(weights[1:].sum() for _, weights in examples))
    by_length = sorted(examples, key=lambda example: len(example[0]))
    for start in range(0, len(by_length), MICRO_BATCH):
        loss = weighted_loss_sum(model, *_padded(by_length[start : start + MICRO_BATCH])) / total
        torch.autograd.backward(loss)
        mean_loss += loss.item()
    return mean_loss


def _padded(examples: list[Example]) -> tuple[Tensor, Tensor]:
    """Pad tokens to int64 [B, T] and weights to float32 [B, T], with zeros on the right."""
    shape = len(examples), max(len(tokens) for tokens, _ in examples)
    tokens_BT, weights_BT = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    for row, (tokens, weights) in enumerate(examples):
        tokens_BT[row, : len(tokens)] = tokens
        weights_BT[row, : len(weights)] = weights
    return torch.from_numpy(tokens_BT), torch.from_numpy(weights_BT)


def _optimizers(model: Any, phase: TrainingPhase) -> list[torch.optim.Optimizer]:
    """Create Muon for the matrices of the layers (with `muon_lr`) and AdamW for the rest."""
    embeddings = {
        id(part.weight) for part in (model.get_input_embeddings(), model.get_output_embeddings())
    }
    matrices = [
        p
        for p in model.parameters()
        if p.ndim == 2 and id(p) not in embeddings and phase.muon_lr is not None
    ]
    matrix_ids = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in matrix_ids]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=phase.lr, betas=phase.betas, weight_decay=phase.weight_decay)
    ]
    if phase.muon_lr is not None:
        optimizers.append(
            Muon(
                matrices, lr=phase.muon_lr, momentum=phase.momentum, weight_decay=phase.weight_decay
            )
        )
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["full_lr"] = group["lr"]
    return optimizers
