"""Registered models are loaded with MLflow's own functions, and give what the weights give."""

import importlib.metadata
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlflow
import pandas
import pytest
import torch
from transformers import AutoTokenizer

from storage.errors import ConfigError, CorruptError
from storage.records.types import Json
from storage.run import runs
from storage.store.object_store import ObjectStore, open_store
from storage.weights import publisher
from tasks.base_models.config import TinyBase
from tasks.base_models.tiny import model_config, model_files
from tasks.recipes.loader import load
from tasks.tracking import loadable_models, referenced_model
from tasks.tracking.mlflow_sync import Tracker
from tests.support.models.random_models import random_model
from tests.support.runs.contestants import version_of
from tests.support.runs.small_run import RECIPE, RUN_ID, SmallRun
from trainer.engines.torch.host_tensors import to_host

pytestmark = pytest.mark.filterwarnings("ignore")  # of MLflow and transformers

BASE = TinyBase(hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=32)
MODEL = "models:/astraflow-solver/1"
PROMPT = "7 + 8 ="
QUANTIZED = {"quant_method": "bitsandbytes", "load_in_8bit": True}
MORE = {"max_new_tokens": 5, "do_sample": False}


def registered(
    folder: Path,
    uri: str,
    weights: str,
    changed: Json | None = None,
    file: str = "config.json",
    others: Mapping[str, bytes] = MappingProxyType({}),
) -> tuple[ObjectStore, Any]:
    """A completed run of random models, version 3 of which MLflow has; its store and the model.

    `changed` is merged into this file of the model; `others` are further files of it.
    """
    files = {**model_files(BASE), **others}
    files[file] = json.dumps(json.loads(files[file]) | (changed or {})).encode()
    config = load(RECIPE, {"tracking.registered_weights": weights})
    store = open_store(str(folder / "store"))
    run = runs.create_run(store, RUN_ID, config.model_dump(mode="json"))
    model = random_model(model_config(BASE))
    tensors = {name: to_host(value, "BF16") for name, value in model.named_parameters()}
    for policy in config.policies:
        publisher.publish(run, policy, 0, tensors, extra_files=files)
    Tracker(run, RUN_ID, config, uri).finish("completed")
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    return store, model


def answer_of(model: Any, folder: Path) -> str:
    """What plain transformers generates."""
    tokenizer = AutoTokenizer.from_pretrained(_folder_of_base(folder))
    prompt = tokenizer(PROMPT, return_tensors="pt")
    with torch.inference_mode():
        tokens = model.generate(**prompt, **MORE)[0, prompt["input_ids"].shape[1] :]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


@pytest.mark.parametrize("way", ["auto_map", "attribute_map", "configuration_files"])
def test_loading_a_copy_runs_no_code_that_its_configuration_names(
    uri: str, tmp_path: Path, way: str
) -> None:
    import mlflow.transformers
    from mlflow.exceptions import MlflowException

    code, trace = tmp_path / "code", tmp_path / "trace"
    code.mkdir()
    (code / "module.py").write_text(
        f"open({str(trace)!r}, 'w').close()\n"
        "from transformers import Qwen3Config\n\n\nclass Stranger(Qwen3Config): ...\n"
    )
    classes = {"AutoModelForCausalLM": f"{code}--module.Stranger"}
    changed: Json = {"architectures": ["Stranger"]}
    others = {}
    if way == "attribute_map":
        changed |= {way: {"other": "auto_map"}, "other": classes}
    elif way == "configuration_files":
        config = json.loads(model_files(BASE)["config.json"]) | changed | {"auto_map": classes}
        others = {"config.4.0.0.json": json.dumps(config).encode()}
        changed |= {way: list(others)}
    else:
        changed |= {way: classes | {"AutoConfig": classes["AutoModelForCausalLM"]}}
    registered(tmp_path, uri, "copy", changed, others=others)
    with pytest.raises((MlflowException, AttributeError)):
        mlflow.transformers.load_model(MODEL)
    assert not trace.exists()


def test_a_copy_is_loaded_as_a_model_of_transformers(uri: str, tmp_path: Path) -> None:
    import mlflow.transformers

    store, model = registered(tmp_path, uri, "copy")
    (tmp_path / "store").rename(tmp_path / "gone")
    loaded = mlflow.transformers.load_model(MODEL, return_type="components")["model"]
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    assert mlflow.models.get_model_info(MODEL).metadata["astraflow.store"] == store.address


def test_a_model_has_no_requirements_of_the_working_directory(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow copies the files of a uv project there, and installs from them."""
    for name in ("uv.lock", "pyproject.toml"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    registered(tmp_path, uri, "reference")
    models = [path.parent for path in (tmp_path / "artifacts").rglob("MLmodel")]
    release = importlib.metadata.version("astraflow")
    assert models
    for model in models:
        required = (model / "requirements.txt").read_text(encoding="utf-8").split()
        assert required == [f"mlflow=={mlflow.__version__}", f"astraflow=={release}"]
        assert not {"uv.lock", "pyproject.toml"} & {path.name for path in model.iterdir()}


def test_a_reference_is_loaded_from_the_store(uri: str, tmp_path: Path) -> None:
    _, model = registered(tmp_path, uri, "reference")
    loaded = mlflow.pyfunc.load_model(MODEL)
    expected = answer_of(model, tmp_path)
    assert loaded.predict([PROMPT], MORE) == [expected]
    assert loaded.predict(pandas.DataFrame({"prompt": [PROMPT] * 2}), MORE) == [expected] * 2
    weights = [path for path in tmp_path.rglob("*.safetensors") if "artifacts" in path.parts]
    assert weights == []


def test_a_reference_loads_its_weights_whatever_file_the_configuration_names(
    uri: str, tmp_path: Path
) -> None:
    other = random_model(model_config(BASE), seed=1)
    other.save_pretrained(tmp_path / "other")
    changed = {"transformers_weights": str(tmp_path / "other" / "model.safetensors")}
    _, model = registered(tmp_path, uri, "reference", changed)
    path, *_ = (tmp_path / "artifacts").rglob(referenced_model.REFERENCE)
    loaded = referenced_model._load_pyfunc(str(path.parent)).pipeline.model.state_dict()
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.items())


def test_a_reference_to_other_weights_is_refused(uri: str, tmp_path: Path) -> None:
    registered(tmp_path, uri, "reference")
    path, *_ = (tmp_path / "artifacts").rglob(referenced_model.REFERENCE)
    for change, error in (
        ({"digest": "sha256:" + "0" * 64}, "has other weights"),
        ({"run_id": "../other"}, "run_id"),
        ({"version": -1}, "version"),
    ):
        fields = json.loads(path.read_text())
        (tmp_path / "reference.json").write_text(json.dumps(fields | change))
        with pytest.raises((ConfigError, CorruptError), match=error):
            referenced_model._load_pyfunc(str(tmp_path))


def test_a_base_model_that_mlflow_cannot_describe_is_registered_as_files(
    uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small_run = SmallRun("loadable-files")
    for policy in small_run.config.policies:
        small_run.version(policy, 0, {"config.json": b"{}"})
    with caplog.at_level(logging.WARNING, logger="tasks.tracking.loadable_models"):
        Tracker(small_run.run, RUN_ID, small_run.config, uri).finish("completed")
    assert "is registered as plain files, which MLflow cannot load" in caplog.text
    solver, *_ = (path.parent for path in tmp_path.rglob("model.safetensors"))
    assert sorted(path.name for path in solver.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("normalizer", "reason"),
    [
        (
            {
                "type": "Sequence",
                "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}]
                * 40,
            },
            "tokenizer.json",
        ),
        ({"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "PanicException"),
    ],
)
def test_a_hostile_tokenizer_is_registered_as_files(
    normalizer: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first one would make 2^40 characters of its added token, the second makes the library
    panic.
    """
    files = model_files(BASE)
    fields = json.loads(files["tokenizer.json"])
    token = {"id": len(fields["model"]["vocab"]), "content": "a", "normalized": True}
    token |= {"special": False, "single_word": False, "lstrip": False, "rstrip": False}
    fields |= {"normalizer": normalizer, "added_tokens": [*fields["added_tokens"], token]}
    files["tokenizer.json"] = json.dumps(fields).encode()
    small_run = SmallRun(tmp_path.name)
    (policy, *_) = small_run.config.policies
    small_run.version(policy, 0, files)
    version = version_of(small_run.run, policy, 0)
    with loadable_models.loadable_model(small_run.run, policy, version, "copy", {}) as folder:
        assert json.loads((folder / "tokenizer.json").read_bytes()) == fields
        assert not (folder / "MLmodel").exists()
    assert "is registered as plain files" in caplog.text
    assert reason in caplog.text


def test_a_reference_to_a_hostile_tokenizer_is_refused_before_this_process_makes_it(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    monkeypatch.setattr("rollout.agents.template_chat.load_tokenizer", made.append)
    changed = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
    registered(tmp_path, uri, "reference", changed, "tokenizer.json")
    path, *_ = (tmp_path / "artifacts").rglob(referenced_model.REFERENCE)
    with pytest.raises(ConfigError, match="make no tokenizer: "):
        referenced_model._load_pyfunc(str(path.parent))
    assert made == []


@pytest.mark.parametrize("weights", ["copy", "reference"])
def test_no_class_that_a_model_names_makes_its_registered_tokenizer(
    weights: str, uri: str, tmp_path: Path
) -> None:
    import mlflow.transformers

    changed = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 20_000}
    registered(tmp_path, uri, weights, changed, "tokenizer_config.json")
    if weights == "copy":
        tokenizer = mlflow.transformers.load_model(MODEL, return_type="components")["tokenizer"]
    else:
        path, *_ = (tmp_path / "artifacts").rglob(referenced_model.REFERENCE)
        tokenizer = referenced_model._load_pyfunc(str(path.parent)).pipeline.tokenizer
    assert len(tokenizer) == len(AutoTokenizer.from_pretrained(_folder_of_base(tmp_path)))


def test_a_reference_names_a_value_that_only_the_pipeline_reads(uri: str, tmp_path: Path) -> None:
    registered(tmp_path, uri, "reference", {"quantization_config": QUANTIZED})
    path, *_ = (tmp_path / "artifacts").rglob(referenced_model.REFERENCE)
    with pytest.raises(ConfigError, match=r"^transformers makes no pipeline of .*config\.json"):
        referenced_model._load_pyfunc(str(path.parent))


@pytest.mark.parametrize("number", [2**70, -1, "1", [[1]], 1.5, True, 10**6])
def test_a_reference_generates_without_an_end_token_that_is_none(
    number: Any, uri: str, tmp_path: Path
) -> None:
    changed = {"eos_token_id": number, "pad_token_id": 1}
    registered(tmp_path, uri, "reference", changed, "generation_config.json")
    path, *_ = (tmp_path / "artifacts").rglob(referenced_model.REFERENCE)
    loaded = referenced_model._load_pyfunc(str(path.parent))
    assert len(loaded.predict([PROMPT], MORE)) == 1
    settings = loaded.pipeline.model.generation_config
    assert settings.eos_token_id is None
    assert settings.pad_token_id == 1


def test_a_reference_leaves_the_number_of_answers_to_its_caller(uri: str, tmp_path: Path) -> None:
    changed = {"num_return_sequences": 3, "num_beams": 4, "eos_token_id": [1, 2]}
    registered(tmp_path, uri, "reference", changed, "generation_config.json")
    path, *_ = (tmp_path / "artifacts").rglob(referenced_model.REFERENCE)
    loaded = referenced_model._load_pyfunc(str(path.parent))
    assert len(loaded.predict([PROMPT], MORE)) == 1
    settings = loaded.pipeline.model.generation_config
    assert settings.eos_token_id == [1, 2]
    assert settings.num_beams in (None, 1)


def _folder_of_base(folder: Path) -> Path:
    for name, body in model_files(BASE).items():
        (folder / name).write_bytes(body)
    return folder


@pytest.mark.parametrize(
    ("layers", "needs"), [(3, "needs tensors that are not given"), (1_000, "needs more than")]
)
def test_a_reference_to_weights_of_another_model_is_refused_before_it_is_built(
    layers: int, needs: str, uri: str, tmp_path: Path
) -> None:
    registered(tmp_path, uri, "reference", {"num_hidden_layers": layers, "layer_types": None})
    path, *_ = (tmp_path / "artifacts").rglob(referenced_model.REFERENCE)
    with pytest.raises(CorruptError, match=rf"^the weights do not fit .*config\.json.* {needs}"):
        referenced_model._load_pyfunc(str(path.parent))


def test_a_reference_to_a_model_without_a_configuration_is_refused(
    uri: str, tmp_path: Path
) -> None:
    small_run = SmallRun("loadable-reference")
    files = model_files(BASE)
    del files["config.json"]
    for policy in small_run.config.policies:
        small_run.version(policy, 0, files)
    version = version_of(small_run.run, "solver", 0)
    with (
        loadable_models.loadable_model(small_run.run, "solver", version, "reference", {}) as folder,
        pytest.raises(CorruptError, match=r"version 0 of solver has no config\.json"),
    ):
        mlflow.pyfunc.load_model(str(folder))


def test_a_registered_version_has_the_accuracies_of_its_newest_evaluation(uri: str) -> None:
    small_run = SmallRun("loadable-accuracy")
    for policy in small_run.config.policies:
        for version in (0, 1, 2):
            small_run.version(policy, version, {"config.json": b"{}"} if not version else None)
    small_run.evaluation(1, [1, 1], [1, 1])
    small_run.evaluation(2, [0, 1, 0], [1, 1, 0])
    Tracker(small_run.run, RUN_ID, small_run.config, uri).finish("completed")
    client = mlflow.MlflowClient(uri, uri)
    tags = client.get_model_version("astraflow-solver", "1").tags
    assert tags["astraflow.accuracy.chained_addition.single_turn"] == "0.3333"
    assert tags["astraflow.accuracy.chained_addition.actor_and_verify"] == "0.6667"
