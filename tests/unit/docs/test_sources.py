"""`docs/extending/sources.md`: its example runs as written."""

import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from data_ops.prompts import PROMPT_SOURCES, CustomPrompts
from storage.errors import ConfigError
from storage.formats.safetensors import to_safetensors
from storage.records.weights import HostTensor
from storage.store.object_store import ObjectStore
from tasks.base_models.config import MODEL_SOURCES, CustomModel
from tasks.base_models.publishing import ensure_base_model
from tasks.recipes.loader import load
from tests.support.checkout import ROOT

PAGE = (ROOT / "docs" / "extending" / "sources.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)[0]


@pytest.fixture(autouse=True)
def _example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_sources.py").write_text(block("python"), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_the_recipe_of_the_page_selects_the_classes_of_the_page() -> None:
    written = yaml.safe_load(block("yaml"))
    model, prompts = written["policies"]["solver"]["model"], written["data"]["prompts"]
    config = load("single_policy_tiny", {"policies.solver.model": model, "data.prompts": prompts})
    assert config.policies["solver"].model == CustomModel(
        custom="my_sources:WithoutBias", args={"folder": "/data/models/mine"}
    )
    assert config.data.prompts == CustomPrompts(
        custom="my_sources:Squares", args={"largest": 100}, seed=1, limit=None
    )


def test_the_prompts_of_the_page_are_used_epoch_by_epoch() -> None:
    stream = CustomPrompts(custom="my_sources:Squares", args={"largest": 5}, seed=1).stream()
    assert [prompt.fields["answer"] for prompt in stream.all()] == ["1", "4", "9", "16", "25"]
    taken, cursor = stream.take({}, 5)
    assert sorted(prompt.id for prompt in taken) == [f"square/{number}" for number in range(1, 6)]
    assert cursor == {"epoch": 0, "position": 5}
    limited = CustomPrompts(custom="my_sources:Squares", args={"largest": 5}, limit=2).stream()
    assert [prompt.id for prompt in limited.all()] == ["square/1", "square/2"]
    longer = CustomPrompts(custom="my_sources:Squares", args={"largest": 2}, limit=5).stream()
    assert len(longer.all()) == 2


class Endless:
    """A source without a last prompt."""

    def size(self) -> None:
        return None

    def prompt(self, index: int) -> object:
        return index


def test_an_endless_source_keeps_its_order_and_cannot_be_read_as_a_whole() -> None:
    stream = CustomPrompts(custom=f"{__name__}:Endless").stream()
    assert stream.take({"epoch": 0, "position": 7}, 2)[0] == [7, 8]
    with pytest.raises(
        ConfigError, match=r"the source of the prompts is endless; set prompts\.limit"
    ):
        stream.all()


def test_the_model_of_the_page_is_loaded_and_published_like_any_other(
    memory_store: ObjectStore, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    ones = HostTensor("BF16", (2,), np.array([16256, 16256], dtype=np.uint16))
    (folder / "model.safetensors").write_bytes(to_safetensors({"a.bias": ones, "a.weight": ones}))
    (folder / "config.json").write_text("{}")
    model = CustomModel(custom="my_sources:WithoutBias", args={"folder": str(folder)})
    made = ensure_base_model(memory_store, model, lambda sentence, share: None)
    assert {name: tensor.bits.tolist() for name, tensor in made.tensors.items()} == {
        "a.bias": [0, 0],
        "a.weight": [16256, 16256],
    }
    assert made.files == {"config.json": b"{}"}


def test_wrong_arguments_are_refused_before_anything_is_built() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^prompts\.custom: my_sources:Squares does not take args \{'smallest': 1\}",
    ):
        CustomPrompts(custom="my_sources:Squares", args={"smallest": 1}).stream()
    with pytest.raises(ConfigError, match=r"^prompts\.args: .*:Refuses refuses \{\}: no"):
        CustomPrompts(custom=f"{__name__}:Refuses").stream()
    with pytest.raises(
        ConfigError,
        match=r"^model\.custom: my_sources:Squares has no load; a base model is a class with load",
    ):
        CustomModel(custom="my_sources:Squares").files(None, lambda sentence, share: None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^model\.args: .*:Refuses refuses \{\}: no"):
        CustomModel(custom=f"{__name__}:Refuses").files(None, lambda sentence, share: None)  # type: ignore[arg-type]


class Refuses:
    def __init__(self) -> None:
        raise ValueError("no")

    def size(self) -> int: ...

    def prompt(self, index: int) -> object: ...

    def load(self, progress: object) -> object: ...


def test_the_page_names_every_source_and_every_setting() -> None:
    for tables, settings_of in ((PROMPT_SOURCES, ("`limit`", "`seed`")), (MODEL_SOURCES, ())):
        for key, model in tables.items():
            row = next(
                line
                for line in PAGE.splitlines()
                if re.match(rf"\|[^|]*\| `{key}: ", line) and all(s in line for s in settings_of)
            )
            for field in model.model_fields.keys() - {key}:
                assert f"`{field}`" in row
