"""A train engine by import path: what it raises, or returns against the contract, is named."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from storage.errors import ConfigError, CorruptError, TransientError
from storage.records.batches import Batch, SequenceKey
from storage.records.types import Json
from storage.records.weights import HostTensor
from storage.run import checkpoints
from storage.run.checkpoints import CheckpointState
from storage.store.object_store import ObjectStore
from tests.support.runs.builders import batch, row
from trainer.config import TrainConfig
from trainer.engines.engine import ReferenceEngine, TrainEngine, make_engine

CONFIG = TrainConfig(engine=f"{__name__}:Scripted")
BATCH = batch(row(SequenceKey(0, 0, 0, 0)), step=1)
WEIGHT = HostTensor("F32", (2,), np.zeros(2, np.uint32))
METRICS = {"trainer/tokens": 3.0}


class Scripted:
    """Does in each method what `SCRIPT` has for it: raises an error, or returns a value."""

    def __init__(self, config: TrainConfig, model_config: Json, seed: int) -> None:
        self._do("the constructor")

    def set_weights(self, tensors: Mapping[str, HostTensor]) -> None:
        self._do("set_weights")

    def set_reference(self, tensors: Mapping[str, HostTensor]) -> None:
        self._do("set_reference")

    def step(self, batch: Batch) -> Any:
        return self._do("step", METRICS)

    def weights(self) -> Any:
        return self._do("weights", {"weight": WEIGHT})

    def save(self) -> Any:
        return self._do("save", ({"weight": WEIGHT}, {"count": 1}))

    def load(self, tensors: Mapping[str, HostTensor], state: Json) -> None:
        self._do("load")

    def _do(self, method: str, otherwise: object = None) -> Any:
        value = SCRIPT.get(method, otherwise)
        if isinstance(value, BaseException):
            raise value
        return value


SCRIPT: dict[str, object] = {}


@pytest.fixture(autouse=True)
def _empty_script() -> None:
    SCRIPT.clear()


def call(method: str) -> Any:
    """Build the engine and call one method of it."""
    engine = make_engine(CONFIG, {}, 0)
    assert isinstance(engine, ReferenceEngine)
    calls: dict[str, Callable[[], Any]] = {
        "the constructor": lambda: None,
        "set_weights": lambda: engine.set_weights({"weight": WEIGHT}),
        "set_reference": lambda: engine.set_reference({"weight": WEIGHT}),
        "step": lambda: engine.step(BATCH),
        "weights": engine.weights,
        "save": engine.save,
        "load": lambda: engine.load({"weight": WEIGHT}, {}),
    }
    return calls[method]()


METHODS = ("the constructor", "set_weights", "set_reference", "step", "weights", "save")


def failed(method: str, why: str) -> str:
    return rf"^train\.engine: {method} of {__name__}:Scripted failed: {why}"


def test_what_an_engine_returns_by_the_contract_is_passed_on() -> None:
    engine: TrainEngine = make_engine(CONFIG, {}, 0)
    assert engine.step(BATCH) == METRICS
    assert engine.weights() == {"weight": WEIGHT}
    assert engine.save() == ({"weight": WEIGHT}, {"count": 1})


@pytest.mark.parametrize("method", METHODS)
def test_an_error_of_a_method_names_setting_class_and_method(method: str) -> None:
    for raised, why in ((KeyError("oops"), "KeyError: 'oops'"), (SystemExit(3), "SystemExit: 3")):
        SCRIPT[method] = raised
        with pytest.raises(ConfigError, match=failed(method, why) + "$") as caught:
            call(method)
        assert caught.value.__cause__ is raised


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "raised",
    [
        torch.OutOfMemoryError(),
        torch.AcceleratorError("an illegal memory access"),
        torch.distributed.DistBackendError("a link is lost"),
        MemoryError(),
        CorruptError("row 3"),
        TransientError("rank 1 is lost"),
    ],
)
def test_errors_that_have_a_handler_are_raised_as_they_are(method: str, raised: Exception) -> None:
    SCRIPT[method] = raised
    with pytest.raises(type(raised)) as caught:
        call(method)
    assert caught.value is raised


def test_an_error_of_load_is_left_to_the_service_which_names_the_checkpoint() -> None:
    SCRIPT["load"] = KeyError("n")
    with pytest.raises(KeyError) as caught:
        call("load")
    assert caught.value is SCRIPT["load"]
    SCRIPT["load"] = SystemExit(3)
    with pytest.raises(ConfigError, match=failed("load", "SystemExit: 3")):
        call("load")


TENSORS: list[tuple[object, str]] = [
    (None, "it must return tensors by name, not NoneType"),
    ({}, "it must return at least one tensor"),
    ({"w": torch.zeros(2)}, "w must be a HostTensor, not Tensor"),
    ({3: WEIGHT}, "the name 3 must be printable text"),
    ({"\ud800": WEIGHT}, r"the name '\\ud800' must be printable text"),
    ({"w": replace(WEIGHT, dtype="BF16")}, r"w is BF16 \(2,\), whose bits are uint16; found uint32"),
    ({"w": replace(WEIGHT, shape=(3,))}, r"w is F32 \(3,\), .* found uint32 \(2,\)"),
]  # fmt: skip


@pytest.mark.parametrize(("result", "why"), TENSORS)
def test_weights_that_are_no_host_tensors_are_named(result: object, why: str) -> None:
    SCRIPT["weights"] = result
    with pytest.raises(ConfigError, match=failed("weights", why)):
        call("weights")


@pytest.mark.parametrize(
    ("result", "why"),
    [
        *[((tensors, {}), why) for tensors, why in TENSORS],
        (None, r"it must return \(tensors, state\), not a NoneType"),
        ({"w": WEIGHT}, r"it must return \(tensors, state\), not a dict"),
    ],
)
def test_a_state_whose_tensors_are_no_host_tensors_is_named(result: object, why: str) -> None:
    SCRIPT["save"] = result
    with pytest.raises(ConfigError, match=failed("save", why)):
        call("save")


def nested(depth: int) -> list[Any]:
    """Return a list in a list, and so on."""
    return [nested(depth - 1)] if depth else []


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (None, "its state must be a dict of JSON, not NoneType"),
        ({"a": {1: 2}}, r"its state\.a has the key 1, which is no text"),
        ({"a": [(0.5, b"x")]}, r"its state\.a has b'x', which JSON does not have"),
        ({"a": math.nan}, r"its state\.a has nan, which JSON does not have"),
        ({"a": "\ud800"}, "Error serializing to JSON: .*surrogates not allowed"),
        ({"a": 2**128}, "the value to store has an integer of 129 bits"),
        ({"a": nested(300)}, "Error serializing to JSON: .*depth"),
        ({"a": nested(200)}, "its state is not JSON: recursion limit exceeded"),
    ],
)
def test_a_state_that_would_not_be_read_as_it_is_is_not_saved(state: object, why: str) -> None:
    SCRIPT["save"] = {"weight": WEIGHT}, state
    with pytest.raises(ConfigError, match=failed("save", why)):
        call("save")


def deepest() -> Json:
    """Return the deepest state that is saved."""
    for depth in range(300):
        SCRIPT["save"] = {"weight": WEIGHT}, {"a": nested(depth)}
        try:
            call("save")
        except ConfigError:
            return {"a": nested(depth - 1)}
    raise AssertionError("every state is saved")


def test_the_deepest_state_that_is_saved_can_be_read_in_its_checkpoint(
    memory_store: ObjectStore,
) -> None:
    state = CheckpointState(deepest(), 0.0)
    checkpoints.save(memory_store, "solver", 1, {"weight": WEIGHT}, state)
    assert checkpoints.load(memory_store, "solver", 1)[1].engine == state.engine


def test_numbers_of_other_libraries_and_tuples_are_saved() -> None:
    state = {"a": np.float32(2.0), "b": np.arange(3), "c": (1, 2**128 - 1), "d": {"e": None}}
    SCRIPT["save"] = {"weight": WEIGHT}, state
    assert call("save")[1] is state


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (None, "it must return metrics by name, not NoneType"),
        ({}, "it must return trainer/tokens, the number of loss tokens"),
        ({"trainer/tokens": -5.0}, "it must return trainer/tokens"),
        (METRICS | {"note": True}, "the metric note must be a finite number, not True"),
        (METRICS | {"note": "12"}, "the metric note must be a finite number, not '12'"),
        (METRICS | {"note": None}, "the metric note must be a finite number, not None"),
        (METRICS | {"note": math.nan}, "the metric note must be a finite number, not nan"),
        (METRICS | {"note": 10**400}, "the metric note must be a finite number, not 10"),
        (METRICS | {"note": torch.ones(2)}, "the metric note must be a finite number, not tensor"),
        (METRICS | {5: 1.0}, "the name 5 must be printable text"),
        (METRICS | {"\ud800": 1.0}, r"the name '\\ud800' must be printable text"),
    ],
)
def test_metrics_that_no_manifest_may_have_are_named(result: object, why: str) -> None:
    SCRIPT["step"] = result
    with pytest.raises(ConfigError, match=failed("step", why)):
        call("step")


def test_numbers_of_other_libraries_are_metrics() -> None:
    SCRIPT["step"] = {"trainer/tokens": np.int64(3), "a": np.float32(0.5), "b": torch.tensor(2)}
    assert call("step") == {"trainer/tokens": 3.0, "a": 0.5, "b": 2.0}
    assert {type(value) for value in call("step").values()} == {float}
