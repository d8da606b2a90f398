"""Which optimizer has which parameters."""

import torch

from trainer.config import TrainConfig
from trainer.engines.torch.optimizer import make_optimizers


def config(**settings: object) -> TrainConfig:
    return TrainConfig.model_validate({"lr": 1e-3, **settings})


def test_muon_has_the_hidden_matrices_and_all_of_its_settings() -> None:
    table, matrix, vector, kernel = (
        torch.nn.Parameter(torch.zeros(shape)) for shape in ((5, 2), (2, 3), (2,), (2, 2, 2))
    )
    settings = config(
        optimizer={
            "name": "muon", "momentum": 0.7, "nesterov": False, "ns_steps": 3,
            "adjust_lr": "original",
        },
        weight_decay=0.3, betas=(0.6, 0.8), eps=1e-3,
    )  # fmt: skip
    muon, adamw = make_optimizers([table, matrix, vector, kernel], [table], settings)
    (group,) = muon.param_groups
    assert [id(each) for each in group["params"]] == [id(matrix)]
    expected = {
        "lr": 1e-3, "momentum": 0.7, "nesterov": False, "ns_steps": 3, "adjust_lr_fn": "original",
        "weight_decay": 0.3,
    }  # fmt: skip
    assert {key: group[key] for key in expected} == expected
    decayed, kept = adamw.param_groups
    assert [id(each) for each in decayed["params"]] == [id(table), id(kernel)]
    assert [id(each) for each in kept["params"]] == [id(vector)]
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
    assert (decayed["betas"], decayed["eps"], decayed["fused"]) == ((0.6, 0.8), 1e-3, True)
