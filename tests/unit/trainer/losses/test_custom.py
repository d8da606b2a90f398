"""A loss by import path: its validation, the time of its import, and its use by the engine."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from storage.errors import ConfigError
from storage.import_path import described
from tests.support.models.trainer_cases import (
    LINEAR,
    MODEL_CONFIG,
    base_weights,
    reference_model,
    sampled_batch,
)
from trainer.config import TrainConfig
from trainer.engines.engine import make_engine
from trainer.engines.torch.host_tensors import to_torch
from trainer.engines.torch.one_process import OneProcess
from trainer.losses import CustomLoss, PpoClip
from trainer.losses.corrections import CustomCorrection
from trainer.losses.loss import Prepared, TokenLoss
from trainer.losses.surrogates import masked_ratio

HERE = __name__
BUILT: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_was_built() -> None:
    BUILT.clear()


class Plain:
    """−ρA on every token, times a factor."""

    whole_minibatch = False

    def __init__(self, factor: float = 1.0) -> None:
        BUILT.append("Plain")
        if factor < 0:
            raise ValueError("factor must be positive")
        self.factor = factor

    def prepare(self, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor) -> Prepared:
        return Prepared({"factor": self.factor})

    def token_losses(
        self, prepared: Prepared, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor
    ) -> TokenLoss:
        keep_N = torch.ones(len(logprobs_N), dtype=torch.bool)
        free = masked_ratio(logprobs_N, behaviour_N, advantages_N, keep_N)
        return TokenLoss(self.factor * free.values_N, ~keep_N)


class CentredLogRatio(Plain):
    """Needs the mean log ratio of the whole minibatch; drops the tokens above it."""

    whole_minibatch = True

    def prepare(self, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor) -> Prepared:
        assert not logprobs_N.requires_grad
        log_ratio_N = logprobs_N - behaviour_N
        return Prepared(
            {"mean": float(log_ratio_N.mean())}, {"keep": log_ratio_N <= log_ratio_N.mean()}
        )

    def token_losses(
        self, prepared: Prepared, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor
    ) -> TokenLoss:
        return masked_ratio(logprobs_N, behaviour_N, advantages_N, prepared.per_token["keep"])


class Weighted(Plain):
    """−min(ρ, 1.1)ρA, from its arguments as they are."""

    def prepare(self, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor) -> Prepared:
        weight_N = (logprobs_N - behaviour_N).exp().clamp(max=1.1)
        return Prepared(per_token={"weight": weight_N})

    def token_losses(
        self, prepared: Prepared, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor
    ) -> TokenLoss:
        ratio_N = (logprobs_N - behaviour_N).exp()
        values_N = -prepared.per_token["weight"] * advantages_N * ratio_N
        return TokenLoss(values_N, torch.zeros_like(advantages_N, dtype=torch.bool))


class WeightedInPlace(Weighted):
    """The same numbers by operations in place, which change all arguments."""

    def prepare(self, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor) -> Prepared:
        advantages_N.zero_()
        weight_N = logprobs_N.sub_(behaviour_N).exp_().clamp_(max=1.1)
        behaviour_N.zero_()
        return Prepared(per_token={"weight": weight_N})

    def token_losses(
        self, prepared: Prepared, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor
    ) -> TokenLoss:
        result = super().token_losses(
            prepared, logprobs_N, behaviour_N.clone(), advantages_N.clone()
        )
        for tensor_N in (logprobs_N.detach(), behaviour_N, advantages_N):
            tensor_N.zero_()
        return result


class WholeInPlace(WeightedInPlace):
    whole_minibatch = True


class InverseRatio:
    """w = min(b/p, 2)."""

    def token_weights(self, proximal_N: Tensor, behaviour_N: Tensor, sequence_N: Tensor) -> Tensor:
        return (behaviour_N - proximal_N).exp().clamp(max=2.0)


class InverseRatioInPlace:
    """The same numbers by operations in place, which change all arguments."""

    def token_weights(self, proximal_N: Tensor, behaviour_N: Tensor, sequence_N: Tensor) -> Tensor:
        behaviour_N.sub_(proximal_N)
        proximal_N.zero_()
        sequence_N.zero_()
        return behaviour_N.exp_().clamp_(max=2.0)


class Broken(Plain):
    def __init__(self) -> None:
        raise KeyError("x")


class TakesAMetric(Plain):
    def __init__(self, metric: str) -> None:
        self.metric = metric
        self.factor = 1.0

    def prepare(self, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor) -> Prepared:
        return Prepared({self.metric: 1.0, "kl": 2.0})


class Wrong(Plain):
    """Has one fault."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.factor = 1.0

    def prepare(self, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor) -> Any:
        faults = {
            "no prepared": None,
            "metric": Prepared({"mean": None}),  # type: ignore[dict-item]
            "short": Prepared(per_token={"w": torch.ones(1)}),
        }
        return faults.get(self.fault, Prepared({"mean": torch.tensor(1.0)}))  # type: ignore[dict-item]

    def token_losses(
        self, prepared: Prepared, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor
    ) -> TokenLoss:
        every = super().token_losses(prepared, logprobs_N, behaviour_N, advantages_N)
        if self.fault == "raised":
            raise KeyError("oops")
        values: Any = {
            "sum": every.values_N.sum(),
            "list": every.values_N.tolist(),
            "integers": every.values_N.long(),
            "detached": every.values_N.detach(),
        }[self.fault]
        return TokenLoss(values, every.clipped_N)


class WithoutStatement:
    def prepare(self, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor) -> None: ...

    def token_losses(
        self, prepared: Prepared, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor
    ) -> None: ...


class WithoutPrepare:
    whole_minibatch = False

    def token_losses(self) -> None: ...


def custom(name: str, **args: object) -> TrainConfig:
    return LINEAR.model_copy(update={"loss": CustomLoss(path=f"{HERE}:{name}", args=args)})


def stepped(config: TrainConfig) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Metrics of one step from the same weights, and the weights after it."""
    weights = base_weights()
    engine = make_engine(config, MODEL_CONFIG, 3)
    engine.set_weights(weights)
    metrics = engine.step(sampled_batch(reference_model(weights), num_rows=10, noise=0.3))
    return metrics, {name: to_torch(tensor).numpy() for name, tensor in engine.weights().items()}


def test_a_custom_loss_equal_to_a_built_in_one_trains_the_same_bits() -> None:
    args = {"clip_low": 0.1, "clip_high": 0.3}
    path = "trainer.losses.ppo_clip:PpoClip"
    config = LINEAR.model_copy(update={"loss": PpoClip.model_validate(args)})
    metrics, weights = stepped(config)
    other_metrics, other = stepped(
        config.model_copy(update={"loss": CustomLoss(path=path, args=args)})
    )
    assert metrics == other_metrics
    assert metrics["trainer/clip_high"] == pytest.approx(0.3)
    assert all(np.array_equal(weights[name], other[name]) for name in weights)


def test_arguments_are_passed_to_the_class_and_its_constants_become_metrics() -> None:
    metrics, _ = stepped(custom("Plain", factor=2.0))
    assert metrics["trainer/factor"] == 2.0
    assert metrics["trainer/loss"] == pytest.approx(2 * stepped(custom("Plain"))[0]["trainer/loss"])
    assert "trainer/clip_low" not in metrics


def test_aggregation_is_a_setting_of_every_loss() -> None:
    loss = CustomLoss(path=f"{HERE}:Plain", aggregate="constant", constant_length=10)
    mean = stepped(custom("Plain"))[0]
    other = stepped(LINEAR.model_copy(update={"loss": loss}))[0]
    assert other["trainer/loss"] == pytest.approx(
        mean["trainer/loss"] * mean["trainer/tokens"] / 100
    )


def test_a_loss_of_the_whole_minibatch_does_not_depend_on_micro_batches() -> None:
    config = custom("CentredLogRatio")
    metrics, weights = stepped(config)
    split_metrics, split = stepped(config.model_copy(update={"micro_batch_tokens": 15}))
    assert 0.2 < metrics["trainer/masked_share"] < 0.8
    assert split_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-6)
    assert all(np.allclose(weights[name], split[name], rtol=1e-4, atol=1e-5) for name in weights)


@pytest.mark.parametrize("micro_batch_tokens", [4096, 16])
@pytest.mark.parametrize("name", ["WeightedInPlace", "WholeInPlace"])
def test_a_loss_that_works_in_place_trains_the_same_bits(
    name: str, micro_batch_tokens: int
) -> None:
    update = {"micro_batch_tokens": micro_batch_tokens}
    metrics, weights = stepped(custom("Weighted").model_copy(update=update))
    other_metrics, other = stepped(custom(name).model_copy(update=update))
    assert other_metrics == metrics
    assert all(np.array_equal(weights[name], other[name]) for name in weights)


def test_a_correction_that_works_in_place_trains_the_same_bits() -> None:
    def corrected(name: str) -> TrainConfig:
        correction = CustomCorrection(path=f"{HERE}:{name}")
        loss = CustomLoss(path=f"{HERE}:Weighted", correction=correction)
        return LINEAR.model_copy(update={"loss": loss})

    metrics, weights = stepped(corrected("InverseRatio"))
    other_metrics, other = stepped(corrected("InverseRatioInPlace"))
    assert metrics["trainer/ratio/mean"] == 1.0  # of the trained and the proximal policy
    assert other_metrics == metrics
    assert all(np.array_equal(weights[name], other[name]) for name in weights)


@pytest.mark.parametrize("name", ["loss", "lr", "step_s", "wait_s", "publish_s", "tokens_per_s"])
def test_a_constant_with_the_name_of_a_metric_is_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"scalars by the name of other metrics: {name}; rename them"
    ):
        stepped(custom("TakesAMetric", metric=name))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no prepared", "prepare of .* failed: it must return a Prepared, not NoneType"),
        ("metric", r"prepare of .* failed: scalars\['mean'\] must be a number, not NoneType"),
        ("short", r"prepare of .* failed: per_token\['w'\] .* shape \[\d+\], not Tensor \[1\]"),
        ("sum", r"token_losses of .* failed: values_N .* shape \[\d+\], not Tensor \[\]"),
        ("list", r"token_losses of .* failed: values_N .* shape \[\d+\], not list \[\]"),
        ("integers", "token_losses of .* failed: values_N must be floating-point values with a"),
        ("detached", "token_losses of .* failed: values_N must be floating-point values with a"),
        ("raised", "token_losses of .* failed: KeyError: 'oops'"),
    ],
)
def test_a_fault_of_a_custom_loss_names_setting_and_class(fault: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^train\.loss\.path: {message}") as raised:
        stepped(custom("Wrong", fault=fault))
    cause = raised.value.__cause__  # its traceback shows the user's line
    assert isinstance(cause, TypeError | ValueError | KeyError)
    assert str(raised.value).endswith(f" of {HERE}:Wrong failed: {described(cause)}")


class Backward(Plain):
    """Fails in the backward pass, or for want of memory in one of its methods."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def prepare(self, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor) -> Prepared:
        if self.fault == "prepare":
            raise torch.OutOfMemoryError
        return Prepared()

    def token_losses(
        self, prepared: Prepared, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor
    ) -> TokenLoss:
        values_N = -(logprobs_N - behaviour_N).exp() * advantages_N
        if self.fault == "in place":
            advantages_N.zero_()
        if self.fault == "token_losses":
            raise torch.OutOfMemoryError
        if self.fault == "memory":
            values_N.register_hook(out_of_memory)
        return TokenLoss(values_N, torch.zeros_like(advantages_N, dtype=torch.bool))


@pytest.mark.parametrize("method", ["prepare", "token_losses"])
def test_want_of_memory_in_a_custom_loss_is_raised_as_it_is(method: str) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        stepped(custom("Backward", fault=method))


def out_of_memory(gradient: Tensor) -> None:
    raise torch.OutOfMemoryError


def test_an_error_of_a_custom_loss_in_the_backward_pass_names_setting_and_class() -> None:
    with pytest.raises(
        ConfigError,
        match=rf"^train\.loss\.path: the gradient of {HERE}:Backward failed: RuntimeError: .*inplace",
    ):
        stepped(custom("Backward", fault="in place"))


def test_other_errors_of_a_backward_pass_with_a_custom_loss_are_raised_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        stepped(custom("Backward", fault="memory"))

    def lost(model: OneProcess, loss: Tensor, *, last: bool) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(OneProcess, "backward", lost)
    with pytest.raises(RuntimeError, match=r"^the device is lost$"):
        stepped(custom("Plain"))


def test_a_class_without_the_loss_interface_is_refused_before_it_is_built() -> None:
    refused = {
        "WithoutPrepare": r"has no prepare; a loss is a class with prepare\(logprobs_N, behaviour_N, "
        r"advantages_N\) and token_losses\(.*\) \(docs/extending/losses\.md\)",
        "WithoutStatement": "has no class attribute whole_minibatch, True or False; see docs/extending/losses.md",
        "vector": "has no 'vector'",
        "custom": "is a function and no class",
    }
    for name, why in refused.items():
        with pytest.raises(ConfigError, match=rf"^train\.loss\.path: .*{why}"):
            CustomLoss(path=f"{HERE}:{name}").make()
    with pytest.raises(
        ConfigError, match=r"^train\.loss\.path: .*does not take args \{'beta': 1\}"
    ):
        CustomLoss(path=f"{HERE}:Plain", args={"beta": 1}).make()
    with pytest.raises(
        ConfigError, match=r"^train\.loss\.path: os:system is part of Python's standard library"
    ):
        CustomLoss(path="os:system").make()
    with pytest.raises(
        ConfigError,
        match=r"^train\.loss\.path: 'Plain' is not known; use one of none, or an import path",
    ):
        CustomLoss(path="Plain").make()
    assert BUILT == []


def test_arguments_refused_by_the_class_are_named() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^train\.loss\.args: .*:Plain refuses \{'factor': -1\}: factor must be pos",
    ):
        CustomLoss(path=f"{HERE}:Plain", args={"factor": -1}).make()
    with pytest.raises(
        ConfigError, match=r"^train\.loss\.args: .*:Broken refuses {}: KeyError: 'x'"
    ):
        CustomLoss(path=f"{HERE}:Broken").make()


class Large(Plain):
    """A loss, and a correction, that does not fit into the memory of the device."""

    def __init__(self) -> None:
        raise torch.OutOfMemoryError

    def token_weights(self, proximal_N: Tensor, behaviour_N: Tensor, sequence_N: Tensor) -> Tensor:
        raise AssertionError


@pytest.mark.parametrize("kind", [CustomLoss, CustomCorrection])
def test_an_error_of_the_device_in_a_constructor_is_raised_as_it_is(
    kind: type[CustomLoss | CustomCorrection],
) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        kind(path=f"{HERE}:Large").make()


def test_a_package_that_is_not_allowed_is_not_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "forbidden_loss.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ASTRAFLOW_IMPORT_ALLOW", "my_package")
    with pytest.raises(
        ConfigError,
        match="forbidden_loss:Loss is not imported: ASTRAFLOW_IMPORT_ALLOW allows my_package",
    ):
        CustomLoss(path="forbidden_loss:Loss").make()
    assert "forbidden_loss" not in sys.modules


def test_settings_of_a_custom_loss_are_read_without_importing_it() -> None:
    loss = TrainConfig.model_validate(
        {"loss": {"name": "custom", "path": "nowhere.at_all:Loss"}}
    ).loss
    assert isinstance(loss, CustomLoss)
    assert (loss.path, loss.args) == ("nowhere.at_all:Loss", {})
