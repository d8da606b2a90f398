import json
import random

import numpy as np
import torch

from trainer.engines.torch import rng_state


def draws() -> list[float]:
    """Numbers of every generator; after an odd number of Gaussians, Python's and NumPy's states
    have one cached.
    """
    return [
        random.gauss(0, 1),
        random.random(),
        float(np.random.standard_normal()),
        float(np.random.random()),
        float(torch.randn(1)),
    ]


def test_restored_generators_continue_their_sequence() -> None:
    rng_state.seed_all(5)
    draws()
    tensors, state = rng_state.capture()
    expected = [draws(), draws()]
    rng_state.seed_all(6)
    draws()
    rng_state.restore(tensors, json.loads(json.dumps(state, allow_nan=False)))
    assert [draws(), draws()] == expected


def test_equal_seeds_give_equal_numbers_and_others_do_not() -> None:
    rng_state.seed_all(5)
    first = draws()
    rng_state.seed_all(5)
    assert draws() == first
    rng_state.seed_all(2**32 + 5)
    assert draws() != first
