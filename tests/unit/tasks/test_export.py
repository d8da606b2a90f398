from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from storage.errors import ConfigError
from tasks.export import export_model
from tests.small_run import SmallRun


def test_an_exported_folder_holds_the_weights_of_its_version_and_the_base_models_files(
    tmp_path: Path,
) -> None:
    made = SmallRun("export")
    made.version("solver", 0, {"config.json": b'{"model_type": "qwen3"}'})
    made.version("solver", 1)
    assert export_model(made.run, "solver", None, tmp_path / "out") == 1
    assert (tmp_path / "out" / "config.json").read_bytes() == b'{"model_type": "qwen3"}'
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.keys() == ["w"]
        assert file.get_tensor("w").view(dtype=torch.int16).tolist() == [1, 2]


def test_a_version_that_does_not_exist_names_the_newest(tmp_path: Path) -> None:
    made = SmallRun("export-absent")
    made.version("solver", 0)
    with pytest.raises(ConfigError, match="solver has no version 7; its newest is 0"):
        export_model(made.run, "solver", 7, tmp_path)
    with pytest.raises(ConfigError, match="nobody has no published weights"):
        export_model(made.run, "nobody", None, tmp_path)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    made = SmallRun("export-unwritable")
    made.version("solver", 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        export_model(made.run, "solver", 0, tmp_path / "file")
