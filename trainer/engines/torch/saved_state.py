"""The state that an engine saves, in one form for all built-in engines and any number of ranks.

tensors   model/{tensor}   optimizer/{parameter}/{moment}   rng/{generator}
JSON      SavedState
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from storage.errors import CorruptError
from storage.formats.json_objects import build, dump
from storage.records.numbers import QUANTITY_MAX
from storage.records.types import Json
from storage.records.weights import HostTensor
from trainer.engines.torch import rng_state
from trainer.engines.torch.rng_state import RandomStates

STATE_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class OptimizerProgress:
    """What is no tensor in the state of the optimizers.

    Example: `updates={"norm": 7}` after seven steps of AdamW.
    """

    updates: Mapping[str, Annotated[int, Field(ge=0, le=QUANTITY_MAX)]]
    """Parameter → its optimizer steps, which optimizers count as floats; parameters whose optimizer
    counts none are left out.
    """
    moments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Parameter → names of its tensors, for all but those that have the moments of AdamW."""
    numbers: Mapping[str, Mapping[str, int | float]] = field(default_factory=dict)
    """Parameter → numbers that a custom optimizer keeps for it."""


@dataclass(frozen=True, kw_only=True)
class SavedState(OptimizerProgress):
    """The JSON of a saved state; `moments` and `numbers` are left out where they are empty."""

    format: Literal[1]
    rng: RandomStates


def with_random_states(
    tensors: Mapping[str, HostTensor], progress: OptimizerProgress
) -> tuple[dict[str, HostTensor], Json]:
    """Return the whole state of an engine: `tensors` of model and optimizer, and what is missing.

    The random states are those of this process.
    """
    random_tensors, random_state = rng_state.capture()
    generators = {f"rng/{name}": tensor for name, tensor in random_tensors.items()}
    state: Json = {"format": STATE_FORMAT, "updates": dict(progress.updates), "rng": random_state}
    if progress.moments:
        state["moments"] = {name: list(each) for name, each in progress.moments.items()}
    if progress.numbers:
        state["numbers"] = {name: dict(each) for name, each in progress.numbers.items()}
    return {**tensors, **generators}, state


def read_state(state: Json) -> SavedState:
    """Check and build the JSON of a saved state; CorruptError for another format or form."""
    if state.get("format") != STATE_FORMAT:
        raise CorruptError(
            f"the engine's state has format {state.get('format')!r}; this engine reads "
            f"{STATE_FORMAT}"
        )
    return build(SavedState, dump(state), "the engine's state")


def below(prefix: str, tensors: Mapping[str, HostTensor]) -> dict[str, HostTensor]:
    """Return the tensors of one part, such as `model/`, without the prefix."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
