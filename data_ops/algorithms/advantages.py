"""Compute the advantages of one group from its rewards, as a pure function in float64.

Shape legend: G sequences of one (prompt, policy) group, first attempts and retries of all samples
mixed. Every token that the policy owns in a sequence gets the sequence's one value, which is what
GAE with γ = λ = 1 and no critic gives.
"""

from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from storage.config_model import AnySign, Frozen, NotNegative, OnlyWith, Positive, TokensOrNone

STD_EPS = 1e-5
"""Added to the standard deviation, so that advantages of nearly equal rewards stay small."""
EQUAL_REWARDS_TOLERANCE = 1e-6
"""Rewards are equal when they differ by no more than this share of the largest absolute value among
them.

Above the rounding of float32 scores (6e-8 for each operation), and below what `STD_EPS` treats as a
difference: with rewards of about 1 a spread of 1e-6 is divided by some 1e-5 and gives advantages
below 0.1. With large rewards (and `reward_clip` above them) `STD_EPS` damps nothing: scores of
about 1000 that differ by rounding alone (6e-5) would get advantages of ±0.6.
"""
EQUAL_REWARDS_NEAR_ZERO = 1e-12
"""Rewards that differ by no more than this are equal, whatever their scale: `0.1 + 0.2 - 0.3` is
6e-17, and its absolute value is all that there is to compare with.
"""

Float64 = NDArray[np.float64]


class AdvantageConfig(Frozen):
    """How a (prompt, policy) group's rewards become advantages."""

    baseline: Literal["mean", "leave_one_out"] = "mean"
    """`mean`: GRPO. `leave_one_out`: RLOO."""
    divide_by_std: bool = True
    """GRPO divides by the group's standard deviation (N−1); Dr.GRPO does not."""
    reward_bias: AnySign = 0.0
    reward_scale: AnySign = 1.0
    reward_clip: Positive = 20.0
    """Rewards are clipped to ± this after bias and scale."""
    overlong_tokens: TokensOrNone = 0
    """DAPO's soft overlong penalty: width T of the window before `overlong_max_tokens`; 0 turns it
    off.
    """
    overlong_max_tokens: Annotated[TokensOrNone, OnlyWith("overlong_tokens")] = 0
    """Tokens of an answer from which on the whole penalty counts."""
    overlong_factor: Annotated[NotNegative, OnlyWith("overlong_tokens")] = 1.0
    """The whole penalty: no answer loses more, however long it is."""

    @model_validator(mode="after")
    def _window_within_the_limit(self) -> "AdvantageConfig":
        if self.overlong_tokens > self.overlong_max_tokens:
            raise ValueError(
                f"overlong_tokens {self.overlong_tokens} is wider than overlong_max_tokens "
                f"{self.overlong_max_tokens}: every answer would be penalized; set "
                "overlong_max_tokens to the longest answer, such as sampling.max_new_tokens"
            )
        return self


def group_advantages(
    rewards: Float64, lengths: NDArray[np.int64], config: AdvantageConfig
) -> Float64:
    """Return the advantages [G] of `rewards` [G] for sequences of `lengths` [G] generated tokens.

    1. DAPO's soft overlong penalty (arXiv 2503.14476): r −= clip((len − (L_max − T)) /
       T, 0, 1) · f, where T > 0. A sequence of several turns may be longer than L_max; the public
       AstraFlow implementation has no lower bound of the penalty there.
    2. r = clip((r + bias) · scale, ± clip).
    3. `mean` (GRPO, arXiv 2402.03300): r − mean(r). `leave_one_out` (RLOO, arXiv 2402.14740): r_i −
       mean of the others.
    4. Divided by std(r) + 1e-5; not in Dr.GRPO (arXiv 2503.20783).

    std is that of the G rewards around their mean, with divisor G − 1, for both baselines: the
    group is a sample of what the policy would get for the prompt, of which G − 1 gives the unbiased
    variance. `leave_one_out` divided by it is `mean` times G / (G − 1). The public AstraFlow
    implementation takes the deviation around the means of the others there, which is larger by the
    same factor, so that both baselines give the same. RLOO as published divides by nothing:
    `baseline: leave_one_out` with `divide_by_std: false`.

    Rewards that are equal after step 2 (`rewards_equal`), or a single one, have advantage 0. Raises
    ValueError for other shapes.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if rewards.ndim != 1 or not rewards.size or np.shape(lengths) != rewards.shape:
        raise ValueError(
            f"rewards and lengths must both be [G] with G ≥ 1, not {rewards.shape} and "
            f"{np.shape(lengths)}"
        )
    num_samples = rewards.size
    shaped = shape_rewards(rewards, lengths, config)
    if rewards_equal(shaped):
        return np.zeros(num_samples)
    centred: Float64 = shaped - shaped.mean()
    if config.baseline == "leave_one_out":
        # r_i − (S − r_i) / (G − 1) = (r_i − S / G) · G / (G − 1)
        centred *= num_samples / (num_samples - 1)
    if config.divide_by_std:
        centred /= shaped.std(ddof=1) + STD_EPS
    return centred


def rewards_equal(rewards: Float64) -> bool:
    """Return whether the rewards [G] are all equal up to rounding:
    max − min ≤ max(1e-6 · max |r|, 1e-12).

    True for a single one. Relative, because the rewards' scale is the workflow's choice; `0.3`
    equals `0.1 + 0.2`, and `0` equals `0.1 + 0.2 - 0.3`.
    """
    tolerance = max(EQUAL_REWARDS_TOLERANCE * np.abs(rewards).max(), EQUAL_REWARDS_NEAR_ZERO)
    return bool(np.ptp(rewards) <= tolerance)


def shape_rewards(rewards: Float64, lengths: NDArray[np.int64], config: AdvantageConfig) -> Float64:
    """Return the rewards [G] after the overlong penalty, bias, scale and clip: steps 1 and 2 of
    `group_advantages`.
    """
    if config.overlong_tokens:
        over = np.asarray(lengths) - (config.overlong_max_tokens - config.overlong_tokens)
        share = np.clip(over / config.overlong_tokens, 0.0, 1.0)
        rewards = rewards - share * config.overlong_factor
    scaled = (rewards + config.reward_bias) * config.reward_scale
    return np.asarray(np.clip(scaled, -config.reward_clip, config.reward_clip), dtype=np.float64)
