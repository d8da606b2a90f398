"""A loss from outside of AstraFlow, by import path (see `docs/extending/losses.md`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from storage.errors import AstraFlowError, ConfigError
from storage.import_path import PluginKind, constructor_fault, described, foreign_code, resolve
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
        try:
            loss = self.find()(**self.args)
        except ConfigError as error:
            raise ConfigError(f"train.loss.path: {error}") from error
        except AstraFlowError:
            raise
        except Exception as error:  # foreign code may raise anything
            raise ConfigError(
                f"train.loss.args: {self.path} refuses {self.args}: {described(error)}"
            ) from error
        return _UserLoss(self.path, loss)

    def find(self) -> Any:
        """Import the class and check it without building it.

        ConfigError when it is not a loss, or takes other arguments than `args`.
        """
        loss_class: Any = resolve(self.path, {}, LOSS)
        if not isinstance(getattr(loss_class, "whole_minibatch", None), bool):
            raise ConfigError(
                f"{self.path} has no class attribute whole_minibatch, True or False; see "
                f"{LOSS.page}"
            )
        if reason := constructor_fault(loss_class, LOSS, self.args):
            raise ConfigError(
                f"{self.path} does not take args {self.args} ({reason}); correct them"
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
        import torch

        with foreign_code(f"train.loss.path: prepare of {self.path}", torch.OutOfMemoryError):
            result = self.loss.prepare(
                logprobs_N.clone(), behaviour_N.clone(), advantages_N.clone()
            )
            return check_prepared(result, len(logprobs_N))

    def token_losses(
        self, prepared: Prepared, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor
    ) -> TokenLoss:
        import torch

        with foreign_code(f"train.loss.path: token_losses of {self.path}", torch.OutOfMemoryError):
            result = self.loss.token_losses(
                prepared, logprobs_N.clone(), behaviour_N.clone(), advantages_N.clone()
            )
            return check_token_loss(result, len(logprobs_N))
