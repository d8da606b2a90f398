"""Settings of the engine `torch` that are not part of the contract of all engines."""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from storage.errors import ConfigError, CorruptError
from storage.formats.safetensors import from_safetensors, to_safetensors, weights_digest
from storage.records.types import Json
from storage.records.weights import HostTensor
from tests.support.models.trainer_cases import (
    MODEL_CONFIG,
    base_weights,
    reference_model,
    sampled_batch,
)
from tests.support.runs.builders import batch, row
from trainer import cpu_bf16
from trainer.config import TrainConfig
from trainer.engines.torch.engine import TorchTrainEngine
from trainer.engines.torch.host_tensors import to_host, to_torch

COUNTING = f"{__name__}:Counting"
NARROW = f"{__name__}:Narrow"


class Counting(torch.optim.Optimizer):
    """w ← w − lr · n · sign(momentum), n the number of the step.

    Its state for a parameter has a tensor and a Python number, and no optimizer of torch has it.
    """

    def __init__(self, params: object, lr: float, decay: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                momentum = group["decay"] * state.get("slow", 0.0) + parameter.grad
                state["slow"] = momentum
                parameter.sub_(momentum.sign(), alpha=group["lr"] * state["count"])


class Narrow(torch.optim.Optimizer):
    """w ← w − lr · n · momentum: no tensor of its state is a float32 one like its parameter."""

    def __init__(self, params: object, lr: float) -> None:
        super().__init__(params, {"lr": lr})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(2**40)
                    state["count"] = torch.tensor(0, dtype=torch.int32)
                    state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                    state["exp_avg_sq"] = torch.zeros(3, dtype=torch.float64)
                    state["codes"] = torch.zeros(len(parameter), dtype=torch.uint8)
                state["step"] += 1
                state["count"] += 1
                state["codes"] += 200  # of bytes
                state["exp_avg"].mul_(0.9).add_(parameter.grad)
                state["exp_avg_sq"] -= parameter.grad.double().norm()
                factor = float(state["count"] * state["exp_avg_sq"].mean().tanh().abs())
                parameter.sub_(state["exp_avg"].float(), alpha=group["lr"] * factor)


def started(**settings: object) -> TorchTrainEngine:
    config = TrainConfig.model_validate({"lr": 1e-2, "publish_dtype": "F32", **settings})
    engine = TorchTrainEngine(config, MODEL_CONFIG, seed=3)
    engine.set_weights(base_weights())
    return engine


def through_files(
    tensors: Mapping[str, HostTensor], state: Json
) -> tuple[dict[str, HostTensor], Json]:
    """Serialize and deserialize as a checkpoint does."""
    return from_safetensors(to_safetensors(tensors)), json.loads(json.dumps(state, allow_nan=False))


def moves(engine: TorchTrainEngine) -> dict[str, torch.Tensor]:
    """The change of each tensor since the base weights."""
    before = base_weights()
    return {
        name: to_torch(tensor) - to_torch(before[name]).float()
        for name, tensor in engine.weights().items()
    }


def test_a_row_that_is_longer_than_the_contexts_of_the_model_is_refused() -> None:
    positions = MODEL_CONFIG["max_position_embeddings"]
    engine = started()
    engine.step(batch(row(prompt=[1], answer=[2] * (positions - 1))))
    with pytest.raises(CorruptError, match=f"it has {positions + 1} tokens"):
        engine.step(batch(row(prompt=[1], answer=[2] * positions)))


BATCHES = [sampled_batch(reference_model(base_weights()), step, noise=0.1) for step in range(1, 5)]
OPTIMIZERS = {
    "adamw": {"name": "adamw"},
    "muon": {"name": "muon"},
    "sgd": {"name": "custom", "path": "torch.optim:SGD", "args": {"momentum": 0.9}},
    "sgd_without_a_state": {"name": "custom", "path": "torch.optim:SGD"},
    "adamax": {"name": "custom", "path": "torch.optim:Adamax"},
    "own": {"name": "custom", "path": COUNTING, "args": {"decay": 0.25}},
    "narrow": {"name": "custom", "path": NARROW},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_engine_continues_bit_for_bit_with_any_optimizer(
    optimizer: Json, precision: str
) -> None:
    settings = {"optimizer": optimizer, "warmup_steps": 3, "minibatches": 2, "lr": 1e-3}
    straight = started(**settings, precision=precision)
    for given in BATCHES[:2]:
        straight.step(given)
    resumed = started(**settings, precision=precision)
    resumed.load(*through_files(*straight.save()))
    for given in BATCHES[2:]:
        assert straight.step(given) == resumed.step(given)
    assert weights_digest(straight.weights()) == weights_digest(resumed.weights())
    assert weights_digest(straight.save()[0]) == weights_digest(resumed.save()[0])
    assert straight.save()[1] == resumed.save()[1]


def test_the_state_of_a_custom_optimizer_keeps_the_dtype_of_each_tensor() -> None:
    engine, resumed = (started(optimizer=OPTIMIZERS["narrow"]) for _ in range(2))
    engine.step(BATCHES[0])
    saved, state = through_files(*engine.save())
    before = weights_digest(saved)
    resumed.load(saved, state)
    resumed.step(BATCHES[1])
    assert weights_digest(saved) == before  # the engine has its own memory
    tensors, _ = resumed.save()
    found = {
        name.rpartition("/")[2]: tensor
        for name, tensor in tensors.items()
        if name.startswith("optimizer/model.norm.weight/")
    }
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()} == {
        "step": ("I64", ()),
        "count": ("I32", ()),
        "exp_avg": ("BF16", (16,)),
        "exp_avg_sq": ("F64", (3,)),
        "codes": ("U8", (16,)),
    }
    assert int(to_torch(found["step"])) == 2**40 + 2
    assert int(to_torch(found["count"])) == 2
    assert set(to_torch(found["codes"]).tolist()) == {400 - 256}


def test_a_state_in_a_dtype_that_cannot_be_saved_is_named() -> None:
    engine = started(optimizer=OPTIMIZERS["sgd"])
    (optimizer,) = engine._trained._optimizers
    parameter = engine._trained.parameters["model.norm.weight"]
    optimizer.state[parameter]["phase"] = torch.zeros(2, dtype=torch.complex64)
    with pytest.raises(ConfigError, match=r"phase in the state of model.norm.weight .*complex64"):
        engine.save()


@pytest.mark.parametrize("name", ["muon", "sgd"])
def test_an_optimizer_that_may_need_whole_matrices_is_refused_on_several_ranks(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"train.optimizer: \w+ cannot be used with train.ranks 2"
    ):
        started(optimizer=OPTIMIZERS[name], ranks=2)


def test_muon_makes_the_updates_of_layer_matrices_orthogonal_and_leaves_the_rest_to_adamw() -> None:
    engine, adamw = (
        started(optimizer={"name": name}, weight_decay=0.0) for name in ("muon", "adamw")
    )
    engine.step(BATCHES[0])
    adamw.step(BATCHES[0])
    by_adamw = moves(adamw)
    num_matrices = 0
    for name, move in moves(engine).items():
        if move.dim() == 2 and "embed" not in name:
            scale = 0.01 * 0.2 * max(move.shape) ** 0.5  # arXiv 2502.16982: the RMS of AdamW
            singular = torch.linalg.svdvals(move.double()) / scale
            assert float(singular.max()) < 1.3, name
            assert float(singular.quantile(0.1)) > 0.5, name  # those of the gradient span decades
            num_matrices += 1
        else:
            assert torch.equal(move, by_adamw[name]), name
    assert num_matrices == 2 * 7  # in each layer q, k, v, o, gate, up, down


def test_a_custom_optimizer_has_the_learning_rate_and_decay_of_matrices_only() -> None:
    engine = started(
        optimizer={"name": "custom", "path": "torch.optim:SGD"}, weight_decay=0.5, warmup_steps=2,
        grad_clip=1e-9,
    )  # fmt: skip
    assert engine.step(BATCHES[0])["trainer/lr"] == 0.5e-2
    for name, move in moves(engine).items():
        before = to_torch(base_weights()[name]).float()
        expected = -0.5e-2 * 0.5 * before if before.dim() == 2 else torch.zeros_like(before)
        assert torch.allclose(move, expected, rtol=1e-4, atol=1e-7), name


def test_the_form_of_an_adamw_state_is_that_of_earlier_releases() -> None:
    engine = started()
    engine.step(BATCHES[0])
    tensors, state = engine.save()
    assert state.keys() == {"format", "updates", "rng"}
    assert set(state["updates"].values()) == {1}
    assert {name.rpartition("/")[2] for name in tensors if name.startswith("optimizer/")} == {
        "exp_avg",
        "exp_avg_sq",
    }


def test_a_state_with_an_absurd_number_of_optimizer_steps_is_refused() -> None:
    """After a step of the largest one that is read, what is saved can be read, too."""
    engine = started()
    engine.step(BATCHES[0])
    tensors, state = through_files(*engine.save())
    state["updates"] = dict.fromkeys(state["updates"], 2**53)
    engine.load(tensors, state)
    engine.step(BATCHES[1])
    engine.load(*through_files(*engine.save()))
    state["updates"]["model.norm.weight"] = 2**53 + 1
    with pytest.raises(CorruptError, match=r"updates.model.norm.weight: .* less than or equal to"):
        engine.load(tensors, state)


def test_the_state_of_another_optimizer_is_refused() -> None:
    states = {}
    for name in ("adamw", "muon", "own"):
        engine = started(optimizer=OPTIMIZERS[name])
        engine.step(BATCHES[0])
        states[name] = engine.save()
    for name, other in (("adamw", "muon"), ("muon", "adamw"), ("adamw", "own"), ("muon", "own")):
        with pytest.raises(CorruptError, match=r"is not one of (AdamW|Muon)"):
            started(optimizer=OPTIMIZERS[name]).load(*states[other])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("missing", "optimizer's state does not belong to this model"),
        ("not_finite", "model.norm.weight/slow has an element that is not finite"),
        ("unknown_parameter", "optimizer's state does not belong to this model"),
    ],
)
def test_a_damaged_state_of_a_custom_optimizer_is_refused(damage: str, words: str) -> None:
    engine = started(optimizer=OPTIMIZERS["own"])
    engine.step(BATCHES[0])
    tensors, state = through_files(*engine.save())
    label = "optimizer/model.norm.weight/slow"
    if damage == "missing":
        del tensors[label]
    elif damage == "not_finite":
        tensors[label] = HostTensor("F32", (16,), np.full(16, 0x7FC00000, np.uint32))
    else:
        state["moments"]["nobody"] = []
    with pytest.raises(CorruptError, match=words):
        engine.load(tensors, state)


class Keeping(torch.optim.Optimizer):
    """Gradient descent that keeps `kept` for each parameter."""

    kept: object = None

    def __init__(self, params: object, lr: float) -> None:
        super().__init__(params, {"lr": lr})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["kept"] = self.kept
                parameter.sub_(parameter.grad, alpha=group["lr"])


def keeping(kept: object, monkeypatch: pytest.MonkeyPatch) -> TorchTrainEngine:
    monkeypatch.setattr(Keeping, "kept", kept)
    return started(optimizer={"name": "custom", "path": f"{__name__}:Keeping"})


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        (float("inf"), "is inf; only finite numbers"),
        (float("nan"), "is nan; only finite numbers"),
        ("text", "is a str; only"),
        (torch.zeros(2, dtype=torch.complex64), "is a tensor of torch.complex64"),
        (torch.zeros(2, 2).to_sparse(), "and torch.sparse_coo; only finite .* dense tensors"),
        (10**400, "is a int; only finite numbers"),
    ],
)
def test_a_state_that_could_not_be_read_again_is_not_saved(
    kept: object, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = keeping(kept, monkeypatch)
    engine.step(BATCHES[0])
    with pytest.raises(ConfigError, match=f"train.optimizer: Keeping: kept in the .* {words}"):
        engine.save()


def test_a_tensor_of_a_state_that_cannot_be_copied_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = keeping(torch.zeros(2, device="meta"), monkeypatch)
    engine.step(BATCHES[0])
    with pytest.raises(
        ConfigError, match=r"^train\.optimizer: reading the state of Keeping failed: NotImplem"
    ):
        engine.save()


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"kept": torch.tensor([1.0, math.inf])}, r".*/kept has an element that is not finite"),
        ({"kept": torch.tensor(math.nan)}, r".*/kept has an element that is not finite"),
        ({"\ud800": 1}, "Error serializing to JSON: .*surrogates not allowed"),
    ],
)
def test_a_state_that_a_resumed_trainer_would_refuse_is_not_saved(
    state: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = keeping(1, monkeypatch)
    engine.step(BATCHES[0])
    parameter_state(engine).update(state)
    with pytest.raises(
        ConfigError,
        match=rf"^train\.optimizer: a trainer could not resume with the state of .*:Keeping: {words}",
    ):
        engine.save()


@pytest.mark.parametrize("value", [3, torch.ones(2)])
def test_a_key_of_a_state_that_is_no_text_is_named(
    value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = keeping(1, monkeypatch)
    engine.step(BATCHES[0])
    parameter_state(engine)[0] = value
    with pytest.raises(
        ConfigError, match=r"^train\.optimizer: Keeping: 0 in the state of .* is a key that is no"
    ):
        engine.save()


def test_a_step_that_is_no_counter_is_saved_as_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = keeping(1, monkeypatch)
    engine.step(BATCHES[0])
    parameter_state(engine)["step"] = torch.tensor(-3.0)
    saved = through_files(*engine.save())
    resumed = keeping(1, monkeypatch)
    resumed.load(*saved)
    assert float(parameter_state(resumed)["step"]) == -3.0


def parameter_state(engine: TorchTrainEngine) -> dict[Any, Any]:
    """Return what the optimizer keeps for the first parameter."""
    (optimizer,) = engine._trained._optimizers
    state: dict[Any, Any] = optimizer.state[optimizer.param_groups[0]["params"][0]]
    return state


class Labelled(Keeping):
    """Keeps a state under a key of its own, beside the states of the parameters."""

    key: object = "count"

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        self.state[self.key] = {"steps": 1}  # type: ignore[index]


class Extended(Keeping):
    """Has a parameter of its own."""

    def __init__(self, params: object, lr: float) -> None:
        super().__init__(params, lr)
        self.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2, 3))]})


@pytest.mark.parametrize(
    ("key", "words"), [("count", "'count'"), (torch.zeros(2, 3), r"a tensor of shape \[2, 3\]")]
)
def test_a_state_of_what_is_no_parameter_is_named(
    key: object, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Keeping, "kept", 1)
    monkeypatch.setattr(Labelled, "key", key)
    engine = started(optimizer={"name": "custom", "path": f"{__name__}:Labelled"})
    engine.step(BATCHES[0])
    with pytest.raises(
        ConfigError, match=rf"^train\.optimizer: Labelled has a state of {words}, which is no param"
    ):
        engine.save()


def test_an_optimizer_with_a_parameter_of_its_own_is_refused_before_a_step() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^train\.optimizer: .*:Extended has a parameter of shape \[2, 3\] that is none of",
    ):
        started(optimizer={"name": "custom", "path": f"{__name__}:Extended"})


class Averaging(torch.optim.Optimizer):
    """Keeps a mean of each gradient in its state, and subtracts that."""

    def __init__(self, params: object, lr: float) -> None:
        super().__init__(params, {"lr": lr})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 0.5)
                parameter.sub_(mean, alpha=group["lr"])


def test_a_step_that_a_custom_optimizer_cannot_take_with_its_saved_state_says_what_to_do() -> None:
    settings = {"name": "custom", "path": f"{__name__}:Averaging"}
    engine = started(optimizer=settings)
    engine.step(BATCHES[0])
    tensors, state = through_files(*engine.save())
    name = next(each for each in tensors if each.endswith("/mean"))
    tensors[name] = to_host(torch.zeros(3))
    resumed = started(optimizer=settings)
    resumed.load(tensors, state)
    with pytest.raises(
        ConfigError,
        match=r"^train.optimizer: step\(\) of Averaging failed: .*; correct the class or its args. "
        "If it was resumed, its saved state may be damaged: delete the newest checkpoint$",
    ):
        resumed.step(BATCHES[1])


@pytest.mark.parametrize(
    ("raised", "name"),
    [(MemoryError(), "custom"), (ConfigError("mine"), "custom"), (RuntimeError("raw"), "adamw")],
)
def test_other_errors_of_a_step_are_not_translated(
    raised: Exception, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = {"path": f"{__name__}:Averaging"} if name == "custom" else {}
    engine = started(optimizer={"name": name, **path})
    owner = Averaging if name == "custom" else torch.optim.AdamW

    def step(self: object, closure: object = None) -> None:
        raise raised

    monkeypatch.setattr(owner, "step", step)
    with pytest.raises(type(raised)) as caught:
        engine.step(BATCHES[0])
    assert caught.value is raised


def test_a_flag_of_a_custom_optimizer_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = keeping(True, monkeypatch)
    engine.step(BATCHES[0])
    saved = through_files(*engine.save())
    resumed = keeping(None, monkeypatch)
    resumed.load(*saved)
    assert resumed.save()[1] == engine.save()[1]
    assert set(engine.save()[1]["numbers"]["model.norm.weight"].values()) == {1}


def test_arguments_that_a_custom_optimizer_refuses_are_named() -> None:
    negative = {"name": "custom", "path": "torch.optim:SGD", "args": {"momentum": -1.0}}
    with pytest.raises(ConfigError, match=r"train.optimizer.args: torch.optim:SGD refuses .*-1.0"):
        started(optimizer=negative)
    missing = {"name": "custom", "path": "torch.optim:Nothing"}
    with pytest.raises(ConfigError, match=r"train\.optimizer\.path: the module torch.optim has no"):
        started(optimizer=missing)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer": {"name": "muon"}}, "train.optimizer: muon needs bf16 instructions"),
        ({"precision": "bf16"}, "train.precision: bf16 needs bf16 instructions"),
    ],
)
def test_a_cpu_that_would_end_the_process_is_refused(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], words: str
) -> None:
    monkeypatch.delenv(cpu_bf16.ISA_VARIABLE)
    monkeypatch.setattr(cpu_bf16, "reports_bf16", lambda: True)
    monkeypatch.setattr(cpu_bf16, "survives_bf16", lambda: False)
    cpu_bf16.check_bf16.cache_clear()
    with pytest.raises(ConfigError, match=words):
        started(**settings)
    monkeypatch.setattr(cpu_bf16, "survives_bf16", lambda: True)
    cpu_bf16.check_bf16.cache_clear()
    cpu_bf16.check_bf16("this CPU")


def test_a_step_in_bf16_is_close_to_that_in_fp32_and_keeps_fp32_masters() -> None:
    exact, rounded = (
        started(grad_clip=1e9, lr=1e4, eps=1e4),
        started(grad_clip=1e9, lr=1e4, eps=1e4, precision="bf16"),
    )  # so large an eps makes Adam plain gradient descent
    metrics, close = exact.step(BATCHES[0]), rounded.step(BATCHES[0])
    # CPUs without products in bf16 round partial sums too: 0.011 of the loss was seen there.
    for name in ("trainer/loss", "trainer/entropy/mean", "trainer/kl/mean"):
        assert close[name] == pytest.approx(metrics[name], abs=3e-2)
    assert close["trainer/loss"] != metrics["trainer/loss"]
    one, other = (
        torch.cat([move.flatten().double() for move in moves(engine).values()])
        for engine in (exact, rounded)
    )
    assert float(torch.cosine_similarity(one, other, dim=0)) > 0.999
    tensors, _ = rounded.save()
    assert {tensor.dtype for name, tensor in tensors.items() if "rng" not in name} == {"F32"}
    master = to_torch(tensors["model/model.norm.weight"])
    assert not torch.equal(master, master.bfloat16().float())


def test_micro_batches_and_checkpointing_change_a_bf16_step_only_by_rounding() -> None:
    whole = started(precision="bf16").step(BATCHES[0])
    for settings in ({"micro_batch_tokens": 15}, {"activation_checkpointing": True}):
        assert started(precision="bf16", **settings).step(BATCHES[0]) == pytest.approx(
            whole, rel=2e-2, abs=2e-3
        )


@pytest.mark.parametrize("max_tokens", [15, 4096])
def test_packed_rows_give_the_step_of_padded_ones(max_tokens: int) -> None:
    padded, packed = (
        started(packing=packing, micro_batch_tokens=max_tokens, grad_clip=1e9, lr=1e4, eps=1e4)
        for packing in ("padded", "packed")
    )
    assert packed.step(BATCHES[1]) == pytest.approx(padded.step(BATCHES[1]), rel=1e-5, abs=1e-6)
    after = moves(packed)
    for name, move in moves(padded).items():
        assert float((after[name] - move).abs().max()) <= 1e-5 * float(move.abs().max()), name
