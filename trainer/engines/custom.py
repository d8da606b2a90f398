"""A train engine by import path (contract: `docs/extending/train_engine.md`)."""

import math
import reprlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from storage.errors import AstraFlowError, CorruptError
from storage.formats.json_objects import dump, parse
from storage.formats.safetensors import check_bits
from storage.import_path import foreign_code
from storage.records.batches import Batch
from storage.records.types import Json
from storage.records.weights import HostTensor
from trainer.config import TrainConfig
from trainer.device_errors import device_errors

TOKENS = "trainer/tokens"
"""The metric that every step has."""


class CustomTrainEngine:
    """A user's engine. What its constructor and methods raise, or return against the contract, is a
    ConfigError. Errors of a device, and a CorruptError that names a row or the tensors, are raised
    as they are.
    """

    def __init__(
        self, engine_class: Any, config: TrainConfig, model_config: Json, seed: int
    ) -> None:
        self._name = config.engine
        with self._calls("the constructor"):
            self._engine = engine_class(config, model_config, seed)

    def set_weights(self, tensors: Mapping[str, HostTensor]) -> None:
        with self._calls("set_weights"):
            self._engine.set_weights(tensors)

    def set_reference(self, tensors: Mapping[str, HostTensor]) -> None:
        with self._calls("set_reference"):
            self._engine.set_reference(tensors)

    def step(self, batch: Batch) -> dict[str, float]:
        with self._calls("step"):
            return _checked_metrics(self._engine.step(batch))

    def weights(self) -> dict[str, HostTensor]:
        with self._calls("weights"):
            return _checked_tensors(self._engine.weights())

    def save(self) -> tuple[dict[str, HostTensor], Json]:
        with self._calls("save"):
            saved = self._engine.save()
            if not isinstance(saved, tuple) or len(saved) != 2:
                raise TypeError(f"it must return (tensors, state), not a {type(saved).__name__}")
            return _checked_tensors(saved[0]), _checked_state(saved[1])

    def load(self, tensors: Mapping[str, HostTensor], state: Json) -> None:
        """Restore a state. Errors are raised as they are: the caller names the checkpoint."""
        with self._calls("load", Exception):
            self._engine.load(tensors, state)

    def _calls(self, method: str, *passed: type[Exception]) -> AbstractContextManager[None]:
        where = f"train.engine: {method} of {self._name}"
        return foreign_code(where, CorruptError, *device_errors(), *passed)


def _checked_metrics(result: object) -> dict[str, float]:
    """Return metrics by name as floats; TypeError or ValueError for others than readers accept."""
    if not isinstance(result, Mapping):
        raise TypeError(f"it must return metrics by name, not {type(result).__name__}")
    metrics = {name: _number(name, value) for name, value in result.items()}
    if metrics.get(TOKENS, -1.0) < 0:
        raise ValueError(f"it must return {TOKENS}, the number of loss tokens")
    return metrics


def _number(name: object, value: Any) -> float:
    _check_name(name)
    try:
        number = math.nan if isinstance(value, str | bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"the metric {name} must be a finite number, not {reprlib.repr(value)}")
    return number


def _checked_tensors(result: object) -> dict[str, HostTensor]:
    """Return tensors by name; TypeError or ValueError for anything else."""
    if not isinstance(result, Mapping):
        raise TypeError(f"it must return tensors by name, not {type(result).__name__}")
    if not result:
        raise ValueError("it must return at least one tensor")
    for name, tensor in result.items():
        _check_name(name)
        if not isinstance(tensor, HostTensor):
            raise TypeError(f"{name} must be a HostTensor, not {type(tensor).__name__}")
        check_bits(name, tensor)
    return dict(result)


def _checked_state(state: object) -> Json:
    """Return a state; TypeError or ValueError for one that would be read as another, or not."""
    if not isinstance(state, dict):
        raise TypeError(f"its state must be a dict of JSON, not {type(state).__name__}")
    try:
        parse(dump({"state": {"engine": state}}), "its state")  # at its depth in a checkpoint
    except AstraFlowError as error:
        raise ValueError(str(error)) from error
    _check_json(state, "its state")
    return state


def _check_json(value: object, where: str) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}, which is no text")
            _check_json(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for item in value:
            _check_json(item, where)
    elif isinstance(value, bytes) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{where} has {reprlib.repr(value)}, which JSON does not have")


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name.isprintable():
        raise TypeError(f"the name {name!r} must be printable text")
