"""What the trainer service says about a mismatch of sampler and trainer above a limit.

metrics of a step ──▶ Finding ──▶ above warn: a note and a warning
                              ──▶ above stop: a ConfigError, which fails the run
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.losses.mismatch import PREFIX, STATISTIC, region_of


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The mismatch of one step: mean |Δ log p|, and the region in which it is largest.

    Example: `Finding(value=0.02, tokens=512, region="eu", region_value=0.05)`.
    """

    value: float
    tokens: int
    region: str = ""
    """Empty where the batch does not name its regions."""
    region_value: float = 0.0

    @classmethod
    def of(cls, metrics: Mapping[str, float]) -> "Finding | None":
        """Return the finding of a step's metrics; None where the engine measured nothing.

        Metrics that are not finite are left out: with tokens and without a mean it is infinite.
        """
        if not metrics.get(f"{PREFIX}tokens"):
            return None
        value = metrics.get(PREFIX + STATISTIC, math.inf)
        by_region = {
            region: of_region for name, of_region in metrics.items() if (region := region_of(name))
        }
        region = max(by_region, key=lambda name: by_region[name], default="")
        return cls(
            value=value,
            tokens=int(metrics.get(f"{PREFIX}tokens", 0)),
            region=region,
            region_value=by_region.get(region, 0.0),
        )

    def warning(self, policy: str, step: int, limit: float) -> str:
        """Return the note of a step above `mismatch.warn`."""
        return f"{self._sentence(policy, step)}, above train.mismatch.warn {limit:g}"

    def error(self, policy: str, step: int, limit: float) -> str:
        """Return the error of a step above `mismatch.stop`, and what to do."""
        train = f"policies.{policy}.train"
        return (
            f"{self._sentence(policy, step)}, above {train}.mismatch.stop {limit:g}. Version "
            f"{step} was not published. Make the two compute alike (rollout.engine.dtype, "
            f"{train}.publish_dtype, top_p and top_k off), correct for the difference with "
            f"{train}.loss.correction (tis_token, icepop, rejection), or raise the limit; then "
            "start a new run: this one keeps its settings, and stops here again when it is resumed"
        )

    def _sentence(self, policy: str, step: int) -> str:
        where = f", {self.region_value:.3g} in region {self.region}" if self.region else ""
        return (
            f"step {step} of {policy}: sampler and trainer disagree on log-probabilities by "
            f"{self.value:.3g} a token (mean of {self.tokens} tokens of version {step - 1}{where})"
        )
