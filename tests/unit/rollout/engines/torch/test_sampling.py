"""Sampling against numbers worked out by hand, and against chi-square over fixed seeds."""

import math

import numpy as np
import pytest
import torch

from rollout.engines.torch.sampling import COUNTER_STEP, draw, first_counter, truncate, uniform

LOG = math.log


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([[LOG(p) for p in probabilities]])


def test_splitmix64_gives_its_published_sequence() -> None:
    """Seed 1234567 of the reference implementation, as Rosetta Code lists it."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    counters = torch.tensor([1234567]) + COUNTER_STEP * torch.arange(1, 6)
    assert uniform(counters).tolist() == [(number >> 11) * 2.0**-53 for number in published]


def test_seeds_beyond_64_bits_and_below_zero_are_accepted_and_differ() -> None:
    counters = {first_counter(seed) for seed in (0, 1, 2, -1, 2**63, 2**64 - 2, 10**30)}
    assert len(counters) == 7
    assert all(-(2**63) <= counter < 2**63 for counter in counters)
    assert first_counter(2**64 + 5) == first_counter(5)


def test_a_token_is_sampled_where_the_cumulative_distribution_exceeds_the_number() -> None:
    """Probabilities .1 .2 .3 .4 have sums .1 .3 .6 1."""
    logits = logits_of(0.1, 0.2, 0.3, 0.4).expand(6, 4) + 5.0
    numbers = torch.tensor([0.0, 0.0999, 0.1001, 0.2999, 0.6001, 1 - 2.0**-53], dtype=torch.float64)

    tokens, logprobs = draw(logits, numbers)

    assert tokens.tolist() == [0, 0, 1, 1, 3, 3]
    expected = [LOG(0.1), LOG(0.1), LOG(0.2), LOG(0.2), LOG(0.4), LOG(0.4)]
    assert logprobs.tolist() == pytest.approx(expected, abs=1e-6)


def test_an_excluded_token_is_never_sampled() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(3, 5)
    tokens, logprobs = draw(logits, torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64))
    assert tokens.tolist() == [1, 3, 3]
    assert logprobs.tolist() == pytest.approx([LOG(0.5)] * 3, abs=1e-6)


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, [0.4, 0.3, 0.2, 0.1]),
        (2, 1.0, [4 / 7, 3 / 7, 0, 0]),
        (0, 0.69, [4 / 7, 3 / 7, 0, 0]),  # .4 is too little, .4 + .3 reaches it
        (0, 0.39, [1, 0, 0, 0]),
        (0, 0.71, [4 / 9, 3 / 9, 2 / 9, 0]),
        (3, 0.5, [4 / 7, 3 / 7, 0, 0]),  # of the tokens kept by top-k, .444 is too little
        (3, 0.44, [1, 0, 0, 0]),  # of the tokens kept by top-k, .444 is enough
        (9, 1.0, [0.4, 0.3, 0.2, 0.1]),
    ],
)
def test_truncation_applies_top_k_then_top_p_and_renormalises(
    top_k: int, top_p: float, kept: list[float]
) -> None:
    order = [2, 0, 3, 1]  # so that ranks are not positions
    logits = logits_of(0.4, 0.3, 0.2, 0.1)[:, order]
    truncated = truncate(logits, torch.tensor([top_k]), torch.tensor([top_p]))
    probabilities = torch.softmax(truncated, -1)[0].tolist()
    assert probabilities == pytest.approx([kept[position] for position in order], abs=1e-6)


def test_top_p_reached_exactly_includes_no_further_token() -> None:
    truncated = truncate(torch.zeros(1, 4), torch.tensor([0]), torch.tensor([0.5]))
    assert truncated[0].tolist() == [0.0, 0.0, -math.inf, -math.inf]


def test_ties_at_the_top_k_limit_keep_the_smallest_ids() -> None:
    truncated = truncate(torch.zeros(1, 5), torch.tensor([2]), torch.tensor([1.0]))
    assert truncated[0].tolist() == [0.0, 0.0, -math.inf, -math.inf, -math.inf]


def test_each_row_of_a_batch_has_its_own_truncation() -> None:
    logits = logits_of(0.4, 0.3, 0.2, 0.1).repeat(3, 1)
    truncated = truncate(logits, torch.tensor([1, 0, 0]), torch.tensor([1.0, 0.5, 1.0]))
    assert torch.isfinite(truncated).sum(-1).tolist() == [1, 2, 4]


def test_sampled_tokens_follow_their_probabilities() -> None:
    """Chi-square over 20,000 draws with 5 degrees of freedom: above 20.5 once in a thousand
    times.
    """
    probabilities = np.array([0.02, 0.08, 0.15, 0.2, 0.25, 0.3])
    for stride in ("seeds", "positions"):
        if stride == "seeds":
            counters = torch.tensor([first_counter(seed) for seed in range(20_000)])
        else:
            counters = first_counter(42) + COUNTER_STEP * torch.arange(20_000)
        tokens, _ = draw(logits_of(*probabilities).expand(20_000, 6), uniform(counters))
        counts = np.bincount(tokens.numpy(), minlength=6)
        chi_square = float(
            ((counts - 20_000 * probabilities) ** 2 / (20_000 * probabilities)).sum()
        )
        assert chi_square < 20.5, stride


def test_neighbouring_seeds_and_positions_are_uncorrelated() -> None:
    """Correlation of 10,000 independent pairs has standard deviation 0.01."""
    seeds = uniform(torch.tensor([first_counter(seed) for seed in range(10_001)]))
    positions = uniform(first_counter(7) + COUNTER_STEP * torch.arange(10_001))
    for numbers in (seeds, positions):
        assert abs(float(torch.corrcoef(torch.stack((numbers[1:], numbers[:-1])))[0, 1])) < 0.04
        assert float(numbers.mean()) == pytest.approx(0.5, abs=0.015)


def test_logits_that_are_nan_give_a_log_probability_of_nan() -> None:
    tokens, logprobs = draw(torch.full((1, 4), math.nan), torch.tensor([0.5], dtype=torch.float64))
    assert 0 <= int(tokens) < 4
    assert math.isnan(float(logprobs))
