from rollout.agents.seeds import derived_seed


def test_a_seed_is_the_same_in_every_process_and_release() -> None:
    assert derived_seed(7, 0, 3) == 3822332221808042564


def test_neighbouring_paths_have_different_seeds_that_fit_63_bits() -> None:
    seeds = [derived_seed(order, sample) for order in range(30) for sample in range(30)]
    assert len(set(seeds)) == 900
    assert min(seeds) >= 0
    assert max(seeds) < 2**63


def test_seeds_depend_on_the_boundaries_between_numbers() -> None:
    assert derived_seed(1, 23) != derived_seed(12, 3)
