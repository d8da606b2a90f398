"""Optimizers: the settings that a recipe selects by `optimizer: {name: …}`.

`lr`, `betas`, `eps` and `weight_decay` of `TrainConfig` hold for all of them, as far as they have
them. `trainer/engines/torch/optimizer.py` builds them. Importing this module does not import torch.
"""

from typing import Annotated, Any, Final, Literal, Protocol, TypeAlias

from pydantic import Discriminator, Field, Tag

from storage.config_model import Count, Decay, Frozen, OnlyWith
from storage.config_union import ByName
from storage.errors import ConfigError
from storage.import_path import PluginKind, constructor_fault, resolve


class AdamWOptimizer(Frozen):
    """AdamW (arXiv 1711.05101), fused."""

    name: Literal["adamw"] = "adamw"


class MuonOptimizer(Frozen):
    """Muon for the matrices of the layers; AdamW for embeddings, the output head and vectors.

    The update of a matrix is its momentum, made orthogonal by Newton-Schulz iterations in BF16
    (https://kellerjordan.github.io/posts/muon/).
    """

    name: Literal["muon"] = "muon"
    momentum: Decay = 0.95
    nesterov: Annotated[bool, OnlyWith("momentum", then=False)] = True
    ns_steps: Annotated[Count, Field(le=99)] = 5
    """Newton-Schulz iterations; torch computes fewer than 100."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Scale of an update. match_rms_adamw: a learning rate has the effect that it has in AdamW
    (arXiv 2502.16982); original: √max(1, rows / columns).
    """


class CustomOptimizer(Frozen):
    """`optimizer: {name: custom, path: "my_package.my_module:MyOptimizer", args: {momentum: 0.9}}`.

    The class is called with two groups (matrices with `weight_decay`, vectors without), `lr` and
    `args`. Tensors and numbers of its state for each parameter are saved and restored, tensors in
    their own dtypes; what it keeps elsewhere, such as in its groups, is not. It needs one rank.
    """

    name: Literal["custom"] = "custom"
    path: str
    """Import path `package.module:Name` of a subclass of torch.optim.Optimizer."""
    args: dict[str, Any] = {}
    """Keyword arguments of its constructor."""

    def find(self) -> Any:
        """Import the class and check it without building it.

        ConfigError when it is not an optimizer of torch, or takes other arguments than `args`.
        """
        from torch.optim import Optimizer

        optimizer_class: Any = resolve(self.path, {}, OPTIMIZER)
        if not issubclass(optimizer_class, Optimizer):
            raise ConfigError(
                f"{self.path} is not a subclass of torch.optim.Optimizer; see {OPTIMIZER.page}"
            )
        if "lr" in self.args:
            raise ConfigError("the learning rate is train.lr; leave lr out of args")
        if reason := constructor_fault(optimizer_class, OPTIMIZER, {"lr": 0.0, **self.args}):
            raise ConfigError(
                f"{self.path} does not take lr and args {self.args} ({reason}); correct them"
            )
        return optimizer_class


class Stepping(Protocol):
    """What is checked of a custom optimizer before it is known to be one of torch."""

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...


OPTIMIZER: Final = PluginKind(
    "optimizer", Stepping, "docs/extending/train_engine.md", constructor_args=("params",)
)

OptimizerConfig: TypeAlias = Annotated[
    Annotated[AdamWOptimizer, Tag("adamw")]
    | Annotated[MuonOptimizer, Tag("muon")]
    | Annotated[CustomOptimizer, Tag("custom")],
    Discriminator(ByName(default="adamw")),
]
"""The table of optimizers."""
