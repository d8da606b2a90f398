"""The training step that all built-in engines share: batch n → gradients → updates.

    batch ─▶ minibatches ─▶ passes ─────────▶ blocks
             one optimizer  one forward and   rectangles
             step each      backward pass     of rows

`packing.py` forms the blocks, `trainer/losses/` has the loss, `Trained` has the weights and the
optimizer; this module accumulates gradients. Passes do not change the gradient: all weights and
constants of the loss are computed over the whole minibatch first.

With several ranks, every rank has the whole batch and computes the same advantages, minibatches and
weights. The rows of a minibatch are divided over the ranks (`division.py`), and gradients and
metrics are summed over them, so that the number of ranks changes nothing either. All ranks make the
same number of passes, since passes may exchange weights and gradients; a rank without rows makes an
empty pass, whose gradient is 0.

A frozen reference, where there is one, runs on the blocks of each pass before the model in training
does, so that its activations are gone when those for the backward pass are made.

Shape legend: N loss tokens of a pass.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from storage.errors import CorruptError
from storage.records.batches import Batch
from storage.records.types import Float32, Int64
from trainer.config import TrainConfig
from trainer.engines.ranks.collectives import Collectives
from trainer.engines.step.division import divide
from trainer.engines.step.learning_rate import learning_rate
from trainer.engines.step.minibatches import (
    batch_advantages,
    check_rows,
    measured_regions,
    minibatches,
    regions_of,
)
from trainer.engines.step.packing import Block, PackedRow, empty_block, pack, plan
from trainer.engines.step.step_metrics import StepMetrics
from trainer.losses.corrections import Correction
from trainer.losses.custom import backward_start
from trainer.losses.loss import Loss, Prepared
from trainer.losses.reference_kl import ReferenceKl


class Scorer(Protocol):
    """A model that computes log-probabilities: the one in training, or a frozen reference."""

    @property
    def device(self) -> torch.device:
        """The device of tokens and losses."""

    def logprobs(
        self,
        tokens_BT: Tensor,
        source_N: Tensor,
        target_N: Tensor,
        temperature_N: Tensor,
        positions_BT: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probabilities and entropies of the targets, each [N] (see `Block`)."""


class Trained(Scorer, Protocol):
    """A model with its optimizer: what differs between one process, FSDP2 and DeepSpeed."""

    @property
    def collectives(self) -> Collectives:
        """How the ranks add and gather tensors."""

    @property
    def one_block_passes(self) -> bool:
        """Whether a pass has one block: each forward pass needs its backward pass before the next.

        Otherwise a pass has all blocks of a micro-batch.
        """

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def positions(self) -> int | None:
        """Tokens of the longest context; None where they are unknown."""

    def zero_grad(self) -> None:
        """Begin a minibatch."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss`, summed over the ranks; `last` of the minibatch."""

    def update(self, lr: float) -> float:
        """Clip the gradient and take an optimizer step; return the norm before clipping.

        The norm is over all ranks. Nothing is changed where it is not finite, or `lr` is 0.
        """


@dataclass(frozen=True, eq=False, kw_only=True)
class _Tokens:
    """Loss tokens of a pass on the device, in the order of its blocks; [N] each."""

    logprobs_N: Tensor
    entropy_N: Tensor
    behaviour_N: Tensor
    advantages_N: Tensor
    weight_N: Tensor
    region_N: Tensor


@dataclass(frozen=True, eq=False)
class _Penalty:
    """The distance from the reference, which is added to each token's loss."""

    kl: ReferenceKl
    reference: Scorer
    metrics: StepMetrics

    @torch.no_grad()
    def logprobs(self, blocks: list[Block]) -> Tensor:
        """Compute log q of the loss tokens of a pass; all ranks take part.

        CorruptError where they are not finite: a NaN would have no gradient after a clamp.
        """
        reference_N = _logprobs(blocks, self.reference)[0]
        if not reference_N.isfinite().all():
            raise CorruptError(
                f"version {self.kl.version}, the reference, gives log-probabilities that are not "
                "finite; use another version in train.reference, in a new run"
            )
        return reference_N

    def added(self, values_N: Tensor, logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
        """Return the token losses with their penalties, and count the distances."""
        distances_N = self.kl.estimates(logprobs_N, reference_N)
        self.metrics.add_reference(distances_N)
        if not self.kl.coefficient:  # 0 · inf is NaN
            return values_N
        return values_N + (self.kl.coefficient * distances_N).to(values_N.dtype)


def train_step(
    batch: Batch,
    trained: Trained,
    loss: Loss,
    config: TrainConfig,
    seed: int,
    reference: Scorer | None = None,
) -> dict[str, float]:
    """Train on `batch` and return its metrics, the same on every rank.

    `reference` is the model of `config.reference`. CorruptError naming the row, and nothing
    changed, when a row cannot be trained on.
    """
    check_rows(batch, trained.vocab_size, trained.positions)
    advantages = batch_advantages(batch, config.normalize_advantages)
    lr = learning_rate(config, batch.step)
    regions = regions_of(batch)
    measured = measured_regions(batch, regions)
    metrics = StepMetrics(regions)
    kl = config.reference
    penalty = _Penalty(kl, reference, metrics) if kl and reference else None
    parts = [
        _passes(examples, config, trained)
        for rows in minibatches(len(batch.rows), config.minibatches, seed, batch.step)
        if (examples := _examples(batch, advantages, measured, rows, config))
    ]
    if correction := config.loss.correction.make():
        parts = [_corrected(passes, trained, correction, metrics) for passes in parts]
    for number, passes in enumerate(parts):
        is_first = number == 0 and correction is None
        prepared = _accumulate(passes, trained, loss, metrics, penalty, measures=is_first)
        metrics.add_update(trained.update(lr), prepared.scalars)
    metrics.add_over_ranks(trained.collectives)
    return metrics.by_name(batch, lr)


def _examples(
    batch: Batch,
    advantages: list[Float32],
    measured: list[Int64],
    rows: NDArray[np.int64],
    config: TrainConfig,
) -> list[PackedRow]:
    """Return the rows of a minibatch with their weights, without rows that have no loss tokens."""
    weights = config.loss.row_weights([int(batch.rows[row].loss_mask.sum()) for row in rows])
    return [
        PackedRow(
            tokens=batch.rows[row].tokens,
            loss_mask=batch.rows[row].loss_mask,
            behaviour=batch.rows[row].logprobs,
            advantages=advantages[row],
            temperature=batch.rows[row].temperature,
            weight=weight,
            region=measured[row],
        )
        for row, weight in zip(rows, weights, strict=True)
        if batch.rows[row].loss_mask.any()
    ]


def _passes(examples: list[PackedRow], config: TrainConfig, trained: Trained) -> list[list[Block]]:
    """Return the blocks of each pass of this rank; an empty block where it has no rows left."""
    lengths = [len(example.tokens) for example in examples]
    max_tokens, packed = config.micro_batch_tokens, config.packing == "packed"
    if trained.one_block_passes:
        divided = divide(lengths, max_tokens, trained.collectives.num_ranks, packed)
        passes = [[block] for block in divided[trained.collectives.rank]]
    else:
        passes = plan(lengths, max_tokens, packed)
    return [
        [
            pack([examples[row] for row in rows], packed) if rows else empty_block()
            for rows in blocks
        ]
        for blocks in passes
    ]


@torch.no_grad()
def _corrected(
    passes: list[list[Block]], trained: Trained, correction: Correction, metrics: StepMetrics
) -> list[list[Block]]:
    """Return the passes of a minibatch with proximal log-probabilities and corrected weights.

    Before the first optimizer step: all loss tokens are measured (`trainer/losses/corrections.py`).
    """
    corrected = []
    for blocks in passes:
        tokens = _forward(blocks, trained)
        metrics.add_mismatch(tokens.logprobs_N, tokens.behaviour_N, tokens.region_N)
        ends = np.cumsum([len(block.target_N) for block in blocks])[:-1].tolist()
        proximal = torch.tensor_split(tokens.logprobs_N, ends)
        behaviour = torch.tensor_split(tokens.behaviour_N, ends)
        corrected.append(
            [
                _with_weights(block, proximal_N, behaviour_N, correction, metrics)
                for block, proximal_N, behaviour_N in zip(blocks, proximal, behaviour, strict=True)
            ]
        )
    return corrected


def _with_weights(
    block: Block,
    proximal_N: Tensor,
    behaviour_N: Tensor,
    correction: Correction,
    metrics: StepMetrics,
) -> Block:
    """Return the block with `proximal_N` as behaviour, and the correction's weights multiplied."""
    if not len(proximal_N):
        return block
    sequence_N = torch.from_numpy(block.sequence_N).to(proximal_N.device)
    weights_N = correction.token_weights(proximal_N, behaviour_N, sequence_N)
    metrics.add_correction(weights_N)
    return replace(
        block,
        behaviour_N=proximal_N.cpu().numpy(),
        weight_N=block.weight_N * weights_N.float().cpu().numpy(),
    )


def _accumulate(
    passes: list[list[Block]],
    trained: Trained,
    loss: Loss,
    metrics: StepMetrics,
    penalty: _Penalty | None,
    *,
    measures: bool,
) -> Prepared:
    """Add the gradients of the passes; return the constants of the last one that has tokens.

    `measures`: no optimizer step came before, so the tokens show the mismatch.
    """
    trained.zero_grad()
    several = len(passes) > 1 or trained.collectives.num_ranks > 1
    part_of = _prepare_whole(passes, trained, loss) if several and loss.whole_minibatch else None
    prepared = Prepared()
    start = 0
    for number, blocks in enumerate(passes, 1):
        reference_N = penalty.logprobs(blocks) if penalty else None
        tokens = _forward(blocks, trained)
        end = start + len(tokens.logprobs_N)
        if end == start:
            trained.backward(tokens.logprobs_N.sum(), last=number == len(passes))
            continue
        own = tokens.logprobs_N.detach(), tokens.behaviour_N, tokens.advantages_N
        prepared = part_of(start, end) if part_of else loss.prepare(*own)
        arguments = prepared, tokens.logprobs_N, tokens.behaviour_N, tokens.advantages_N
        losses = loss.token_losses(*arguments)
        values_N = losses.values_N
        if penalty and reference_N is not None:
            values_N = penalty.added(values_N, tokens.logprobs_N, reference_N)
        total = (values_N * tokens.weight_N).sum()
        start_of_backward = backward_start(loss, total, tokens.logprobs_N)
        trained.backward(start_of_backward, last=number == len(passes))
        metrics.add(
            total,
            losses,
            tokens.logprobs_N,
            tokens.entropy_N,
            tokens.behaviour_N,
            tokens.advantages_N,
        )
        if measures:
            metrics.add_mismatch(own[0], tokens.behaviour_N, tokens.region_N)
        start = end
    return prepared


def _prepare_whole(
    passes: list[list[Block]], trained: Trained, loss: Loss
) -> Callable[[int, int], Prepared]:
    """Prepare a minibatch by forward passes without gradients, from the loss tokens of all ranks.

    Returns the function from a range of this rank's loss tokens to their constants.
    """
    with torch.no_grad():
        parts = [_forward(blocks, trained) for blocks in passes]
        own = [
            torch.cat([part.logprobs_N for part in parts]),
            torch.cat([part.behaviour_N for part in parts]),
            torch.cat([part.advantages_N for part in parts]),
        ]
        every, first = trained.collectives.gather(torch.stack(own))
        whole = loss.prepare(*every.unbind())
    return lambda start, end: whole.part(first + start, first + end)


def _forward(blocks: list[Block], trained: Trained) -> _Tokens:
    def joined(name: str) -> Tensor:
        array = np.concatenate([getattr(block, name) for block in blocks])
        return torch.from_numpy(array).to(trained.device)

    logprobs_N, entropy_N = _logprobs(blocks, trained)
    return _Tokens(
        logprobs_N=logprobs_N,
        entropy_N=entropy_N,
        behaviour_N=joined("behaviour_N"),
        advantages_N=joined("advantages_N"),
        weight_N=joined("weight_N"),
        region_N=joined("region_N"),
    )


def _logprobs(blocks: list[Block], model: Scorer) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities and entropies of the loss tokens of a pass, each [N]."""

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(model.device)

    logprobs, entropies = zip(
        *(
            model.logprobs(
                tensor(block.tokens_BT),
                tensor(block.source_N),
                tensor(block.target_N),
                tensor(block.temperature_N),
                None if block.positions_BT is None else tensor(block.positions_BT),
            )
            for block in blocks
        ),
        strict=True,
    )
    return torch.cat(logprobs), torch.cat(entropies)
