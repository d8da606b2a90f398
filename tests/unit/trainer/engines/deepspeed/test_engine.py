import importlib.util

import pytest

from storage.errors import ConfigError
from tests.support.models.trainer_cases import MODEL_CONFIG
from trainer.config import TrainConfig
from trainer.engines.deepspeed.engine import DeepspeedTrainEngine


def test_a_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "deepspeed" else found(name)
    )
    with pytest.raises(ConfigError, match=r"not installed; install astraflow\[deepspeed\]"):
        DeepspeedTrainEngine(TrainConfig(engine="deepspeed"), MODEL_CONFIG, 0)


def test_another_optimizer_than_adamw_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: found("json") if name == "deepspeed" else found(name),
    )
    config = TrainConfig.model_validate({"engine": "deepspeed", "optimizer": {"name": "muon"}})
    with pytest.raises(
        ConfigError, match=r"train\.optimizer: muon cannot be used by the engine deepspeed"
    ):
        DeepspeedTrainEngine(config, MODEL_CONFIG, 0)
