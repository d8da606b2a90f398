"""Training by the simplest computation: one row at a time, no padding, each formula written out, in
float64.

What a train engine must agree with up to float32. Written from `docs/extending/train_engine.md`; shares no
code with `trainer/`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from storage.records.batches import Batch
from storage.records.weights import HostTensor
from tests.support.models.trainer_cases import reference_model
from trainer.config import TrainConfig
from trainer.losses import LossConfig, M2po, PpoClip
from trainer.losses.corrections import (
    CorrectionConfig,
    IcePop,
    NoCorrection,
    Rejection,
    TisSequence,
    TisToken,
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Token:
    """One loss token of a minibatch."""

    logprob: Tensor
    """Differentiable scalar."""
    entropy: float
    behaviour: float
    advantage: float
    row: int
    """Place of its row in the minibatch."""
    region: str
    is_newest: bool
    """Whether the version in training sampled it."""
    reference: float | None = None
    """Its log-probability by the reference model."""
    correction: float = 1.0

    @property
    def log_ratio(self) -> float:
        return self.logprob.item() - self.behaviour

    @property
    def moment(self) -> float:
        return self.log_ratio**2

    @property
    def may_be_clipped(self) -> bool:
        return self.advantage * self.log_ratio > 0


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def adaptive_bounds(tokens: list[Token], threshold: float) -> tuple[float, float]:
    moments = sorted((token.moment for token in tokens if token.may_be_clipped), reverse=True)
    if not moments or mean(moments) <= threshold:
        return 0.95, 20.0
    within = [k for k in range(len(moments)) if mean(moments[k:]) < threshold]
    tau = math.sqrt(moments[within[0] if within else -1])
    return min(1 - math.exp(-tau), 0.95), min(math.exp(tau) - 1, 20.0)


def water_filled_bounds(tokens: list[Token], threshold: float) -> tuple[float, float]:
    """τ² by bisection."""
    moments = [token.moment for token in tokens if token.may_be_clipped]
    if not moments or mean(moments) <= threshold:
        return 1.0, 99_999.0
    low, high = 0.0, max(moments)
    for _ in range(100):
        middle = (low + high) / 2
        if mean([min(moment, middle) for moment in moments]) < threshold:
            low = middle
        else:
            high = middle
    tau = math.sqrt(low)
    return max(1 - math.exp(-tau), 0.3), max(math.exp(tau) - 1, 0.5)


def masked(tokens: list[Token], threshold: float) -> set[int]:
    """Return the indices of the dropped tokens."""
    left = sorted(range(len(tokens)), key=lambda number: tokens[number].moment)
    while left and mean([tokens[number].moment for number in left]) > threshold:
        left.pop()
    return set(range(len(tokens))) - set(left)


def token_loss(
    token: Token, bounds: tuple[float, float] | None, dual_clip: float | None
) -> tuple[Tensor, bool]:
    """Return the loss of a token, and whether a bound sets its gradient to 0."""
    ratio, A = torch.exp(token.logprob - token.behaviour), token.advantage
    loss, silenced = -ratio * A, False
    if bounds:
        low, high = 1 - bounds[0], 1 + bounds[1]
        if (A > 0 and ratio > high) or (A < 0 and ratio < low):
            loss, silenced = torch.tensor(-(high if A > 0 else low) * A, dtype=torch.float64), True
    if dual_clip is not None and A < 0 and ratio > dual_clip:
        loss, silenced = torch.tensor(-dual_clip * A, dtype=torch.float64), True
    return loss, silenced


def reference_distance(token: Token, estimator: str) -> Tensor:
    """Return the estimate of the distance from the reference."""
    assert token.reference is not None
    ratio = math.exp(token.reference) / torch.exp(token.logprob)  # of the reference to the policy
    match estimator:
        case "k1":
            return -torch.log(ratio)
        case "k2":
            return 0.5 * torch.log(ratio) ** 2
        case _:
            return torch.clamp(ratio - 1 - torch.log(ratio), max=10.0)


def correction_weights(correction: CorrectionConfig, log_ratios: list[float]) -> list[float]:
    """Return the weights of the tokens of one row; `log_ratios` are their log(p/b)."""
    ratios = [math.exp(each) for each in log_ratios]
    product = math.prod(ratios)
    match correction:
        case TisToken():
            return [min(ratio, correction.cap) for ratio in ratios]
        case TisSequence():
            return [min(product, correction.cap)] * len(ratios)
        case IcePop():
            return [r if correction.low <= r <= correction.high else 0.0 for r in ratios]
        case Rejection():
            geometric_mean = product ** (1 / len(ratios))
            farthest = max(max(ratio, 1 / ratio) for ratio in ratios)
            ratio = geometric_mean if correction.ratio == "geometric_mean" else farthest
            return [float(1 / correction.limit <= ratio <= correction.limit)] * len(ratios)
        case _:
            raise NotImplementedError(correction)


def mismatch(tokens: list[Token]) -> dict[str, float]:
    """Return the metrics of tokens whose log-probabilities no optimizer step has changed."""
    newest = [token for token in tokens if token.is_newest]
    named = sorted({token.region for token in newest} - {""})
    metrics = {}
    for suffix, some in [
        ("", newest),
        *((f"/{name}", [token for token in newest if token.region == name]) for name in named),
    ]:
        if some:
            ratios = [math.exp(token.log_ratio) for token in some]
            values = {
                "mean_abs": mean([abs(token.log_ratio) for token in some]),
                "k3": mean([ratio - 1 - math.log(ratio) for ratio in ratios]),
                "ratio_max": max(max(ratio, 1 / ratio) for ratio in ratios),
                "beyond_2x_share": mean([float(ratio > 2 or ratio < 0.5) for ratio in ratios]),
                "tokens": float(len(some)),
            }
            metrics |= {f"trainer/mismatch/{name}{suffix}": each for name, each in values.items()}
    return metrics


class PlainTrainer:
    """Adam, clipping, warm-up, minibatches and losses of docs/extending/train_engine.md."""

    def __init__(
        self,
        config: TrainConfig,
        weights: Mapping[str, HostTensor],
        seed: int,
        reference: Mapping[str, HostTensor] | None = None,
    ) -> None:
        self.config, self.seed = config, seed
        self.reference = None if reference is None else reference_model(reference).double()
        self.model = reference_model(weights).double()
        self.parameters = dict(self.model.named_parameters())
        self.first = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.num_updates = 0

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def step(self, batch: Batch) -> dict[str, float]:
        warm = min(1.0, batch.step / self.config.warmup_steps) if self.config.warmup_steps else 1.0
        lr = self.config.lr * warm
        advantages = self._advantages(batch)
        order = np.random.default_rng([self.seed, batch.step]).permutation(len(batch.rows))
        parts = np.array_split(order, self.config.minibatches)
        corrected = not isinstance(self.config.loss.correction, NoCorrection)
        first = order if corrected else parts[0]
        proximal = {number: self._tokens(batch, number, advantages[number], 0) for number in first}
        measured = mismatch([token for number in first for token in proximal[number]])
        weights = {
            number: correction_weights(
                self.config.loss.correction, [token.log_ratio for token in proximal[number]]
            )
            for number in (first if corrected else ())
        }
        seen: list[Token] = []
        silenced = 0
        distances: list[float] = []
        losses, norms, all_bounds = [], [], []
        for part in parts:
            tokens = [
                token
                for place, number in enumerate(part)
                for token in self._tokens(batch, number, advantages[number], place)
            ]
            if corrected:
                old = [token.logprob.item() for number in part for token in proximal[number]]
                factors = [factor for number in part for factor in weights[number]]
                tokens = [
                    replace(token, behaviour=behaviour, correction=factor)
                    for token, behaviour, factor in zip(tokens, old, factors, strict=True)
                ]
            loss, bounds, num_silenced = self._loss(tokens)
            if self.config.reference is not None:
                for token in tokens:
                    distance = reference_distance(token, self.config.reference.estimator)
                    distances.append(distance.item())
                    weight = token.correction * _weight(self.config.loss, tokens, token)
                    loss = loss + weight * self.config.reference.coefficient * distance
            gradients = dict(
                zip(
                    self.parameters,
                    torch.autograd.grad(loss, list(self.parameters.values())),
                    strict=True,
                )
            )
            norms.append(
                math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
            )
            self._adam(gradients, min(1.0, (self.config.grad_clip or math.inf) / norms[-1]), lr)
            losses.append(loss.item())
            silenced += num_silenced
            seen += tokens
            if bounds:
                all_bounds.append(bounds)
        ratios = [token.log_ratio for token in seen]
        moments = [token.moment for token in seen if token.may_be_clipped]
        staleness = [batch.step - 1.0 - row.min_version for row in batch.rows]
        metrics = {
            "trainer/loss": mean(losses),
            "trainer/kl/mean": mean([math.exp(each) - 1 - each for each in ratios]),
            "trainer/ratio/mean": mean([math.exp(each) for each in ratios]),
            "trainer/entropy/mean": mean([token.entropy for token in seen]),
            "trainer/m2/mean": mean(moments) if moments else 0.0,
            "trainer/masked_share": silenced / len(seen),
            "trainer/grad_norm": mean(norms),
            "trainer/lr": lr,
            "trainer/skipped": 0.0,
            "trainer/tokens": float(len(seen)),
            "trainer/sequences": float(len(batch.rows)),
            "trainer/reward/mean": mean([row.reward for row in batch.rows]),
            "trainer/staleness/mean": mean(staleness),
            "trainer/staleness/max": max(staleness),
        }
        metrics |= measured
        if corrected:
            factors = [factor for row in weights.values() for factor in row]
            metrics["trainer/correction/weight_mean"] = mean(factors)
            metrics["trainer/correction/zero_share"] = mean([float(f == 0) for f in factors])
        if distances:
            metrics["trainer/kl_reference"] = mean(distances)
        if all_bounds:
            metrics["trainer/clip_low"] = mean([low for low, _ in all_bounds])
            metrics["trainer/clip_high"] = mean([high for _, high in all_bounds])
        return metrics

    def _advantages(self, batch: Batch) -> list[list[float]]:
        """Yield the loss tokens of each row in turn."""
        given = [[float(each) for each in row.advantages[row.loss_mask]] for row in batch.rows]
        if not self.config.normalize_advantages:
            return given
        every = [each for row in given for each in row]
        std = math.sqrt(mean([(each - mean(every)) ** 2 for each in every]))
        return [[(each - mean(every)) / (std + 1e-5) for each in row] for row in given]

    def _tokens(
        self, batch: Batch, number: int, advantages: list[float], place: int
    ) -> list[Token]:
        row = batch.rows[number]
        inputs = torch.tensor(row.tokens).long()[None]
        logits = self.model(input_ids=inputs, use_cache=False).logits[0]
        with torch.no_grad():
            other = self.reference and self.reference(input_ids=inputs, use_cache=False).logits[0]
        positions = np.flatnonzero(row.loss_mask)
        results = []
        for position, advantage in zip(positions, advantages, strict=True):
            logprobs = torch.log_softmax(logits[position - 1] / row.temperature, dim=-1)
            entropy = -(logprobs.exp() * logprobs).sum().item()
            token = logprobs[int(row.tokens[position])]
            reference = None
            if other is not None:
                by_reference = torch.log_softmax(other[position - 1] / row.temperature, dim=-1)
                reference = by_reference[int(row.tokens[position])].item()
            results.append(
                Token(
                    logprob=token,
                    entropy=entropy,
                    behaviour=float(row.logprobs[position]),
                    advantage=advantage,
                    row=place,
                    region=row.region,
                    is_newest=bool(row.versions[position] == batch.step - 1),
                    reference=reference,
                )
            )
        return results

    def _loss(self, tokens: list[Token]) -> tuple[Tensor, tuple[float, float] | None, int]:
        """Return the minibatch's loss, its bounds and the number of clipped tokens."""
        loss = self.config.loss
        bounds: tuple[float, float] | None = None
        dropped: set[int] = set()
        assert isinstance(loss, PpoClip | M2po)
        if isinstance(loss, PpoClip):
            bounds = loss.clip_low, loss.clip_high
        elif loss.m2_form == "adaptive_clip":
            bounds = adaptive_bounds(tokens, loss.m2_threshold)
        elif loss.m2_form == "water_filled":
            bounds = water_filled_bounds(tokens, loss.m2_threshold)
        else:
            dropped = masked(tokens, loss.m2_threshold)
        total, num_silenced = torch.zeros((), dtype=torch.float64), len(dropped)
        for number, token in enumerate(tokens):
            if number not in dropped:
                value, silenced = token_loss(token, bounds, loss.dual_clip)
                total = total + token.correction * _weight(loss, tokens, token) * value
                num_silenced += silenced
        return total, bounds, num_silenced

    def _adam(self, gradients: Mapping[str, Tensor], scale: float, lr: float) -> None:
        self.num_updates += 1
        beta1, beta2 = self.config.betas
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                gradient = scale * gradients[name]
                self.first[name] = beta1 * self.first[name] + (1 - beta1) * gradient
                self.second[name] = beta2 * self.second[name] + (1 - beta2) * gradient**2
                first = self.first[name] / (1 - beta1**self.num_updates)
                second = self.second[name] / (1 - beta2**self.num_updates)
                decay = self.config.weight_decay if parameter.dim() >= 2 else 0.0
                parameter.mul_(1 - lr * decay)
                parameter.sub_(lr * first / (second.sqrt() + self.config.eps))


def _weight(loss: LossConfig, tokens: list[Token], token: Token) -> float:
    """Return the weight of a token; `tokens` are all of its minibatch."""
    if loss.aggregate == "token_mean":
        return 1 / len(tokens)
    num_rows = len({each.row for each in tokens})
    if loss.aggregate == "constant":
        assert loss.constant_length is not None
        return 1 / (num_rows * loss.constant_length)
    return 1 / (num_rows * sum(each.row == token.row for each in tokens))
