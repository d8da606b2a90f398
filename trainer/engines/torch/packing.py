"""Rows of a minibatch to rectangles of tokens. Torch-free; knows nothing of models and losses.

    rows ──sort by length──▶ blocks (one rectangle each) ──▶ micro-batches (blocks of one forward and backward pass)

Shape legend: B rows of a block, T its longest row, N its loss tokens, L tokens of one row.

Rows are padded on the right. A causal model then needs no attention mask and no position ids of its
own: a token never looks at what stands to its right, so padding is never seen, and positions count
from 0 as they would anyway.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.records.types import Bool, Float32, Int32

BLOCK_COST_TOKENS = 128
"""What one more block costs besides its tokens, in tokens: kernel launches and Python. Measured on
the tiny model.
"""
PAD = 0
"""Token id of padding: any valid one will do, since nobody looks at it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedRow:
    """One row as the packer sees it."""

    tokens: Int32
    """[L]"""
    loss_mask: Bool
    """[L] never True on the first token, which nothing precedes."""
    behaviour: Float32
    """[L] log-probabilities of the sampler."""
    advantages: Float32
    """[L]"""
    temperature: float
    weight: float
    """What each loss token of the row counts in the minibatch's loss."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Block:
    """One rectangle. Two rows [5 6 7] and [8 9], all but their first token trained on:

    tokens_BT [[5 6 7] [8 9 0]]      source_N [0 1 3]      target_N [6 7 9]
    """

    tokens_BT: NDArray[np.int64]
    """[B, T] right-padded."""
    source_N: NDArray[np.int64]
    """[N] where the model predicts each loss token: the flat position (row · T + column) before it.
    """
    target_N: NDArray[np.int64]
    """[N] the loss tokens."""
    behaviour_N: Float32
    advantages_N: Float32
    temperature_N: Float32
    weight_N: Float32


def plan(lengths: Sequence[int], max_tokens: int) -> list[list[list[int]]]:
    """Micro-batches of blocks of row numbers, longest rows first, so that running out of memory
    shows at once.

    A micro-batch holds at most `max_tokens` padded tokens, all its blocks together; a longer row
    stands alone. Within that, blocks are cut where padding and the cost of a block are least
    together. Depends on `lengths` alone.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    blocks = [order[start:end] for start, end in _cuts([lengths[row] for row in order], max_tokens)]
    micro_batches: list[list[list[int]]] = []
    room = 0
    for block in blocks:
        size = len(block) * lengths[block[0]]
        if size > room or not micro_batches:
            micro_batches.append([])
            room = max_tokens
        micro_batches[-1].append(block)
        room -= size
    return micro_batches


def _cuts(lengths: list[int], max_tokens: int) -> list[tuple[int, int]]:
    """The cheapest division of descending `lengths` into rectangles: dynamic programming over where
    the last starts.
    """
    widths = np.array(lengths, dtype=np.int64)
    cheapest = np.zeros(len(lengths) + 1)
    starts = [0]
    for end in range(1, len(lengths) + 1):
        sizes = (end - np.arange(end)) * widths[:end]
        costs = cheapest[:end] + BLOCK_COST_TOKENS + sizes
        costs[: end - 1][sizes[: end - 1] > max_tokens] = np.inf
        starts.append(int(costs.argmin()))
        cheapest[end] = costs[starts[end]]
    cuts: list[tuple[int, int]] = []
    end = len(lengths)
    while end:
        cuts.append((starts[end], end))
        end = starts[end]
    return cuts[::-1]


def pack(examples: Sequence[PackedRow]) -> Block:
    """One block of these rows, in their order."""
    width = max(len(example.tokens) for example in examples)
    tokens_BT = np.full((len(examples), width), PAD, dtype=np.int64)
    for row, example in enumerate(examples):
        tokens_BT[row, : len(example.tokens)] = example.tokens
    columns = [np.flatnonzero(example.loss_mask) for example in examples]
    counts = [len(each) for each in columns]
    return Block(
        tokens_BT=tokens_BT,
        source_N=np.concatenate([row * width + each - 1 for row, each in enumerate(columns)]),
        target_N=np.concatenate(
            [e.tokens[each] for e, each in zip(examples, columns, strict=True)]
        ).astype(np.int64),
        behaviour_N=np.concatenate(
            [e.behaviour[each] for e, each in zip(examples, columns, strict=True)]
        ),
        advantages_N=np.concatenate(
            [e.advantages[each] for e, each in zip(examples, columns, strict=True)]
        ),
        temperature_N=np.repeat([e.temperature for e in examples], counts).astype(np.float32),
        weight_N=np.repeat([e.weight for e in examples], counts).astype(np.float32),
    )
