"""Pack the rows of a minibatch into rectangles of tokens. Does not import torch.

    rows ──sort by length──▶ blocks (rectangles) ──▶ micro-batches (blocks of one backward pass)

padded: a row of a block is a row of the minibatch, padded on the right. A causal model then needs
neither an attention mask nor position ids: no token attends to the padding behind it, and positions
count from 0.

packed: a block has one row, all rows of a micro-batch one after the other, without padding.
Positions count from 0 in each; from them, transformers limits attention to one row.

Shape legend: R rows of a minibatch, B rows of a block, T tokens of its longest row, N its loss
tokens, L tokens of one row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.records.types import Bool, Float32, Int32, Int64

BLOCK_COST_TOKENS = 128
"""Fixed cost of a block (kernel launches, Python), in tokens; measured on the tiny model."""
PAD = 0
"""Token id of padding: any valid id, since nothing attends to it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedRow:
    """A row of a batch, reduced to what is packed."""

    tokens: Int32
    """[L]"""
    loss_mask: Bool
    """[L] False on the first token, which no position predicts."""
    behaviour: Float32
    """[L] log-probabilities of the behaviour policy."""
    advantages: Float32
    """[L]"""
    temperature: float
    weight: float
    """Weight of each loss token of the row in the minibatch's loss."""
    region: Int64
    """[L] index of the region that sampled the token; NOT_MEASURED for another version's."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Block:
    """A rectangle of tokens. Two rows [5 6 7] and [8 9], all but their first token trained on:

    tokens_BT [[5 6 7] [8 9 0]]      source_N [0 1 3]      target_N [6 7 9]
    """

    tokens_BT: NDArray[np.int64]
    """[B, T] right-padded, or [1, T] packed."""
    positions_BT: NDArray[np.int64] | None = None
    """[1, T] of the tokens in their own rows, if packed."""
    source_N: NDArray[np.int64]
    """[N] flat position (row · T + column) before each loss token, which predicts it."""
    target_N: NDArray[np.int64]
    """[N] the loss tokens."""
    behaviour_N: Float32
    advantages_N: Float32
    temperature_N: Float32
    weight_N: Float32
    region_N: Int64
    """[N] for the mismatch: the region's index, or NOT_MEASURED."""
    sequence_N: Int64
    """[N] row of the block."""


def plan(lengths: Sequence[int], max_tokens: int, packed: bool = False) -> list[list[list[int]]]:
    """Return micro-batches of blocks of row numbers, depending on the arguments alone.

    All blocks of a micro-batch have at most `max_tokens` tokens together, padding included; a
    longer row is a micro-batch by itself. Padded blocks are cut for the least sum of padding and
    fixed costs; with `packed`, a micro-batch has one block, and a row is added to the first one
    that has room. The longest rows come first, so that too little memory fails early.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    if packed:
        return [[rows] for rows in _first_fits(order, lengths, max_tokens)]
    blocks = [order[start:end] for start, end in _cuts([lengths[row] for row in order], max_tokens)]
    micro_batches: list[list[list[int]]] = []
    tokens_left = 0
    for block in blocks:
        size = len(block) * lengths[block[0]]
        if size > tokens_left or not micro_batches:
            micro_batches.append([])
            tokens_left = max_tokens
        micro_batches[-1].append(block)
        tokens_left -= size
    return micro_batches


def _first_fits(order: list[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    blocks: list[list[int]] = []
    tokens_left: list[int] = []
    for row in order:
        fits = (number for number, left in enumerate(tokens_left) if lengths[row] <= left)
        number = next(fits, len(blocks))
        if number == len(blocks):
            blocks.append([])
            tokens_left.append(max_tokens)
        blocks[number].append(row)
        tokens_left[number] -= lengths[row]
    return blocks


def _cuts(lengths: list[int], max_tokens: int) -> list[tuple[int, int]]:
    """Cut descending `lengths` into the rectangles (start, end) of the least cost.

    Dynamic programming: `cheapest[end]` is the least cost of the first `end` rows, and
    `starts[end]` is where the last rectangle of that division starts.
    """
    widths_R = np.array(lengths, dtype=np.int64)
    cheapest = np.zeros(len(lengths) + 1)
    starts = [0]
    for end in range(1, len(lengths) + 1):
        # A rectangle is at least as wide as its last row: those of more rows have too many tokens.
        first = end - min(end, max(1, max_tokens // max(1, lengths[end - 1])))
        sizes_R = (end - np.arange(first, end)) * widths_R[first:end]
        costs_R = cheapest[first:end] + BLOCK_COST_TOKENS + sizes_R
        costs_R[:-1][sizes_R[:-1] > max_tokens] = np.inf
        starts.append(first + int(costs_R.argmin()))
        cheapest[end] = costs_R.min()
    cuts: list[tuple[int, int]] = []
    end = len(lengths)
    while end:
        cuts.append((starts[end], end))
        end = starts[end]
    return cuts[::-1]


def pack(examples: Sequence[PackedRow], packed: bool = False) -> Block:
    """Pack rows into one block, in their order; with `packed`, one after the other in one row."""
    lengths = np.array([len(example.tokens) for example in examples])
    positions_BT: NDArray[np.int64] | None = None
    if packed:
        starts = np.cumsum(lengths) - lengths
        tokens_BT = np.concatenate([e.tokens for e in examples])[None].astype(np.int64)
        positions_BT = np.concatenate([np.arange(length) for length in lengths])[None]
    else:
        starts = np.arange(len(examples)) * lengths.max()
        tokens_BT = np.full((len(examples), lengths.max()), PAD, dtype=np.int64)
        for row, example in enumerate(examples):
            tokens_BT[row, : len(example.tokens)] = example.tokens
    columns = [np.flatnonzero(example.loss_mask) for example in examples]  # of loss tokens
    counts = [len(places) for places in columns]
    return Block(
        tokens_BT=tokens_BT,
        positions_BT=positions_BT,
        source_N=np.concatenate(
            [start + places - 1 for start, places in zip(starts, columns, strict=True)]
        ),
        target_N=np.concatenate(
            [e.tokens[places] for e, places in zip(examples, columns, strict=True)]
        ).astype(np.int64),
        behaviour_N=np.concatenate(
            [e.behaviour[places] for e, places in zip(examples, columns, strict=True)]
        ),
        advantages_N=np.concatenate(
            [e.advantages[places] for e, places in zip(examples, columns, strict=True)]
        ),
        temperature_N=np.repeat([e.temperature for e in examples], counts).astype(np.float32),
        weight_N=np.repeat([e.weight for e in examples], counts).astype(np.float32),
        region_N=np.concatenate(
            [e.region[places] for e, places in zip(examples, columns, strict=True)]
        ),
        sequence_N=np.repeat(np.arange(len(examples)), counts),
    )


def empty_block() -> Block:
    """Return a block without loss tokens: one token of padding."""
    nothing = np.zeros(0, dtype=np.float32)
    nowhere = np.zeros(0, dtype=np.int64)
    return Block(
        tokens_BT=np.full((1, 1), PAD, dtype=np.int64),
        source_N=nowhere,
        target_N=nowhere,
        behaviour_N=nothing,
        advantages_N=nothing,
        temperature_N=nothing,
        weight_N=nothing,
        region_N=nowhere,
        sequence_N=nowhere,
    )
