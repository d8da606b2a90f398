"""Divide the rows of a minibatch over ranks. Does not import torch."""

from collections.abc import Sequence

from trainer.engines.step.packing import plan


def divide(
    lengths: Sequence[int], max_tokens: int, num_ranks: int, packed: bool = False
) -> list[list[list[int]]]:
    """Return for each rank its blocks of row numbers, one block for each of its passes.

    A function of the arguments alone: every rank computes the same. Rows go, the longest first, to
    the rank with the fewest tokens so far; each rank then packs its own rows (`packing.plan`).
    Blocks of one place run at the same time on all ranks, and the longest rows come first on each.
    All ranks have the same number of blocks: those of a rank that has fewer are followed by `[]`.

    Example: lengths 5, 3, 2 over 2 ranks → rows 0 and 1, 2.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    tokens = [0] * num_ranks
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        rank = tokens.index(min(tokens))
        shares[rank].append(row)
        tokens[rank] += lengths[row]
    divided = [
        [
            [share[place] for place in block]
            for blocks in plan([lengths[row] for row in share], max_tokens, packed)
            for block in blocks
        ]
        for share in shares
    ]
    num_passes = max(len(blocks) for blocks in divided)
    return [blocks + [[]] * (num_passes - len(blocks)) for blocks in divided]
