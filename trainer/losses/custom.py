"""A loss from outside of AstraFlow, by import path (see `docs/extending/losses.md`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from storage.errors import ConfigError
from storage.import_path import PluginKind, construct, find_class, foreign_code
from trainer.device_errors import device_errors
from trainer.losses.aggregation import Aggregated
from trainer.losses.loss import Loss, Prepared, TokenLoss, check_prepared, check_token_loss

if TYPE_CHECKING:
    from torch import Tensor

LOSS: Final = PluginKind("loss", Loss, "docs/extending/losses.md")


class CustomLoss(Aggregated):
    """`loss: {name: custom, path: "my_package.my_module:MyLoss", args: {beta: 0.1}}`."""

    name: Literal["custom"] = "custom"
    path: str
    """Import path `package.module:Name` of the class."""
    args: dict[str, Any] = {}
    """Passed to its constructor."""

    def make(self) -> Loss:
        """Import the class and build the loss. ConfigError where either is impossible."""
        keys = "train.loss.path", "train.loss.args"
        made = construct(self.find, self.path, self.args, keys, *device_errors())
        return _UserLoss(self.path, made)

    def find(self) -> Any:
        """Import the class and check it without building it.

        ConfigError when it is not a loss, or takes other arguments than `args`.
        """
        loss_class = find_class(self.path, LOSS, self.args)
        if not isinstance(getattr(loss_class, "whole_minibatch", None), bool):
            raise ConfigError(
                f"{self.path} has no class attribute whole_minibatch, True or False; see "
                f"{LOSS.page}"
            )
        return loss_class


@dataclass(frozen=True, eq=False)
class _UserLoss:
    """A user's loss. Its methods get tensors of their own, since they may work in place; what they
    raise, or return against the contract, is a ConfigError.
    """

    path: str
    loss: Loss

    @property
    def whole_minibatch(self) -> bool:
        return self.loss.whole_minibatch

    def prepare(self, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor) -> Prepared:
        with foreign_code(f"train.loss.path: prepare of {self.path}", *device_errors()):
            result = self.loss.prepare(
                logprobs_N.clone(), behaviour_N.clone(), advantages_N.clone()
            )
            return check_prepared(result, len(logprobs_N))

    def token_losses(
        self, prepared: Prepared, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor
    ) -> TokenLoss:
        with foreign_code(f"train.loss.path: token_losses of {self.path}", *device_errors()):
            result = self.loss.token_losses(
                prepared, logprobs_N.clone(), behaviour_N.clone(), advantages_N.clone()
            )
            return check_token_loss(result, len(logprobs_N))


def backward_start(loss: Loss, total: Tensor, logprobs_N: Tensor) -> Tensor:
    """Return a scalar with the gradient of `total`, from which a backward pass starts.

    The part of a custom loss in that pass is made here: an error in it is a ConfigError, and one of
    the model is raised as it is.
    """
    if not isinstance(loss, _UserLoss):
        return total
    import torch

    where = f"train.loss.path: the gradient of {loss.path}"
    with foreign_code(where, *device_errors()):
        (gradient_N,) = torch.autograd.grad(total, logprobs_N)
    return (logprobs_N * gradient_N).sum()
