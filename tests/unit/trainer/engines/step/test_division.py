import numpy as np
import pytest

from trainer.engines.step.division import divide


def test_rows_go_the_longest_first_to_the_rank_with_the_fewest_tokens() -> None:
    # 90 → rank 0; 80 → rank 1; 30 → rank 1 (80 < 90); 25 → rank 0 (90 < 110); 5 → rank 1 (110 < 115)
    assert divide([25, 90, 5, 80, 30], 10_000, 2) == [[[1, 0]], [[3, 4, 2]]]


def test_one_rank_has_all_rows_in_blocks_of_at_most_the_limit() -> None:
    assert divide([10, 10, 10], 20, 1) == [[[0], [1, 2]]]


def test_a_rank_with_fewer_blocks_has_empty_ones_at_its_end() -> None:
    # Rank 0 has 40 and no more; rank 1 has 20, 10 and 10, of which a block holds 20.
    assert divide([10, 20, 40, 10], 20, 2) == [[[2], []], [[1], [0, 3]]]


def test_a_rank_without_rows_has_empty_blocks_only() -> None:
    assert divide([3], 100, 3) == [[[0]], [[]], [[]]]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_each_row_has_one_rank_and_no_rank_has_a_row_more_than_another(num_ranks: int) -> None:
    lengths = np.random.default_rng(1).integers(1, 200, 40).tolist()
    divided = divide(lengths, 256, num_ranks)
    assert sorted(row for blocks in divided for block in blocks for row in block) == list(range(40))
    assert len({len(blocks) for blocks in divided}) == 1
    tokens = [sum(lengths[row] for block in blocks for row in block) for blocks in divided]
    assert max(tokens) - min(tokens) <= max(lengths)


def test_packed_rows_of_a_rank_share_blocks_whatever_their_lengths() -> None:
    assert divide([9, 5, 3, 1], 10, 2, packed=True) == [[[0]], [[1, 2, 3]]]
