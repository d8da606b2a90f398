"""Which optimizer has which parameters, and the errors of an optimizer by import path."""

from asyncio import CancelledError
from typing import Any

import pytest
import torch

from storage.errors import ConfigError, CorruptError, TransientError
from trainer.config import TrainConfig
from trainer.engines.torch.optimizer import (
    clear_gradients,
    make_optimizers,
    restore_state,
    saved_state,
    take_step,
)


def config(**settings: object) -> TrainConfig:
    return TrainConfig.model_validate({"lr": 1e-3, **settings})


def test_muon_has_the_hidden_matrices_and_all_of_its_settings() -> None:
    table, matrix, vector, kernel = (
        torch.nn.Parameter(torch.zeros(shape)) for shape in ((5, 2), (2, 3), (2,), (2, 2, 2))
    )
    settings = config(
        optimizer={
            "name": "muon", "momentum": 0.7, "nesterov": False, "ns_steps": 3,
            "adjust_lr": "original",
        },
        weight_decay=0.3, betas=(0.6, 0.8), eps=1e-3,
    )  # fmt: skip
    muon, adamw = make_optimizers([table, matrix, vector, kernel], [table], settings)
    (group,) = muon.param_groups
    assert [id(each) for each in group["params"]] == [id(matrix)]
    expected = {
        "lr": 1e-3, "momentum": 0.7, "nesterov": False, "ns_steps": 3, "adjust_lr_fn": "original",
        "weight_decay": 0.3,
    }  # fmt: skip
    assert {key: group[key] for key in expected} == expected
    decayed, kept = adamw.param_groups
    assert [id(each) for each in decayed["params"]] == [id(table), id(kernel)]
    assert [id(each) for each in kept["params"]] == [id(vector)]
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
    assert (decayed["betas"], decayed["eps"], decayed["fused"]) == ((0.6, 0.8), 1e-3, True)


class Raising(torch.optim.SGD):
    """Raises `error` in the call `at`."""

    at = ""
    error: BaseException
    held: dict[Any, Any]

    def __init__(self, params: Any, lr: float) -> None:
        self._raise("init")
        super().__init__(params, lr)

    @property
    def state(self) -> dict[Any, Any]:
        self._raise("state")
        return self.held

    @state.setter
    def state(self, held: dict[Any, Any]) -> None:
        self.held = held

    def _raise(self, at: str) -> None:
        if self.at == at:
            raise self.error

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._raise("zero_grad")

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._raise("step")

    def state_dict(self) -> dict[str, Any]:
        self._raise("state_dict")
        return super().state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self._raise("load_state_dict")


def run_with(monkeypatch: pytest.MonkeyPatch, at: str, error: BaseException) -> None:
    """Make an optimizer, take a step, save a state and restore one; one of these raises."""
    monkeypatch.setattr(Raising, "at", at)
    monkeypatch.setattr(Raising, "error", error, raising=False)
    parameter = torch.nn.Parameter(torch.zeros(2))
    settings = config(optimizer={"name": "custom", "path": f"{__name__}:Raising"})
    (optimizer,) = made = make_optimizers([parameter], [], settings)
    clear_gradients(optimizer)
    take_step(optimizer)
    names = {id(parameter): "weight"}
    _, progress = saved_state(made, names)
    restore_state(made, names, {}, progress)


@pytest.mark.parametrize(
    "error", [SystemExit("enough"), CancelledError("enough"), RuntimeError("enough")]
)
@pytest.mark.parametrize(
    ("at", "expected", "words"),
    [
        ("init", ConfigError, r"^train\.optimizer\.args: .*:Raising refuses {}: NAME: enough$"),
        (
            "zero_grad",
            ConfigError,
            r"^train\.optimizer: zero_grad\(\) of Raising failed: NAME: enough$",
        ),
        (
            "step",
            ConfigError,
            r"^train\.optimizer: step\(\) of Raising failed: NAME: enough; correct the class",
        ),
        (
            "state",
            ConfigError,
            r"^train\.optimizer: reading the state of Raising failed: NAME: enough$",
        ),
        (
            "state_dict",
            ConfigError,
            r"^train\.optimizer: state_dict\(\) of Raising failed: NAME: enough$",
        ),
        ("load_state_dict", CorruptError, "^Raising refuses its saved state: NAME: enough$"),
    ],
)
def test_what_a_custom_optimizer_raises_names_it(
    at: str,
    expected: type[Exception],
    words: str,
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(expected, match=words.replace("NAME", type(error).__name__)):
        run_with(monkeypatch, at, error)


class Groupless(torch.optim.SGD):
    """Does not call the constructor of its base class."""

    def __init__(self, params: Any, lr: float) -> None:
        pass


def test_a_custom_optimizer_without_groups_is_named() -> None:
    settings = config(optimizer={"name": "custom", "path": f"{__name__}:Groupless"})
    with pytest.raises(
        ConfigError,
        match=r"^train\.optimizer\.path: param_groups of .*:Groupless failed: AttributeError: ",
    ):
        make_optimizers([torch.nn.Parameter(torch.zeros(2))], [], settings)


CALLS = ["init", "zero_grad", "step", "state", "state_dict", "load_state_dict"]


@pytest.mark.parametrize("at", CALLS)
@pytest.mark.parametrize(
    "error", [TransientError("rank 1 is lost"), MemoryError(), torch.OutOfMemoryError()]
)
def test_an_error_of_a_custom_optimizer_that_a_restart_may_end_is_raised_as_it_is(
    at: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(type(error)) as caught:
        run_with(monkeypatch, at, error)
    assert caught.value is error


@pytest.mark.parametrize("at", CALLS)
@pytest.mark.parametrize("error", [ConnectionError("reset"), TimeoutError("late")])
def test_a_lost_connection_is_raised_as_it_is(
    at: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(type(error)) as caught:
        run_with(monkeypatch, at, error)
    assert caught.value is error
