"""The contract of a gate's test: from two arrays of accuracies to bounds of the gain and a p value.

P: problems.
"""

from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from storage.import_path import PluginKind

Accuracies: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """Bounds of the gain, candidate minus champion. Example: `Comparison(0.01, 0.09, 0.004)`."""

    low: float
    """The gain is at least this with the confidence asked for (one-sided)."""
    high: float
    """The gain is at most this with the confidence asked for (one-sided)."""
    p_value: float
    """Probability of this gain or a larger one if the two did not differ (one-sided)."""


class GateTest(Protocol):
    """A paired test. A pure function: the same arrays always give the same result."""

    def compare(
        self, champion_P: Accuracies, candidate_P: Accuracies, confidence: float
    ) -> Comparison:
        """Compare two teams on the same problems.

        Args:
            champion_P: [P] mean over the samples of each problem, in [0, 1]; at least one problem.
            candidate_P: [P] the same for the candidate.
            confidence: that of each bound, such as 0.95.
        """
        ...


GATE_TEST: Final = PluginKind("gate test", GateTest, "docs/extending/gate_tests.md")
