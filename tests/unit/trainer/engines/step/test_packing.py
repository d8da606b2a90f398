from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from trainer.engines.step.packing import BLOCK_COST_TOKENS, PackedRow, _cuts, pack, plan


def example(
    tokens: list[int], mask: list[bool], advantage: float = 1.0, weight: float = 0.5
) -> PackedRow:
    loss_mask = np.array(mask)
    return PackedRow(
        tokens=np.array(tokens, dtype=np.int32),
        loss_mask=loss_mask,
        behaviour=np.where(loss_mask, -0.1 * np.arange(len(tokens)), 0).astype(np.float32),
        advantages=np.where(loss_mask, advantage, 0).astype(np.float32),
        temperature=0.7,
        weight=weight,
        region=np.where(loss_mask, np.arange(len(tokens)) - 2, 9),
    )


def test_a_block_has_rows_side_by_side_with_the_predicting_positions_of_loss_tokens() -> None:
    block = pack(
        [
            example([5, 6, 7], [False, True, True], 2.0, 0.25),
            example([8, 9], [False, True], -1.0, 0.5),
        ]
    )
    assert block.tokens_BT.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert block.source_N.tolist() == [0, 1, 3]
    assert block.target_N.tolist() == [6, 7, 9]
    assert block.behaviour_N.tolist() == pytest.approx([-0.1, -0.2, -0.1])
    assert block.advantages_N.tolist() == [2.0, 2.0, -1.0]
    assert block.temperature_N.tolist() == pytest.approx([0.7, 0.7, 0.7])
    assert block.weight_N.tolist() == [0.25, 0.25, 0.5]
    assert block.region_N.tolist() == [-1, 0, -1]
    assert block.sequence_N.tolist() == [0, 0, 1]


def test_unsampled_tokens_in_the_middle_are_no_targets() -> None:
    block = pack([example([1, 2, 3, 4], [False, True, False, True])])
    assert block.source_N.tolist() == [0, 2]
    assert block.target_N.tolist() == [2, 4]


def test_a_row_without_loss_tokens_has_no_targets() -> None:
    block = pack([example([1, 2], [False, False]), example([3, 4], [False, True])])
    assert block.target_N.tolist() == [4]
    assert block.source_N.tolist() == [2]


def test_rows_of_equal_length_make_one_block_in_their_order() -> None:
    assert plan([30, 30, 30], max_tokens=1000) == [[[0, 1, 2]]]


def test_a_block_is_split_where_padding_costs_more_than_a_block() -> None:
    # Four rows of 100 beside four of 10: together 800 tokens of which 360 are padding, apart 440
    # and one more block (128).
    lengths = [10, 100, 10, 100, 10, 100, 10, 100]
    assert plan(lengths, max_tokens=10_000) == [[[1, 3, 5, 7], [0, 2, 4, 6]]]


def test_a_block_is_not_split_for_a_little_padding() -> None:
    assert plan([10, 12, 11], max_tokens=1000) == [[[1, 2, 0]]]


def test_a_micro_batch_stays_within_the_limit_of_padded_tokens() -> None:
    assert plan([30] * 5, max_tokens=60) == [[[0]], [[1, 2]], [[3, 4]]]


def test_blocks_share_a_micro_batch_up_to_its_limit() -> None:
    lengths = [200, 200, 10, 10]
    assert plan(lengths, max_tokens=420) == [[[0, 1], [2, 3]]]
    assert plan(lengths, max_tokens=419) == [[[0, 1]], [[2, 3]]]


def test_a_row_longer_than_the_limit_is_a_micro_batch_by_itself() -> None:
    assert plan([50, 500, 50], max_tokens=100) == [[[1]], [[0, 2]]]


@pytest.mark.parametrize("seed", range(40))
def test_the_blocks_cost_the_least_of_all_divisions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = sorted(rng.integers(1, 300, rng.integers(1, 10)).tolist(), reverse=True)
    max_tokens = int(rng.integers(1, 1_500))

    def cost(cuts: Sequence[tuple[int, int]]) -> float:
        sizes = [(end - start) * lengths[start] for start, end in cuts]
        fits = all(
            size <= max_tokens or end - start == 1
            for size, (start, end) in zip(sizes, cuts, strict=True)
        )
        return sum(sizes) + BLOCK_COST_TOKENS * len(cuts) if fits else np.inf

    divisions = (
        [*pairwise([0, *inner, len(lengths)])]
        for count in range(len(lengths))
        for inner in combinations(range(1, len(lengths)), count)
    )
    assert cost(_cuts(lengths, max_tokens)) == min(map(cost, divisions)) < np.inf


def test_rows_are_compared_only_with_those_that_fit_into_one_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[int] = []
    arange = np.arange

    def counted(start: int, end: int) -> NDArray[np.int64]:
        compared.append(end - start)
        return arange(start, end)

    monkeypatch.setattr(np, "arange", counted)
    blocks = plan([4] * 1_000, max_tokens=40)
    assert {len(block) for (block,) in blocks} == {10}
    assert max(compared) == 10


def test_no_rows_need_no_micro_batch() -> None:
    assert plan([], max_tokens=100) == []


def test_each_row_is_planned_exactly_once_for_any_limit() -> None:
    lengths = [int(length) for length in np.random.default_rng(0).integers(1, 80, 100)]
    for max_tokens in (1, 79, 160, 1000, 100_000):
        planned = plan(lengths, max_tokens)
        rows = [row for blocks in planned for block in blocks for row in block]
        assert sorted(rows) == list(range(100))
        sizes = [
            [len(block) * max(lengths[row] for row in block) for block in blocks]
            for blocks in planned
        ]
        assert all(sum(each) <= max_tokens or len(each) == 1 for each in sizes)


def test_a_packed_block_has_one_row_whose_positions_begin_again() -> None:
    rows = [
        example([5, 6, 7], [False, True, True], 2.0, 0.25),
        example([4], [False]),
        example([8, 9], [False, True], -1.0, 0.5),
    ]
    block = pack(rows, packed=True)
    assert block.tokens_BT.tolist() == [[5, 6, 7, 4, 8, 9]]
    assert block.positions_BT is not None
    assert block.positions_BT.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert block.source_N.tolist() == [0, 1, 4]
    assert block.target_N.tolist() == [6, 7, 9]
    assert block.weight_N.tolist() == [0.25, 0.25, 0.5]
    assert pack(rows).positions_BT is None


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "blocks"),
    [
        ([30, 30, 30], 1000, [[0, 1, 2]]),
        ([3, 9, 5, 1], 10, [[1, 3], [2, 0]]),
        ([3, 9, 5, 2], 10, [[1], [2, 0, 3]]),
        ([12, 4], 10, [[0], [1]]),
        ([5, 5, 5], 10, [[0, 1], [2]]),
        ([], 10, []),
    ],
)
def test_packed_rows_are_added_to_the_first_block_with_room_the_longest_first(
    lengths: list[int], max_tokens: int, blocks: list[list[int]]
) -> None:
    assert plan(lengths, max_tokens, packed=True) == [[block] for block in blocks]
