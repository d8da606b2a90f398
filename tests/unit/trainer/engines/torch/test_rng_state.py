import json
import random

import numpy as np
import torch

from storage.formats.json_objects import build
from trainer.engines.torch import rng_state
from trainer.engines.torch.rng_state import RandomStates


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
    text = json.dumps(state, allow_nan=False).encode()
    rng_state.restore(tensors, build(RandomStates, text, "the state"))
    assert [draws(), draws()] == expected


def test_equal_seeds_give_equal_numbers_and_others_do_not() -> None:
    rng_state.seed_all(5)
    first = draws()
    rng_state.seed_all(5)
    assert draws() == first
    rng_state.seed_all(2**32 + 5)
    assert draws() != first
