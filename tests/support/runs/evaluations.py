"""Small evaluations for tests."""

from collections.abc import Mapping

import numpy as np

from storage.run.evaluations import Evaluation


def evaluation(
    versions: Mapping[str, int],
    first: tuple[float, ...] = (1, 0),
    final: tuple[float, ...] = (1, 1),
) -> Evaluation:
    """Two problems by default; the team corrects the second one."""
    rows = tuple(f"chained_addition/test/0/{index}" for index in range(len(first)))
    return Evaluation(
        versions=dict(versions),
        dataset="held_out",
        workflow="actor_and_verify",
        rows=rows,
        first_attempt=np.array(first, np.float32),
        final=np.array(final, np.float32),
        created_s=1.0,
        seconds=0.5,
    )
