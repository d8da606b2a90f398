"""Settings of adapters."""

import pytest
from pydantic import ValidationError

from storage.formats.model_sizes import ModelSizes
from storage.records.weights import StoredAdapter
from tests.support.models.trainer_cases import MODEL_CONFIG, base_weights
from trainer.adapters import Lora, NoAdapter
from trainer.config import TrainConfig
from trainer.engines.torch.lora import LoraModel


def test_a_stored_configuration_without_an_adapter_trains_all_weights() -> None:
    assert TrainConfig.model_validate({"lr": 1e-4}).adapter == NoAdapter()
    assert TrainConfig.model_validate({"adapter": {}}).adapter == NoAdapter()
    lora = TrainConfig.model_validate({"adapter": {"name": "lora", "rank": 4}}).adapter
    assert lora == Lora(rank=4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"engine": "deepspeed", "adapter": {"name": "lora"}}, "deepspeed trains no adapter; use"),
        ({"adapter": {"name": "none", "rank": 4}}, "rank"),
        ({"adapter": {"name": "lora", "targets": []}}, "at least 1 item"),
        ({"adapter": {"name": "lora", "rank": 0}}, "greater than or equal to 1"),
        ({"adapter": {"name": "lora", "rank": 65_537}}, "less than or equal to 65536"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        TrainConfig.model_validate(settings)


def test_manifests_name_an_adapter_only_where_it_is_published() -> None:
    assert NoAdapter().stored() is None
    assert Lora(rank=4, alpha=8.0).stored() is None
    stored = Lora(rank=4, alpha=8.0, rslora=True, publish="adapter").stored()
    assert stored == StoredAdapter(kind="lora", rank=4, alpha=8.0, rslora=True)


@pytest.mark.parametrize(
    "targets", [None, ("q_proj", "down_proj"), ("k_proj", "o_proj", "up_proj")]
)
def test_the_number_of_trained_weights_is_that_of_the_model(
    targets: tuple[str, ...] | None,
) -> None:
    adapter = Lora(rank=3, targets=targets)
    model = LoraModel(
        MODEL_CONFIG, base_weights(), adapter, device="cpu", activation_checkpointing=False
    )
    built = sum(each.numel() for each in model.parameters().values())
    assert adapter.parameters(ModelSizes.of(MODEL_CONFIG)) == built
