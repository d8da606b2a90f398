"""The base class of all configuration models, and the number types of their fields.

The bounds are far beyond real use. They reject gross typing errors, and values that would overflow,
fill the memory or never end.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Final, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


class Frozen(BaseModel):
    """A frozen model that rejects unknown keys and floats that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class _Presence(Enum):
    GIVEN = "given"
    ABSENT = "absent"


GIVEN: Final = _Presence.GIVEN
"""As the value of `OnlyWith`: any value except null, false, 0 and empty ones."""
ABSENT: Final = _Presence.ABSENT
"""As the value of `OnlyWith`: the opposite of `GIVEN`."""


@dataclass(frozen=True)
class OnlyWith:
    """Marks a field that has an effect only with certain values of another field of its model.

    Example: `constant_length: Annotated[Tokens | None, OnlyWith("aggregate", "constant")] = None`;
    a tuple stands for any of its values. A field with several marks needs all of them. A recipe
    that sets the marked field where it has no effect is rejected (`tasks/recipes/schema.py`). For
    sets of fields that exclude each other, use a union (`storage/config_union.py`).
    """

    key: str
    """The other field; with a dot, a field of a section beside the marked one: `sglang.urls`."""
    value: Any = GIVEN
    where: "OnlyWith | None" = None
    """The mark counts only where this one is met, such as with one engine."""
    then: Any = GIVEN
    """The value of the marked field that says what happens without its effect: it is accepted."""

    @property
    def keys(self) -> Iterator[str]:
        """All keys on which the effect depends."""
        if self.where is not None:
            yield from self.where.keys
        yield self.key

    def is_met(self, read: Callable[[str], Any]) -> bool:
        """Return whether the marked field has an effect; `read` returns the value of a key."""
        if self.where is not None and not self.where.is_met(read):
            return True
        value = read(self.key)
        if isinstance(self.value, _Presence):
            return bool(value) is (self.value is GIVEN)
        return value in self._values

    def why(self, read: Callable[[str], Any]) -> str:
        """Return why the field has no effect. Example: `has no effect with aggregate: token_mean;
        leave it out, or set aggregate: constant`.
        """
        value = read(self.key)
        selected = f"without {self.key}" if value is None else f"with {self.key}: {_word(value)}"
        remedy = f"set {self.key}: {' or '.join(map(_word, self._values))}"
        if self.value is GIVEN:
            remedy = f"set {self.key}"
        elif self.value is ABSENT:
            selected, remedy = f"with {self.key}", f"leave {self.key} out"
        if self.where is not None:
            selected += f" and {self.where.key}: {_word(read(self.where.key))}"
        return no_effect(selected, remedy)

    @property
    def _values(self) -> tuple[Any, ...]:
        return self.value if isinstance(self.value, tuple) else (self.value,)


def no_effect(selected: str, remedy: str) -> str:
    """Return the fault of a setting that is ignored."""
    return f"has no effect {selected}; leave it out, or {remedy}"


def _word(value: Any) -> str:
    """Return a value as YAML has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_not_bool(value: Any) -> Any:
    """Reject true and false, which Python would convert to 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {str(value).lower()}")
    return value


def _check_temperature(value: float) -> float:
    if 0 < value < TEMPERATURE_MIN:
        raise ValueError(f"must be 0 (greedy), or at least {TEMPERATURE_MIN:g}")
    return value


def _check_normal(value: float) -> float:
    if value < FLOAT32_MIN:
        raise ValueError(f"must be at least {FLOAT32_MIN:g}: float32 takes smaller numbers as 0")
    return value


def _check_distinct(gpus: tuple[int, ...]) -> tuple[int, ...]:
    twice = [gpu for gpu, count in Counter(gpus).items() if count > 1]
    if twice:
        raise ValueError(f"names GPU {min(twice)} twice; name each GPU once")
    return gpus


TEMPERATURE_MIN, TEMPERATURE_MAX = 1e-12, 1e12
"""Limits of a sampling temperature that is not 0 (greedy): float32 logits are divided by it."""
FLOAT32_MIN = 1e-37
"""Above the smallest normal number of float32, 1.2e-38: a smaller divisor may be 0 there."""
_Number = BeforeValidator(_check_not_bool)

Steps: TypeAlias = Annotated[int, _Number, Field(ge=1, le=1_000_000)]
"""Training steps or versions. A million steps of ten seconds take four months, and the eight digits
in the names of objects suffice for a hundred orders in each step.
"""
Count: TypeAlias = Annotated[int, _Number, Field(ge=1, le=1_000_000)]
"""A number of things; at least one."""
CountOrNone: TypeAlias = Annotated[int, _Number, Field(ge=0, le=1_000_000)]
"""A number of things; 0 for none."""
Attempts: TypeAlias = Annotated[int, _Number, Field(ge=1, le=9_999)]
"""Attempts at one thing; their number has four digits in the names of objects."""
Rows: TypeAlias = Annotated[int, _Number, Field(ge=1, le=1_000_000_000)]
"""Rows of a data set."""
RowsOrNone: TypeAlias = Annotated[int, _Number, Field(ge=0, le=1_000_000_000)]
Tokens: TypeAlias = Annotated[int, _Number, Field(ge=1, le=100_000_000)]
"""Tokens of a context, a completion or a batch."""
Context: TypeAlias = Annotated[int, _Number, Field(ge=2, le=100_000_000)]
"""Tokens of a prompt and its completion: at least one of each."""
TokensOrNone: TypeAlias = Annotated[int, _Number, Field(ge=0, le=100_000_000)]
Width: TypeAlias = Annotated[int, _Number, Field(ge=2, le=65_536)]
"""A dimension of a model's tensors."""
Layers: TypeAlias = Annotated[int, _Number, Field(ge=1, le=1_024)]
"""Layers or heads of a model."""
Devices: TypeAlias = Annotated[int, _Number, Field(ge=1, le=64)]
"""Devices of one machine that work together, or processes, where each has one."""
Threads: TypeAlias = Annotated[int, _Number, Field(ge=1, le=1_024)]
Megabytes: TypeAlias = Annotated[int, _Number, Field(ge=64, le=16_777_216)]
"""Memory: 64 MB to 16 TB."""
Bytes: TypeAlias = Annotated[int, _Number, Field(ge=1, le=2**40)]
"""Size of files: up to 1 TiB."""
Seed: TypeAlias = Annotated[int, _Number, Field(ge=0, le=2**63 - 1)]
Seconds: TypeAlias = Annotated[float, _Number, Field(ge=0.001, le=2_592_000)]
"""A duration; a millisecond to thirty days. A service polls as often as an interval says."""
Hours: TypeAlias = Annotated[float, _Number, Field(gt=0, le=87_600)]
"""A duration; at most ten years."""
SecondsOrNone: TypeAlias = Annotated[float, _Number, Field(ge=0, le=2_592_000)]
Positive: TypeAlias = Annotated[float, _Number, Field(gt=0, le=1e12)]
"""A factor or a limit."""
PositiveFloat32: TypeAlias = Annotated[Positive, AfterValidator(_check_normal)]
"""A positive number that float32 does not take as 0, as it may be a divisor."""
RatioLimit: TypeAlias = Annotated[float, _Number, Field(gt=1, le=1e6)]
"""A limit of the ratio of two probabilities, above the 1 of equal ones."""
NotNegative: TypeAlias = Annotated[float, _Number, Field(ge=0, le=1e12)]
Temperature: TypeAlias = Annotated[
    float, _Number, Field(ge=0, le=TEMPERATURE_MAX), AfterValidator(_check_temperature)
]
AnySign: TypeAlias = Annotated[float, _Number, Field(ge=-1e12, le=1e12)]
Share: TypeAlias = Annotated[float, _Number, Field(gt=0, le=1)]
ShareOrNone: TypeAlias = Annotated[float, _Number, Field(ge=0, le=1)]
Decay: TypeAlias = Annotated[float, _Number, Field(ge=0, lt=1)]
"""Decay of a running mean."""
_Gpu: TypeAlias = Annotated[int, _Number, Field(ge=0, le=1_023)]
Gpus: TypeAlias = Annotated[tuple[_Gpu, ...], AfterValidator(_check_distinct)]
"""GPUs, counted from 0 among those that CUDA_VISIBLE_DEVICES leaves to a process; each once."""
