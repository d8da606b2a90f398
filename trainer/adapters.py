"""Adapters: the settings that a recipe selects by `adapter: {name: …}`.

`trainer/engines/torch/lora.py` builds them. Importing this module does not import torch.
"""

from typing import Annotated, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from storage.config_model import Count, Frozen, Positive
from storage.config_union import ByName
from storage.formats.model_sizes import ModelSizes
from storage.records.weights import RANK_MAX, StoredAdapter


class NoAdapter(Frozen):
    """All weights of the model are trained."""

    name: Literal["none"] = "none"

    def stored(self) -> None:
        """Return what the manifests of versions say of it: nothing."""


class Lora(Frozen):
    """LoRA (arXiv 2106.09685): the base model is frozen, and each adapted linear layer has two
    small matrices that are trained: W + scale · B A.
    """

    name: Literal["lora"] = "lora"
    rank: Annotated[Count, Field(le=RANK_MAX)] = 16
    """Rows of A and columns of B."""
    alpha: Positive = 32.0
    """scale = alpha / rank."""
    rslora: bool = False
    """scale = alpha / √rank (arXiv 2312.03732), with which a larger rank needs no other `lr`."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Linear layers by the last part of their names, such as [q_proj, v_proj]; null: all of
    attention and MLP. The output head cannot be one.
    """
    publish: Literal["merged", "adapter"] = "merged"
    """merged: a version has W + scale · B A in place of W; adapter: it has the unchanged W, with A
    and B, which readers merge.
    """

    def stored(self) -> StoredAdapter | None:
        """Return what the manifests of versions say of it: nothing of one that was merged."""
        return self.form() if self.publish == "adapter" else None

    def form(self) -> StoredAdapter:
        """Return the rank and the scale."""
        return StoredAdapter(kind="lora", rank=self.rank, alpha=self.alpha, rslora=self.rslora)

    def parameters(self, model: ModelSizes) -> int:
        """Return the number of elements of A and B: rank · (inputs + outputs) of each layer.

        Targets with other names than those of Llama and Qwen models are not counted.
        """
        sizes = model.linear_layers()
        adapted = sizes.keys() if self.targets is None else sizes.keys() & set(self.targets)
        return model.layers * self.rank * sum(sum(sizes[name]) for name in adapted)


AdapterConfig: TypeAlias = Annotated[
    Annotated[NoAdapter, Tag("none")] | Annotated[Lora, Tag("lora")],
    Discriminator(ByName(default="none")),
]
"""The table of adapters."""
