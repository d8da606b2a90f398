"""Rewards of one group to advantages, as a pure function in float64.

Shape legend: G sequences of one (prompt, policy) group, first attempts and retries of all samples mixed. This module
knows nothing of tokens: every token that the policy owns in a sequence gets the sequence's one value, which is what
GAE with γ = λ = 1 and no critic gives.
"""

import numpy as np
from numpy.typing import NDArray

from data_ops.config import AdvantageConfig

STD_EPS = 1e-5
"""Added to the standard deviation, so that a group with (almost) equal rewards does not explode."""

Float64 = NDArray[np.float64]


def group_advantages(rewards: Float64, lengths: NDArray[np.int64], config: AdvantageConfig) -> Float64:
    """Advantages [G] of `rewards` [G] for sequences of `lengths` [G] generated tokens.

    1. DAPO's soft overlong penalty (arXiv 2503.14476): r += min(−(len − (L_max − T)) / T · f, 0), where T > 0.
    2. r = clip((r + bias) · scale, ± clip).
    3. `mean` (GRPO, arXiv 2402.03300): r − mean(r). `leave_one_out` (RLOO, arXiv 2402.14740): r_i − mean of the others.
    4. Divided by std(r) + 1e-5, std with G − 1 degrees of freedom; not in Dr.GRPO (arXiv 2503.20783).

    A group of one has std 1 and, having nothing to be compared with, advantage 0. Raises ValueError for other shapes.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if rewards.ndim != 1 or not rewards.size or np.shape(lengths) != rewards.shape:
        raise ValueError(f"rewards and lengths must both be [G] with G ≥ 1, not {rewards.shape} and {np.shape(lengths)}")
    num_samples = rewards.size
    shaped = shape_rewards(rewards, lengths, config)
    if num_samples == 1:
        return np.zeros(1)
    centred: Float64 = shaped - shaped.mean()
    if config.baseline == "leave_one_out":
        # r_i − (S − r_i) / (G − 1) = (r_i − S / G) · G / (G − 1)
        centred *= num_samples / (num_samples - 1)
    if config.divide_by_std:
        centred /= shaped.std(ddof=1) + STD_EPS
    return centred


def shape_rewards(rewards: Float64, lengths: NDArray[np.int64], config: AdvantageConfig) -> Float64:
    """Rewards [G] after the overlong penalty, bias, scale and clip: steps 1 and 2 of `group_advantages`."""
    if config.overlong_tokens:
        over = np.asarray(lengths) - (config.overlong_max_tokens - config.overlong_tokens)
        rewards = rewards + np.minimum(-over / config.overlong_tokens * config.overlong_factor, 0.0)
    scaled = (rewards + config.reward_bias) * config.reward_scale
    return np.asarray(np.clip(scaled, -config.reward_clip, config.reward_clip), dtype=np.float64)
