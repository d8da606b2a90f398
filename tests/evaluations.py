"""Small evaluations for tests."""

from collections.abc import Mapping

import numpy as np

from tasks.evals import Evaluation


def evaluation(
    versions: Mapping[str, int],
    first: tuple[float, ...] = (1, 0),
    final: tuple[float, ...] = (1, 1),
) -> Evaluation:
    """Two problems by default, the second mended by the team."""
    rows = tuple(f"chained_addition/test/0/{index}" for index in range(len(first)))
    return Evaluation(
        dict(versions),
        "held_out",
        "actor_and_verify",
        rows,
        np.array(first, np.float32),
        np.array(final, np.float32),
        1.0,
        0.5,
    )
