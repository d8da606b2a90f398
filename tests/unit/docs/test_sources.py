"""`docs/extending/sources.md`: its example runs as written."""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import yaml

from data_ops.prompts import PROMPT_SOURCES, CustomPrompts, window
from data_ops.prompts.path import FETCHED_BYTES_MAX
from data_ops.prompts.window import DataWindow, WindowPrompts
from storage.coordination.lifetime import StoppedError
from storage.errors import ConfigError, TransientError
from storage.formats.arrow_sizes import ROWS_MAX
from storage.formats.safetensors import to_safetensors
from storage.records.rollouts import Prompt
from storage.records.weights import HostTensor
from storage.store.object_store import ObjectStore
from tasks.base_models.config import MODEL_SOURCES, CustomModel
from tasks.base_models.publishing import ensure_base_model
from tasks.recipes.loader import load
from tests.support.checkout import ROOT

PAGE = (ROOT / "docs" / "extending" / "sources.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)[-1]


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

    def prompt(self, index: int) -> Prompt:
        return Prompt(f"n/{index}", {"question": str(index), "answer": "1"})


def test_an_endless_source_keeps_its_order_and_cannot_be_read_as_a_whole() -> None:
    stream = CustomPrompts(custom=f"{__name__}:Endless").stream()
    taken, _ = stream.take({"epoch": 0, "position": 7}, 2)
    assert [prompt.id for prompt in taken] == ["n/7", "n/8"]
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


WRONG: dict[str, Callable[[], object]] = {
    "sizes.none_of_it": lambda: 0,
    "sizes.negative": lambda: -1,
    "sizes.text": lambda: "5",
    "sizes.fraction": lambda: 2.5,
    "sizes.truth": lambda: True,
    "prompts.dict": lambda: {"question": "a"},
    "prompts.nothing": lambda: None,
    "prompts.number_as_id": lambda: Prompt(7, {"question": "a"}),  # type: ignore[arg-type]
    "prompts.list_as_fields": lambda: Prompt("a", ["question"]),  # type: ignore[arg-type]
    "models.nothing": lambda: None,
    "models.arrays": lambda: ({"a": np.zeros(3)}, {}),
    "models.text": lambda: ({}, {"config.json": "{}"}),
    "models.empty": lambda: ({}, {}),
}


class Returns:
    """A source of prompts, and of a model, that returns one wrong value."""

    def __init__(self, what: str) -> None:
        self.what = what

    def size(self) -> object:
        return WRONG[self.what]() if self.what.startswith("sizes.") else 3

    def prompt(self, index: int) -> object:
        return WRONG[self.what]()

    def load(self, progress: object) -> object:
        return WRONG[self.what]()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("sizes.none_of_it", "size() of {} returned 0; it must return the number of prompts"),
        ("sizes.negative", "size() of {} returned -1; it must"),
        ("sizes.text", "size() of {} returned '5'; it must"),
        ("sizes.fraction", "size() of {} returned 2.5; it must"),
        ("sizes.truth", "size() of {} returned True; it must"),
        ("prompts.dict", "prompt(0) of {} returned a dict; it must return a Prompt"),
        ("prompts.nothing", "prompt(0) of {} returned a NoneType; it must"),
        ("prompts.number_as_id", "prompt(0) of {} returned a Prompt with a int as id and a dict"),
        ("prompts.missing", "prompt(0) of {} failed: KeyError: 'prompts.missing'"),
        ("sizes.missing", "size() of {} failed: KeyError: 'sizes.missing'"),
        ("prompts.list_as_fields", "returned a Prompt with a str as id and a list as fields"),
    ],
)
def test_a_wrong_result_of_a_source_of_prompts_is_named(what: str, words: str) -> None:
    path = f"{__name__}:Returns"
    with pytest.raises(ConfigError, match=r"^prompts\.custom: ") as refused:
        CustomPrompts(custom=path, args={"what": what}, limit=1).stream().take({}, 1)
    assert words.format(path) in str(refused.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("models.nothing", "returned a NoneType; it must return (tensors, files)"),
        ("models.arrays", "returned a ndarray as the tensor 'a'; it must"),
        ("models.text", "returned a str as the file 'config.json'; it must"),
        ("models.empty", "returned no tensor; it must"),
    ],
)
def test_a_wrong_result_of_a_base_model_is_named(
    memory_store: ObjectStore, what: str, words: str
) -> None:
    model = CustomModel(custom=f"{__name__}:Returns", args={"what": what})
    with pytest.raises(ConfigError, match=r"^model\.custom: load\(\) of .*:Returns ") as refused:
        model.files(memory_store, lambda sentence, share: None)
    assert words in str(refused.value)


class Breaks:
    """Raises when it is built, or later."""

    def __init__(self, when: str = "built") -> None:
        self.when = when
        if when == "built":
            raise KeyError("x")
        if when == "unreachable":
            raise TransientError("503")

    def size(self) -> int:
        raise RuntimeError("no connection")

    def prompt(self, index: int) -> Prompt: ...

    def load(self, progress: object) -> object:
        raise StoppedError if self.when == "stopped" else FileNotFoundError("no such file")


def test_any_error_of_a_source_is_a_configuration_error_that_names_its_class(
    memory_store: ObjectStore,
) -> None:
    path = f"{__name__}:Breaks"
    with pytest.raises(ConfigError, match=r"^prompts\.args: .*:Breaks refuses {}: KeyError: 'x'"):
        CustomPrompts(custom=path).stream()
    with pytest.raises(ConfigError, match=r"size\(\) of .*:Breaks failed: RuntimeError: no conn"):
        CustomPrompts(custom=path, args={"when": "later"}).stream()
    with pytest.raises(ConfigError, match=r"^model\.args: .*:Breaks refuses {}: KeyError: 'x'"):
        CustomModel(custom=path).files(memory_store, lambda sentence, share: None)
    with pytest.raises(ConfigError, match=r"load\(\) of .*:Breaks failed: FileNotFoundError: no s"):
        CustomModel(custom=path, args={"when": "later"}).files(
            memory_store, lambda sentence, share: None
        )
    with pytest.raises(TransientError, match="503"):  # may succeed at the next start
        CustomPrompts(custom=path, args={"when": "unreachable"}).stream()
    with pytest.raises(StoppedError):  # by `progress`, when the service must stop
        CustomModel(custom=path, args={"when": "stopped"}).files(
            memory_store, lambda sentence, share: None
        )


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


def test_the_data_window_of_the_page_is_a_recipe() -> None:
    written = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)[0])
    window = {key: str(value) for key, value in written["prompts"]["window"].items()}
    window["files"] = written["prompts"]["window"]["files"]
    config = load("single_policy_tiny", {"data.prompts": {**written["prompts"], "window": window}})
    assert isinstance(config.data.prompts, WindowPrompts)
    assert config.data.prompts.window.until == datetime(2026, 11, 2, tzinfo=UTC)
    assert config.data.prompts.question == "problem"


def test_the_limits_of_a_data_window_are_those_of_the_code() -> None:
    text = " ".join(PAGE.split())
    assert f"`files`: 1 to {window.PATTERNS_MAX} local paths" in text
    default = DataWindow(files=["a.jsonl"]).bytes_max
    assert f"`bytes_max` (default: {default / 2**30:g} GiB)" in text
    assert f"at most {window.FILES_MAX:,} files and {ROWS_MAX:,} rows" in text
    assert f"up to {FETCHED_BYTES_MAX / 2**30:g} GiB, and is checked there" in text
