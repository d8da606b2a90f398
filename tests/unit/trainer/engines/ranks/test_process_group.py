import pytest
import torch

from storage.errors import ConfigError
from trainer.config import TrainConfig
from trainer.engines.ranks.process_group import check_gpus, rank_device


def test_one_rank_has_the_device_of_the_recipe() -> None:
    assert rank_device(TrainConfig(device="cuda:1"), 0) == "cuda:1"
    assert rank_device(TrainConfig(device="cuda"), 0) == "cuda:0"
    assert rank_device(TrainConfig(device="cuda", devices=(2,)), 0) == "cuda:2"


def test_several_ranks_on_cpus_share_them() -> None:
    assert rank_device(TrainConfig(ranks=3), 2) == "cpu"


def test_the_leader_uses_its_gpu_by_number_and_each_other_rank_the_only_one_it_sees() -> None:
    config = TrainConfig(ranks=3, device="cuda", devices=(4, 2, 7))
    assert [rank_device(config, rank) for rank in range(3)] == ["cuda:4", "cuda:0", "cuda:0"]


@pytest.mark.parametrize(
    ("num_gpus", "config", "missing"),
    [
        (0, TrainConfig(device="cuda"), 0),
        (1, TrainConfig(ranks=2, device="cuda"), 1),
        (4, TrainConfig(ranks=2, device="cuda", devices=(3, 4)), 4),
    ],
)
def test_a_rank_without_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, config: TrainConfig, missing: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    words = rf"train\.ranks is {config.ranks} and needs GPU {missing}, and this machine has {num_gpus} GPUs"
    with pytest.raises(ConfigError, match=words):
        check_gpus(config)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: missing + 1)
    check_gpus(config)


def test_one_gpu_for_several_ranks_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"train\.device 'cuda:0' is one device, and train\.ranks is 2"
    ):
        check_gpus(TrainConfig(ranks=2, device="cuda:0"))
