"""Policy-gradient losses: one file each, and the table of them.

    loss.py          the contract                     ppo_clip.py   PPO
    aggregation.py   weights of tokens                m2po.py       M2PO, three forms
    surrogates.py    the ratio, clipped or masked     custom.py     a loss by import path
    diagnostics.py   distances between policies   corrections.py   weights for other samplers
    mismatch.py      distance of sampler and trainer for one version
    reference_kl.py  distance from a frozen version, a term of the loss

A model of this union is both the settings of a loss, as a recipe writes them, and its formulas.
Reading a recipe must not import torch: the modules of this package import it inside the functions
that need it.
"""

from typing import Annotated, Final, TypeAlias

from pydantic import Discriminator, Tag

from storage.config_union import ByName, variants
from trainer.losses.custom import CustomLoss
from trainer.losses.m2po import M2po
from trainer.losses.ppo_clip import PpoClip

LossConfig: TypeAlias = Annotated[
    Annotated[PpoClip, Tag("ppo_clip")]
    | Annotated[M2po, Tag("m2po")]
    | Annotated[CustomLoss, Tag("custom")],
    Discriminator(ByName(default="m2po")),
]
"""The table of losses: `loss: {name: …}` selects one of them. That of corrections is in
`corrections.py`."""

LOSSES: Final = variants(LossConfig)
"""`name` → the model of its settings."""
