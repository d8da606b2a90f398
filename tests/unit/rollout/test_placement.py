from typing import Any

import pytest

from rollout.config import EngineConfig, SglangConfig
from rollout.placement import engine_gpus, placed, server_share, static_fraction, worker_gpus

BOTH = ("solver", "verifier")


def sglang(tensor_parallel: int = 1, share: float | None = None, **settings: Any) -> EngineConfig:
    own = SglangConfig(tensor_parallel=tensor_parallel, memory_share=share)
    return EngineConfig(name="sglang", sglang=own, **{"device": "cuda", **settings})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (sglang(), [(0,), (0,)]),
        (sglang(devices=(3,)), [(3,), (3,)]),
        (sglang(devices=(3, 1)), [(3,), (1,)]),
        (sglang(2), [(0, 1), (0, 1)]),
        (sglang(2, devices=(4, 5)), [(4, 5), (4, 5)]),
        (sglang(2, devices=(4, 5, 7, 6)), [(4, 5), (7, 6)]),
        (sglang(2, device="cuda:2"), [(2, 3), (2, 3)]),
        (EngineConfig(device="cuda"), [(0,), (0,)]),
        (EngineConfig(device="cuda", devices=(1, 0)), [(1,), (0,)]),
        (EngineConfig(device="cuda:5"), [(5,), (5,)]),
        (EngineConfig(), [(), ()]),
        (sglang(device="cpu"), [(), ()]),
    ],
)
def test_each_policy_has_its_own_gpus_or_all_share_one_group(
    config: EngineConfig, expected: list[tuple[int, ...]]
) -> None:
    engines = placed(config, BOTH)
    assert tuple(engines) == BOTH
    assert [engine_gpus(engine) for engine in engines.values()] == expected
    assert worker_gpus(config, BOTH) == tuple(dict.fromkeys(sum(expected, ())))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (sglang(), 0.425),
        (sglang(device_share=0.5), 0.2125),
        (sglang(devices=(0, 1)), None),
        (sglang(devices=(0, 1), device_share=0.6), 0.51),
        (sglang(share=0.3), 0.3),
        (sglang(2, devices=(0, 1)), 0.425),
        (sglang(device="cuda:1"), 0.425),
        (sglang(device="cpu"), None),
        (EngineConfig(device="cuda"), None),
    ],
)
def test_servers_on_one_device_divide_its_memory(
    config: EngineConfig, expected: float | None
) -> None:
    for engine in placed(config, BOTH).values():
        assert engine.sglang.memory_share == pytest.approx(expected)


def test_a_server_that_is_alone_on_its_device_decides_itself() -> None:
    assert server_share(sglang(), 1) is None
    assert server_share(sglang(), 3) == pytest.approx(0.85 / 3)
    (engine,) = placed(sglang(), ["solver"]).values()
    assert engine.sglang.memory_share is None


def test_a_share_is_a_fraction_of_what_is_free() -> None:
    """Of a device with 100 GB: the second of two servers finds 57.5 GB free, and gets as much."""
    first = static_fraction(0.425, 1.0)
    free = 1.0 - first
    assert first == 0.425
    assert static_fraction(0.425, free) * free == pytest.approx(0.425, abs=1e-4)
    assert static_fraction(0.8, 0.5) == 0.95


def test_a_number_that_no_gpu_has_names_none() -> None:
    assert worker_gpus(EngineConfig(device="cuda:1023"), ["solver"]) == (1023,)
    for number in ("12345", 5000 * "1"):
        assert worker_gpus(EngineConfig(device=f"cuda:{number}"), ["solver"]) == ()


def test_servers_by_url_use_no_gpus_of_the_worker() -> None:
    own = SglangConfig(urls=("http://127.0.0.1:30000",))
    assert worker_gpus(EngineConfig(name="sglang", device="cuda", sglang=own), ["solver"]) == ()
