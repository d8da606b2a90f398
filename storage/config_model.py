"""The base class of every configuration model, and the number types of its fields. Free of torch.

A bound is far beyond any real use: it rejects what would overflow, fill the memory or never end,
and coarse typing errors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


class Frozen(BaseModel):
    """Frozen, every float finite, and an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


GIVEN: Final = None
"""In place of a value in `OnlyWith`: any value but null, 0 and the empty text."""


@dataclass(frozen=True)
class OnlyWith:
    """Mark a field that has an effect only with a certain value of another field of its model.

    Example: `constant_length: Annotated[Tokens | None, OnlyWith("aggregate", "constant")] = None`.
    A recipe that sets the one without the other is refused (`tasks/recipes/checks.py`). Fields that
    belong to one of several alternatives as a whole are a union instead
    (`storage/config_union.py`).
    """

    key: str
    value: Any = GIVEN

    def holds(self, section: Mapping[str, Any]) -> bool:
        """Return whether the settings of a section give the marked field an effect."""
        value = section.get(self.key)
        return bool(value) if self.value is GIVEN else value == self.value

    @property
    def words(self) -> str:
        """What to write in a recipe: `aggregate: constant`, or the key alone for any value."""
        return self.key if self.value is GIVEN else f"{self.key}: {self.value}"


def _no_truth(value: Any) -> Any:
    """Python takes true for 1; a person who writes it did not mean a number."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {str(value).lower()}")
    return value


def _no_tiny_temperature(value: float) -> float:
    if 0 < value < TEMPERATURE_MIN:
        raise ValueError(f"must be 0 (greedy), or at least {TEMPERATURE_MIN:g}")
    return value


TEMPERATURE_MIN, TEMPERATURE_MAX = 1e-12, 1e12
"""Of sampling, where it is not 0 (greedy): logits in float32 are divided by it."""
_Number = BeforeValidator(_no_truth)

Steps: TypeAlias = Annotated[int, _Number, Field(ge=1, le=1_000_000)]
"""Training steps or versions. A million steps of ten seconds take four months, and the eight digits
in the names of objects leave room for a hundred orders to each step.
"""
Count: TypeAlias = Annotated[int, _Number, Field(ge=1, le=1_000_000)]
"""How many of something; at least one."""
CountOrNone: TypeAlias = Annotated[int, _Number, Field(ge=0, le=1_000_000)]
"""How many of something; 0 for none."""
Rows: TypeAlias = Annotated[int, _Number, Field(ge=1, le=1_000_000_000)]
"""Rows of a data set."""
Tokens: TypeAlias = Annotated[int, _Number, Field(ge=1, le=100_000_000)]
"""Tokens of a context, an answer or a batch."""
TokensOrNone: TypeAlias = Annotated[int, _Number, Field(ge=0, le=100_000_000)]
Width: TypeAlias = Annotated[int, _Number, Field(ge=2, le=65_536)]
"""A dimension of a model's tensors."""
Layers: TypeAlias = Annotated[int, _Number, Field(ge=1, le=1_024)]
"""Layers of a model, or heads of one."""
Threads: TypeAlias = Annotated[int, _Number, Field(ge=1, le=1_024)]
Megabytes: TypeAlias = Annotated[int, _Number, Field(ge=64, le=16_777_216)]
"""Of memory: 64 MB to 16 TB."""
Seed: TypeAlias = Annotated[int, _Number, Field(ge=0, le=2**63 - 1)]
Seconds: TypeAlias = Annotated[float, _Number, Field(gt=0, le=2_592_000)]
"""A time to wait or to pause; at most thirty days."""
SecondsOrNone: TypeAlias = Annotated[float, _Number, Field(ge=0, le=2_592_000)]
Positive: TypeAlias = Annotated[float, _Number, Field(gt=0, le=1e12)]
"""A factor or a limit."""
NotNegative: TypeAlias = Annotated[float, _Number, Field(ge=0, le=1e12)]
Temperature: TypeAlias = Annotated[
    float, _Number, Field(ge=0, le=TEMPERATURE_MAX), AfterValidator(_no_tiny_temperature)
]
AnySign: TypeAlias = Annotated[float, _Number, Field(ge=-1e12, le=1e12)]
Share: TypeAlias = Annotated[float, _Number, Field(gt=0, le=1)]
Decay: TypeAlias = Annotated[float, _Number, Field(ge=0, lt=1)]
"""Of a running mean."""
