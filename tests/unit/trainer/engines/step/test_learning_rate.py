"""Learning rates, compared with the schedulers of transformers."""

import pytest
import torch
from transformers import optimization

from trainer.config import TrainConfig
from trainer.engines.step.learning_rate import learning_rate

SCHEDULERS = {
    "constant": lambda optimizer, warmup, steps, share: (
        optimization.get_constant_schedule_with_warmup(optimizer, warmup)
    ),
    "linear": lambda optimizer, warmup, steps, share: optimization.get_linear_schedule_with_warmup(
        optimizer, warmup, steps
    ),
    "cosine": lambda optimizer, warmup, steps, share: (
        optimization.get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, warmup, steps, min_lr_rate=share
        )
    ),
}


def config(**settings: object) -> TrainConfig:
    return TrainConfig.model_validate({"lr": 1e-3, **settings})


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize(
    ("schedule", "share"), [("constant", 0.0), ("linear", 0.0), ("cosine", 0.0), ("cosine", 0.2)]
)
def test_a_schedule_agrees_with_the_scheduler_of_transformers(
    schedule: str, share: float, warmup: int
) -> None:
    steps = 11
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler = SCHEDULERS[schedule](optimizer, warmup, steps, share)
    settings: dict[str, object] = {"warmup_steps": warmup, "lr_schedule": schedule}
    if schedule != "constant":
        settings |= {"schedule_steps": steps, "lr_min_share": share}
    for step in range(1, steps + 1):
        optimizer.step()
        scheduler.step()  # their step 0 is before ours
        expected = scheduler.get_last_lr()[0]
        assert learning_rate(config(**settings), step) == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_ends_at_its_share_and_stays_there(schedule: str) -> None:
    falling = config(lr_schedule=schedule, schedule_steps=10, lr_min_share=0.25, warmup_steps=2)
    rates = [learning_rate(falling, step) for step in (2, 6, 10, 11, 999)]
    assert rates == pytest.approx([1e-3, 0.625e-3, 0.25e-3, 0.25e-3, 0.25e-3], rel=1e-12)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_warm_up_is_the_same_bits_before_any_schedule(schedule: str) -> None:
    settings: dict[str, object] = {} if schedule == "constant" else {"schedule_steps": 50}
    warming = config(lr=5e-6, warmup_steps=7, lr_schedule=schedule, **settings)
    for step in range(1, 8):
        assert learning_rate(warming, step) == 5e-6 * min(1.0, step / 7)
