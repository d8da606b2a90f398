"""Each expected number is worked out by hand beside its test."""

import numpy as np
import pytest

from data_ops.algorithms.advantages import (
    AdvantageConfig,
    group_advantages,
    rewards_equal,
    shape_rewards,
)

SHORT = np.array([3, 3, 3, 3])


def test_rewards_are_centred_and_divided_by_the_sample_deviation() -> None:
    # mean 0.25, variance (0.75² + 3 · 0.25²) / 3 = 0.25, std 0.5
    values = group_advantages(np.array([1.0, 0.0, 0.0, 0.0]), SHORT, AdvantageConfig())
    assert values.dtype == np.float64
    np.testing.assert_allclose(values, np.array([0.75, -0.25, -0.25, -0.25]) / 0.50001, rtol=1e-12)


def test_without_division_only_the_mean_is_subtracted() -> None:
    values = group_advantages(
        np.array([1.0, 0.0, 0.0, 0.0]), SHORT, AdvantageConfig(divide_by_std=False)
    )
    np.testing.assert_allclose(values, [0.75, -0.25, -0.25, -0.25], rtol=1e-12)


def test_leave_one_out_subtracts_the_mean_of_the_other_rewards() -> None:
    # others of 3: (0 + 6) / 2 = 3; of 0: (3 + 6) / 2 = 4.5; of 6: (3 + 0) / 2 = 1.5
    config = AdvantageConfig(baseline="leave_one_out", divide_by_std=False)
    values = group_advantages(np.array([3.0, 0.0, 6.0]), np.array([1, 1, 1]), config)
    np.testing.assert_allclose(values, [0.0, -4.5, 4.5], rtol=1e-12, atol=1e-12)


def test_leave_one_out_can_be_divided_by_the_deviation_too() -> None:
    # The deviation around the mean 3 with divisor G − 1: sqrt((0 + 9 + 9) / 2) = 3. Divisor G would
    # be 2.449; the deviation around the means of the others, 3, 4.5 and 1.5, would be 4.5.
    values = group_advantages(
        np.array([3.0, 0.0, 6.0]), np.array([1, 1, 1]), AdvantageConfig(baseline="leave_one_out")
    )
    np.testing.assert_allclose(values, np.array([0.0, -4.5, 4.5]) / 3.00001, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_a_group_of_one_has_advantage_zero(baseline: str) -> None:
    config = AdvantageConfig.model_validate({"baseline": baseline})
    assert group_advantages(np.array([1.0]), np.array([5]), config).tolist() == [0.0]


def test_equal_rewards_have_advantage_zero() -> None:
    assert group_advantages(np.array([0.5, 0.5]), np.array([1, 9]), AdvantageConfig()).tolist() == [
        0.0,
        0.0,
    ]


@pytest.mark.parametrize(
    ("rewards", "equal"),
    [
        ([0.3, 0.1 + 0.2], True),
        ([1.0], True),
        ([0.0, 0.0], True),
        ([-0.7, -0.7, -0.1 * 7], True),
        ([0.0, 5e-324], True),
        ([0.0, 0.1 + 0.2 - 0.3], True),  # 6e-17
        ([0.0, 1e-12], True),
        ([0.0, 1.1e-12], False),  # relative above: the scale is the workflow's choice
        ([-1e-12, 1e-12], False),
        ([1.0, 1.0 + 0.9e-6], True),
        ([1.0, 1.0 + 1.1e-6], False),
        ([-1.0, -1.0 - 0.9e-6], True),
        ([-1.0, -1.0 - 1.1e-6], False),
        ([1000.0, 1000.0009], True),
        ([1000.0, 1000.0011], False),
        ([1e-9, 1.1e-9], False),
        ([1.0, -1.0], False),
        ([1.0, 1.0, 1.0, 0.0], False),
    ],
)
def test_rewards_within_a_millionth_of_their_scale_are_equal(
    rewards: list[float], equal: bool
) -> None:
    assert rewards_equal(np.array(rewards)) is equal


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("divide_by_std", [True, False])
@pytest.mark.parametrize("rewards", [[0.3, 0.1 + 0.2], [1000.0, 1000.00006], [0.1] * 7])
def test_rewards_that_differ_by_rounding_have_advantage_zero(
    rewards: list[float], divide_by_std: bool, baseline: str
) -> None:
    config = AdvantageConfig.model_validate(
        {"baseline": baseline, "divide_by_std": divide_by_std, "reward_clip": 1e6}
    )
    assert group_advantages(np.array(rewards), np.full(len(rewards), 3), config).tolist() == [
        0.0
    ] * len(rewards)


def test_equal_rewards_of_unequal_length_differ_by_the_overlong_penalty() -> None:
    # 10 tokens of 10, window 4: 0.5 − 1 = −0.5; 3 tokens: 0.5. Mean 0, std sqrt(0.5) = 0.70710678
    config = AdvantageConfig(overlong_tokens=4, overlong_max_tokens=10)
    values = group_advantages(np.array([0.5, 0.5]), np.array([10, 3]), config)
    np.testing.assert_allclose(values, np.array([-0.5, 0.5]) / 0.7071167811865476, rtol=1e-12)


def test_advantages_of_nearly_equal_rewards_are_bounded() -> None:
    # std of ±1e-9 is 1.414e-9, much smaller than eps 1e-5: 1e-9 / 1.0001414e-5
    values = group_advantages(np.array([1e-9, -1e-9]), np.array([1, 1]), AdvantageConfig())
    np.testing.assert_allclose(values, [9.998586e-5, -9.998586e-5], rtol=1e-6)


def test_the_overlong_penalty_grows_linearly_inside_its_window() -> None:
    # window of 4 before 10 tokens, factor 0.5: 6 tokens: 0; 8: −(8−6)/4·0.5 = −0.25; 10: −0.5; 3:
    # none
    config = AdvantageConfig(overlong_tokens=4, overlong_max_tokens=10, overlong_factor=0.5)
    shaped = shape_rewards(np.array([1.0, 1.0, 1.0, 1.0]), np.array([6, 8, 10, 3]), config)
    np.testing.assert_allclose(shaped, [1.0, 0.75, 0.5, 1.0], rtol=1e-12)


def test_the_overlong_penalty_of_a_longer_sequence_is_the_whole_one() -> None:
    config = AdvantageConfig(overlong_tokens=4, overlong_max_tokens=10, overlong_factor=0.5)
    shaped = shape_rewards(np.array([1.0, 1.0, 1.0]), np.array([10, 11, 2000]), config)
    assert shaped.tolist() == [0.5, 0.5, 0.5]


def test_a_negative_overlong_factor_is_refused() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        AdvantageConfig(overlong_tokens=4, overlong_max_tokens=10, overlong_factor=-1.0)


def test_bias_is_applied_before_scale_and_the_clip_last() -> None:
    # (3 − 1) · 4 = 8; (0 − 1) · 4 = −4; (9 − 1) · 4 = 32, clipped to 20; (−9 − 1) · 4 = −40,
    # clipped to −20
    config = AdvantageConfig(reward_bias=-1.0, reward_scale=4.0)
    shaped = shape_rewards(np.array([3.0, 0.0, 9.0, -9.0]), SHORT, config)
    assert shaped.tolist() == [8.0, -4.0, 20.0, -20.0]


def test_the_penalty_is_scaled_with_the_reward() -> None:
    # 10 tokens of 10, window 4: 1 − 1 = 0, then (0 + 0.5) · 2 = 1
    config = AdvantageConfig(
        overlong_tokens=4, overlong_max_tokens=10, reward_bias=0.5, reward_scale=2.0
    )
    assert shape_rewards(np.array([1.0]), np.array([10]), config).tolist() == [1.0]


@pytest.mark.parametrize(("rewards", "lengths"), [([], []), ([1.0, 2.0], [1]), ([[1.0]], [[1]])])
def test_wrong_shapes_are_refused(rewards: list[float], lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="must both be"):
        group_advantages(np.array(rewards), np.array(lengths), AdvantageConfig())


def test_an_overlong_window_wider_than_the_longest_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="overlong_tokens 10 is wider than overlong_max_tokens 0"):
        AdvantageConfig(overlong_tokens=10)
    assert AdvantageConfig(overlong_tokens=10, overlong_max_tokens=10).overlong_max_tokens == 10
