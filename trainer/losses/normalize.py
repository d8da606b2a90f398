"""Batch normalisation of advantages. Pure; knows nothing of rows, groups or policies.

Shape legend: N loss tokens of one whole batch.
"""

import numpy as np
from numpy.typing import NDArray

EPS = 1e-5
"""Added to the standard deviation, as in the published recipes."""


def normalize(values_N: NDArray[np.float32]) -> NDArray[np.float32]:
    """(x − mean) / (std + 1e-5) over all loss tokens of a batch; mean and std (divisor N) in float64.

    The whole batch, not a minibatch: how it is split must not change what a token is worth. The divisor is N, not
    N − 1: the values are all there are and not a sample of more, and their mean square becomes 1 whatever N is. (The
    public AstraFlow implementation divides by N − 1, which makes values smaller by the factor √(1 − 1/N), 5e-5 for
    10,000 tokens.) Empty stays empty; one value, or equal ones, become 0.
    """
    if values_N.ndim != 1 or values_N.dtype != np.float32:
        raise ValueError(f"expected float32 [N], found {values_N.dtype} {list(values_N.shape)}")
    if values_N.size == 0:
        return values_N
    wide_N: NDArray[np.float64] = values_N.astype(np.float64)
    normal_N: NDArray[np.float32] = ((wide_N - wide_N.mean()) / (wide_N.std() + EPS)).astype(np.float32)
    return normal_N
