import pytest
import torch
from pydantic import ValidationError

from storage.errors import ConfigError
from trainer.config import TrainConfig
from trainer.optimizers import AdamWOptimizer, CustomOptimizer, MuonOptimizer


class Halving(torch.optim.Optimizer):
    """Halves every weight, whatever the gradient; not one of the built-in optimizers."""

    def __init__(self, params: object, lr: float, share: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "share": share})  # type: ignore[arg-type]

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Not needed to be found."""


class Stepper:
    """Has the methods of an optimizer, and is none of torch."""

    def __init__(self, params: object, lr: float) -> None:
        """Takes what an optimizer takes."""

    def step(self) -> None:
        """Does nothing."""

    def zero_grad(self) -> None:
        """Does nothing."""


HERE = __name__


def test_a_stored_configuration_without_an_optimizer_selects_adamw() -> None:
    assert TrainConfig.model_validate({"lr": 1e-4}).optimizer == AdamWOptimizer()
    assert TrainConfig.model_validate({"optimizer": {}}).optimizer == AdamWOptimizer()
    muon = TrainConfig.model_validate({"optimizer": {"name": "muon", "momentum": 0.9}}).optimizer
    assert muon == MuonOptimizer(momentum=0.9)
    with pytest.raises(ValidationError):
        TrainConfig.model_validate({"optimizer": {"name": "adamw", "momentum": 0.9}})


def test_a_custom_optimizer_is_found_by_its_import_path() -> None:
    assert CustomOptimizer(path=f"{HERE}:Halving", args={"share": 0.1}).find() is Halving
    assert CustomOptimizer(path="torch.optim:SGD", args={"momentum": 0.9}).find() is torch.optim.SGD


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("Stepper", {}, "is not a subclass of torch.optim.Optimizer"),
        ("HERE", {}, "is a str and no class"),
        ("Nowhere", {}, "has no 'Nowhere'"),
        ("Halving", {"surprise": 1}, "does not take lr and args .*surprise"),
        ("Halving", {"lr": 1}, "the learning rate is train.lr; leave lr out of args"),
    ],
)
def test_a_class_that_is_no_optimizer_or_takes_other_arguments_is_refused(
    name: str, args: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        CustomOptimizer(path=f"{HERE}:{name}", args=args).find()
