"""The contract of a loss, and the table of losses."""

import subprocess
import sys

import pytest
import torch

from storage.import_path import resolve
from trainer.config import TrainConfig
from trainer.losses import LOSSES, CustomLoss, M2po, PpoClip
from trainer.losses.custom import LOSS
from trainer.losses.loss import Prepared, TokenLoss, check_token_loss


def test_constants_of_a_part_of_the_batch_are_those_of_its_tokens() -> None:
    prepared = Prepared({"clip_low": 0.1}, {"keep": torch.tensor([True, False, False, True])})
    part = prepared.part(1, 4)
    assert part.scalars == {"clip_low": 0.1}
    assert part.per_token["keep"].tolist() == [False, False, True]


def test_a_token_loss_of_another_shape_is_refused() -> None:
    values_N = torch.zeros(3, requires_grad=True)
    clipped_N = torch.zeros(3, dtype=torch.bool)
    right = TokenLoss(values_N, clipped_N)
    assert check_token_loss(right, 3) is right
    with pytest.raises(ValueError, match=r"values_N must be .* shape \[2\], not Tensor \[3\]"):
        check_token_loss(right, 2)
    with pytest.raises(ValueError, match=r"values_N must be .* shape \[3\], not Tensor \[\]"):
        check_token_loss(TokenLoss(values_N.sum(), clipped_N), 3)
    with pytest.raises(ValueError, match=r"clipped_N must be .* shape \[3\], not Tensor \[1\]"):
        check_token_loss(TokenLoss(values_N, clipped_N[:1]), 3)
    with pytest.raises(TypeError, match="must return a TokenLoss, not Tensor"):
        check_token_loss(values_N, 3)


def test_the_table_has_each_loss_by_its_recipe_name() -> None:
    assert {"ppo_clip": PpoClip, "m2po": M2po, "custom": CustomLoss} == LOSSES
    assert all(model.model_fields["name"].default == name for name, model in LOSSES.items())
    read = [TrainConfig.model_validate({"loss": loss}).loss for loss in ({}, {"name": "ppo_clip"})]
    assert read == [M2po(), PpoClip()]
    assert TrainConfig().loss == M2po()


@pytest.mark.parametrize("loss", [PpoClip, M2po])
def test_each_loss_of_the_table_implements_the_contract(loss: type) -> None:
    assert resolve(f"{loss.__module__}:{loss.__name__}", {}, LOSS) is loss
    assert isinstance(loss.whole_minibatch, bool)


def test_reading_a_recipe_does_not_import_torch() -> None:
    code = (
        "import sys; from tasks.recipes.loader import load; config = load('gsm8k_qwen3'); "
        "assert config.policies['solver'].train.loss.name == 'm2po'; sys.exit('torch' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
