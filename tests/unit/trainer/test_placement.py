import pytest
from pydantic import ValidationError

from trainer.config import TrainConfig
from trainer.placement import leader_device, rank_gpus


@pytest.mark.parametrize(
    ("config", "gpus", "device"),
    [
        (TrainConfig(), (), "cpu"),
        (TrainConfig(ranks=3), (), "cpu"),
        (TrainConfig(device="cuda"), (0,), "cuda"),
        (TrainConfig(device="cuda:2"), (2,), "cuda:2"),
        (TrainConfig(device="cuda", devices=(5,)), (5,), "cuda:5"),
        (TrainConfig(device="cuda", ranks=2), (0, 1), "cuda"),
        (TrainConfig(device="cuda", ranks=2, devices=(3, 1)), (3, 1), "cuda:3"),
        (TrainConfig(device="mps"), (), "mps"),
        (TrainConfig(device="cuda:12345"), (), "cuda:12345"),  # torch then refuses it
        (TrainConfig(device=f"cuda:{5000 * '1'}"), (), f"cuda:{5000 * '1'}"),
    ],
)
def test_each_rank_has_the_gpu_of_the_recipe_or_the_next_one(
    config: TrainConfig, gpus: tuple[int, ...], device: str
) -> None:
    assert rank_gpus(config) == gpus
    assert leader_device(config) == device


@pytest.mark.parametrize("devices", [(0,), (0, 1, 2)])
def test_another_number_of_gpus_than_of_ranks_is_refused(devices: tuple[int, ...]) -> None:
    with pytest.raises(
        ValidationError, match=f"devices names {len(devices)} GPUs, and ranks is 2; name one for"
    ):
        TrainConfig(device="cuda", ranks=2, devices=devices)


@pytest.mark.parametrize(
    ("devices", "words"),
    [((1, 0, 1), "names GPU 1 twice"), ((-1,), "greater than or equal to 0"), ((1024,), "1023")],
)
def test_gpus_are_numbers_from_0_and_each_is_named_once(
    devices: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        TrainConfig(device="cuda", ranks=len(devices), devices=devices)
