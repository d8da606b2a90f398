"""Compiled layers compute what uncompiled ones do; what cannot be compiled is an error."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters

from storage.errors import ConfigError
from tests.contract.test_train_engine import SEED, apart, moves, through_files
from tests.support.models.trainer_cases import (
    LINEAR,
    MODEL_CONFIG,
    SCALAR_CODE,
    base_weights,
    reference_model,
    sampled_batch,
)
from trainer.adapters import Lora
from trainer.config import TrainConfig
from trainer.engines.engine import make_engine
from trainer.engines.torch.compiled_layers import CACHE_PREFIX, CACHE_VARIABLE, compile_layers
from trainer.engines.torch.engine import TorchTrainEngine
from trainer.losses import M2po
from trainer.losses.reference_kl import ReferenceKl

pytestmark = pytest.mark.filterwarnings(  # torch's own, while it compiles
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)
CHILD = f"""
import os, sys, torch
from trainer.engines.torch.compiled_layers import check_compiler
try:
    check_compiler(torch.device("cpu"))
finally:
    print(os.environ[{CACHE_VARIABLE!r}], flush=True)
sys.stdin.read()
"""
COMPILER = """
import torch
from trainer.engines.torch.compiled_layers import check_compiler
check_compiler(torch.device("cpu"))
"""
WITH_REFERENCE = {
    "packing": "packed",
    "reference": ReferenceKl(coefficient=0.5),
    "loss": M2po(m2_form="water_filled", m2_threshold=0.04),
    "micro_batch_tokens": 25,
}
ADAPTED = {"adapter": Lora(rank=4), "activation_checkpointing": True}
THREE_LAYERS = MODEL_CONFIG | {"num_hidden_layers": 3}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(*SCALAR_CODE)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def started(settings: Mapping[str, object]) -> TorchTrainEngine:
    engine = make_engine(LINEAR.model_copy(update={"lr": 1e3, **settings}), THREE_LAYERS, seed=SEED)
    assert isinstance(engine, TorchTrainEngine)
    engine.set_weights(base_weights(config=THREE_LAYERS))
    if engine._config.reference is not None:
        engine.set_reference(base_weights(seed=5, config=THREE_LAYERS))
    return engine


@pytest.mark.parametrize(
    ("settings", "backend", "forms"),
    [(WITH_REFERENCE, "inductor", 6), (ADAPTED, "aot_eager", 3)],
    ids=["packed", "padded lora"],
)
def test_compiled_layers_train_as_uncompiled_ones_and_share_their_code(
    settings: Mapping[str, object], backend: str, forms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row and several are different forms of a layer. With aot_eager, torch compiles all but
    the C++ code, which takes most of the time.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    model = reference_model(base_weights(config=THREE_LAYERS), THREE_LAYERS)
    plain, compiled = started(settings), started({**settings, "compile": True})
    before = plain.weights()
    for step, num_rows in enumerate((5, 1, 7), 1):
        given = sampled_batch(model, step, num_rows=num_rows, noise=0.3)
        assert compiled.step(given) == pytest.approx(plain.step(given), rel=1e-5, abs=1e-5)
    # With gradients, without, and of the reference or after an adapter, each of one row and of
    # several; if each of the three layers had forms of its own, there would be three times as many.
    assert 2 <= counters["stats"]["unique_graphs"] < 2 * forms
    assert compiled.weights().keys() == plain.weights().keys()
    assert apart(moves(compiled, before), moves(plain, before)) < 1e-4
    again = started({**settings, "compile": True})
    again.load(*through_files(*compiled.save()))
    if again._config.reference is not None:
        again.set_reference(base_weights(seed=5, config=THREE_LAYERS))
    last = sampled_batch(model, 4)
    assert again.step(last) == pytest.approx(compiled.step(last), rel=1e-6)


class Layer(torch.nn.Module):
    def forward(self, value: torch.Tensor, form: str) -> torch.Tensor:
        if form == "impossible":
            torch._dynamo.graph_break()
        return value + len(form)


def model_of(layer: torch.nn.Module) -> torch.nn.Module:
    model = torch.nn.Sequential(layer)
    model._no_split_modules = ["Layer"]
    model.config = SimpleNamespace(model_type="made_up")
    return model


def test_what_cannot_be_compiled_is_an_error_that_names_the_model() -> None:
    layer = Layer()
    compile_layers(model_of(layer))
    with pytest.raises(ConfigError, match=r"type made_up cannot be compiled: .*leave compile out"):
        layer(torch.ones(2), "impossible")


def test_more_forms_than_the_limit_are_an_error_and_not_run_uncompiled() -> None:
    layer = Layer()
    compile_layers(model_of(layer))
    with torch._dynamo.config.patch(recompile_limit=1):
        assert layer(torch.ones(2), "one").tolist() == [4, 4]
        with pytest.raises(ConfigError, match="type made_up cannot be compiled"):
            layer(torch.ones(2), "three")


def test_a_model_without_named_layers_is_refused() -> None:
    model = model_of(Layer())
    model._no_split_modules = None  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="type made_up name no layers"):
        compile_layers(model)


def test_deepspeed_and_compile_are_refused_together() -> None:
    with pytest.raises(ValueError, match="deepspeed compiles nothing"):
        TrainConfig(engine="deepspeed", compile=True)


def test_the_cache_of_a_killed_process_is_deleted_and_a_missing_compiler_is_named(
    tmp_path: Path,
) -> None:
    def child(**variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(tmp_path), **variables},
            text=True,
        )

    killed = child()
    assert killed.stdout
    folder = Path(killed.stdout.readline().strip())
    assert folder.parent == tmp_path
    assert any(folder.rglob("*.so"))
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert folder.exists()
    without = child(CXX="/nowhere/g++")
    errors = without.communicate()[1]
    assert without.returncode != 0
    assert "ConfigError: train.compile: torch cannot compile for cpu" in errors
    assert "/nowhere/g++" in errors
    assert "leave compile out" in errors
    assert not list(tmp_path.glob(f"{CACHE_PREFIX}*"))


def test_no_compiled_code_is_in_a_folder_that_another_user_may_have_made(tmp_path: Path) -> None:
    """torch's own folder cannot be read or written: it is a file."""
    (tmp_path / "torchinductor_me").touch()
    variables = {**os.environ, "TMPDIR": str(tmp_path), "LOGNAME": "me"}
    subprocess.run([sys.executable, "-c", COMPILER], env=variables, check=True)
