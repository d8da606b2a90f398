"""The settings of the gate."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, model_validator

from storage.config_model import Count, Frozen, ShareOrNone
from storage.records.promotions import ROWS_MAX
from tasks.promotion.gate import GateTestConfig
from tasks.promotion.gate.outcomes import POOLED
from tasks.promotion.gate.paired_bootstrap import PairedBootstrap


class GateConfig(Frozen):
    """What a candidate must show to become the champion. The rule is that of `judgement.judge`."""

    test: GateTestConfig = PairedBootstrap()
    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.95
    """Confidence of each bound; 1 minus it is the largest p value of a gain."""
    min_gain: ShareOrNone = 0.0
    """The gain in accuracy must be at least this with the confidence; 0: any gain."""
    gain_on: str = POOLED
    """The data set that must gain; `pooled`: the problems of all data sets together."""
    max_loss: ShareOrNone = 0.05
    """A larger loss in accuracy must be excluded with the confidence, on each data set."""
    max_loss_on: Annotated[dict[str, ShareOrNone], Field(max_length=ROWS_MAX)] = {}
    """Data set → its own `max_loss`."""
    min_problems: Count = 50
    """With fewer compared problems of a data set, nothing is promoted."""

    @model_validator(mode="after")
    def _enough_resamples(self) -> "GateConfig":
        if not isinstance(self.test, PairedBootstrap):
            return self
        smallest_p = 1 / (1 + self.test.resamples)
        if smallest_p > 1 - self.confidence:
            raise ValueError(
                f"{self.test.resamples} resamples give no p value below {smallest_p:.2g}, and "
                f"confidence {self.confidence:g} needs {1 - self.confidence:.2g}; set "
                "test.resamples higher"
            )
        return self

    def gaining(self, datasets: Sequence[str]) -> str:
        """Return which of these data sets must gain: a single one, or `gain_on`."""
        return datasets[0] if self.gain_on == POOLED and len(datasets) == 1 else self.gain_on

    def allowed_loss(self, dataset: str) -> float:
        """Return the allowed loss of a data set."""
        return self.max_loss_on.get(dataset, self.max_loss)
