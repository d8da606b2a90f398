"""Corrections of the mismatch, and of staleness: a constant weight on each token loss.

    log b   of the sampler, as the batch has it                       b  behaviour
    log p   of the trainer, before the first optimizer step           p  proximal policy
    log π   of the trainer, now

A loss without a correction uses ρ = π/b, in which three things are mixed: the updates of this step,
staleness, and the mismatch of the two engines. With a correction the ratio is split, π/b = π/p ·
p/b, as in decoupled PPO (arXiv 2110.00641; AReaL, arXiv 2505.24298):

    Σ weight × sg(w(p/b)) × loss(ρ = π/p, A)

Bounds, masks and the second moment of the loss then see the updates of this step alone, and w
corrects for what the sampler did. r = p/b below. Its logarithm is clamped to ±20 for each token and
each sum.

A correction is a pure function. The weight of a token depends on the tokens of its own sequence
alone, so micro-batches change nothing. Importing this module does not import torch.

Shape legend: N loss tokens of some sequences, B those sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol, TypeAlias

from pydantic import Discriminator, Tag

from storage.config_model import Frozen, RatioLimit, Share
from storage.config_union import ByName, variants
from storage.import_path import PluginKind, construct, find_class, foreign_code
from trainer.device_errors import device_errors
from trainer.losses.surrogates import check_tokens

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_MAX = 20.0
"""Largest |log r| of a token or of a sum: e²⁰ is far above every limit, and does not overflow."""


class Correction(Protocol):
    """Weights of token losses from the ratios of proximal and behaviour policy."""

    def token_weights(self, proximal_N: Tensor, behaviour_N: Tensor, sequence_N: Tensor) -> Tensor:
        """Compute the weight of each token: finite, at least 0, [N].

        `proximal_N` = log p and `behaviour_N` = log b, without gradient. `sequence_N` int64 [N] is
        the number of each token's sequence; all loss tokens of a sequence are given together.
        """


class NoCorrection(Frozen):
    """The ratio of the loss is π/b, and every weight is 1."""

    name: Literal["none"] = "none"

    def make(self) -> Correction | None:
        """Return None: there is nothing to compute."""
        return None


class TisToken(Frozen):
    """Truncated importance sampling by token: min(r, cap).

    The truncation of importance weights is that of Ionides (2008) and of V-trace (arXiv
    1802.01561); against the mismatch of two engines: Yao et al. (2025), cap 2.
    """

    name: Literal["tis_token"] = "tis_token"
    cap: RatioLimit = 2.0
    """Largest weight."""

    def make(self) -> Correction:
        """Return the correction with these settings."""
        return self

    def token_weights(self, proximal_N: Tensor, behaviour_N: Tensor, sequence_N: Tensor) -> Tensor:
        return log_ratios(proximal_N, behaviour_N).exp().clamp(max=self.cap)


class TisSequence(Frozen):
    """Truncated importance sampling by sequence: min(Π r, cap) on all tokens of a sequence.

    The product over the sequence's loss tokens is the unbiased weight of a whole answer (Liu et al.
    2025), before the truncation. Its variance grows with the length.
    """

    name: Literal["tis_sequence"] = "tis_sequence"
    cap: RatioLimit = 2.0
    """Largest weight."""

    def make(self) -> Correction:
        """Return the correction with these settings."""
        return self

    def token_weights(self, proximal_N: Tensor, behaviour_N: Tensor, sequence_N: Tensor) -> Tensor:
        sums_B = sequence_sums(log_ratios(proximal_N, behaviour_N), sequence_N)
        weights_B = sums_B.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp().clamp(max=self.cap)
        return weights_B[sequence_N]


class IcePop(Frozen):
    """r inside [low, high], and 0 outside (IcePop of Ring-1T, arXiv 2510.18855).

    A token outside loses its gradient and still counts in the weights of the loss.
    """

    name: Literal["icepop"] = "icepop"
    low: Share = 0.5
    """Smallest ratio that is kept."""
    high: RatioLimit = 5.0
    """Largest ratio that is kept."""

    def make(self) -> Correction:
        """Return the correction with these settings."""
        return self

    def token_weights(self, proximal_N: Tensor, behaviour_N: Tensor, sequence_N: Tensor) -> Tensor:
        ratio_N = log_ratios(proximal_N, behaviour_N).exp()
        is_kept_N = (ratio_N >= self.low) & (ratio_N <= self.high)
        return ratio_N.where(is_kept_N, ratio_N.new_zeros(()))


class Rejection(Frozen):
    """1, and 0 on all tokens of a sequence whose ratio is beyond `limit` or below 1/`limit`.

    The ratio of a sequence is the geometric mean of r over its loss tokens, or that of its farthest
    token (masked importance sampling by sequence, Liu et al. 2025). A dropped sequence still counts
    in the weights of the loss.
    """

    name: Literal["rejection"] = "rejection"
    ratio: Literal["geometric_mean", "max"] = "geometric_mean"
    """`geometric_mean`: exp of the mean of log r; `max`: the largest of r and 1/r of its tokens."""
    limit: RatioLimit
    """1.01 is tight for `geometric_mean`, and far too tight for `max`."""

    def make(self) -> Correction:
        """Return the correction with these settings."""
        return self

    def token_weights(self, proximal_N: Tensor, behaviour_N: Tensor, sequence_N: Tensor) -> Tensor:
        import torch

        log_ratio_N = log_ratios(proximal_N, behaviour_N)
        sums_B = sequence_sums(log_ratio_N, sequence_N)
        if self.ratio == "geometric_mean":
            counts_B = sequence_sums(torch.ones_like(log_ratio_N), sequence_N).clamp(min=1.0)
            distance_B = (sums_B / counts_B).abs()
        else:
            nearest_B = torch.zeros_like(sums_B)
            distance_B = nearest_B.scatter_reduce_(0, sequence_N, log_ratio_N.abs(), "amax")
        return (distance_B <= math.log(self.limit))[sequence_N].to(log_ratio_N.dtype)


class CustomCorrection(Frozen):
    """`correction: {name: custom, path: "my_package.my_module:MyCorrection", args: {cap: 3.0}}`."""

    name: Literal["custom"] = "custom"
    path: str
    """Import path `package.module:Name` of the class."""
    args: dict[str, Any] = {}
    """Passed to its constructor."""

    def make(self) -> Correction:
        """Import the class and build the correction. ConfigError where either is impossible."""
        keys = "train.loss.correction.path", "train.loss.correction.args"
        made = construct(self.find, self.path, self.args, keys, *device_errors())
        return _UserCorrection(self.path, made)

    def find(self) -> Any:
        """Import the class and check it without building it.

        ConfigError when it is not a correction, or takes other arguments than `args`.
        """
        return find_class(self.path, CORRECTION, self.args)


@dataclass(frozen=True, eq=False)
class _UserCorrection:
    """A user's correction. Its method gets tensors of its own, since it may work in place; what it
    raises, or returns against the contract, is a ConfigError.
    """

    path: str
    correction: Correction

    def token_weights(self, proximal_N: Tensor, behaviour_N: Tensor, sequence_N: Tensor) -> Tensor:
        where = f"train.loss.correction.path: token_weights of {self.path}"
        with foreign_code(where, *device_errors()):
            result = self.correction.token_weights(
                proximal_N.clone(), behaviour_N.clone(), sequence_N.clone()
            )
            return check_weights(result, len(proximal_N))


CORRECTION: Final = PluginKind("correction", Correction, "docs/extending/losses.md")

CorrectionConfig: TypeAlias = Annotated[
    Annotated[NoCorrection, Tag("none")]
    | Annotated[TisToken, Tag("tis_token")]
    | Annotated[TisSequence, Tag("tis_sequence")]
    | Annotated[IcePop, Tag("icepop")]
    | Annotated[Rejection, Tag("rejection")]
    | Annotated[CustomCorrection, Tag("custom")],
    Discriminator(ByName(default="none")),
]
"""The table of corrections: `correction: {name: …}` of a loss selects one of them."""

CORRECTIONS: Final = variants(CorrectionConfig)
"""`name` → the model of its settings."""


def log_ratios(proximal_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """Compute log r = log p − log b, clamped to ±LOG_RATIO_MAX: float64 [N].

    ValueError for tensors of other shapes or dtypes.
    """
    check_tokens(proximal_N, behaviour_N)
    log_ratio_N = proximal_N.detach().double() - behaviour_N.double()
    return log_ratio_N.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


def sequence_sums(values_N: Tensor, sequence_N: Tensor) -> Tensor:
    """Return the sums of the sequences 0, 1, …: [B]."""
    num_sequences = int(sequence_N.max()) + 1 if len(sequence_N) else 0
    return values_N.new_zeros(num_sequences).index_add_(0, sequence_N, values_N)


def check_weights(weights: Any, num_tokens: int) -> Tensor:
    """Return the result of `token_weights` without gradient.

    Raises:
        ValueError: it is no tensor of `num_tokens` finite weights of at least 0.
    """
    shape = list(getattr(weights, "shape", ()))
    if shape != [num_tokens] or not weights.is_floating_point():
        raise ValueError(
            f"it must return floating-point weights of shape [{num_tokens}], not "
            f"{getattr(weights, 'dtype', type(weights).__name__)} {shape}"
        )
    if not bool((weights.float().isfinite() & (weights >= 0)).all()):
        raise ValueError("it must return finite weights of at least 0")
    checked: Tensor = weights.detach()
    return checked
