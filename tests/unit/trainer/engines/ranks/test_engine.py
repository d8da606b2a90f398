"""What the leader's engine asks the other ranks for."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from storage.formats.safetensors import weights_digest
from storage.records.batches import Batch
from storage.records.types import Json
from storage.records.weights import HostTensor
from storage.run import batches
from tests.support.runs.builders import batch, tensors
from trainer.config import TrainConfig
from trainer.engines.ranks import engine as module
from trainer.engines.ranks.engine import RankedEngine
from trainer.engines.ranks.messages import Content, read_tensors

CONFIG = TrainConfig(ranks=2)
STATE: Json = {"step": 3}


class OtherRanks:
    """Ranks that make every call, and nothing else."""

    def __init__(self) -> None:
        self.engines: weakref.WeakSet[Any] = weakref.WeakSet()
        self.dropped: list[int] = []
        self.got: list[tuple[Json, bytes]] = []

    def call(self, header: Json, content: Content | None, local: Callable[[], Any]) -> Any:
        body = b""
        if content is not None:
            content.seek(0)
            body = content.read()
        self.got.append((header, body))
        return local()


class OwnEngine:
    """The engine of rank 0: it records its calls."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def set_weights(self, given: Mapping[str, HostTensor]) -> None:
        self.got.append(("set_weights", weights_digest(given)))

    def set_reference(self, given: Mapping[str, HostTensor]) -> None:
        self.got.append(("set_reference", weights_digest(given)))

    def step(self, given: Batch) -> dict[str, float]:
        self.got.append(("step", given.step))
        return {"trainer/loss": 0.5}

    def weights(self) -> dict[str, HostTensor]:
        return tensors()

    def save(self) -> tuple[dict[str, HostTensor], Json]:
        return tensors(), STATE

    def load(self, given: Mapping[str, HostTensor], state: Json) -> None:
        self.got.append(("load", weights_digest(given), state))


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> OtherRanks:
    others = OtherRanks()
    monkeypatch.setattr(module, "_ranks", lambda config, rendezvous: others)
    monkeypatch.setattr(module, "make_rank_engine", lambda config, model, seed: OwnEngine())
    return others


def engine_of(others: OtherRanks) -> tuple[RankedEngine, int, list[Any]]:
    """Return an engine, its number, and the calls that the engine of rank 0 gets."""
    engine = RankedEngine(CONFIG, {"model": 1}, seed=7)
    header, body = others.got.pop()
    assert header == {
        "call": "new", "engine": header["engine"], "dropped": header["dropped"], "seed": 7,
        "config": CONFIG.model_dump(mode="json"), "model_config": {"model": 1},
    }  # fmt: skip
    assert body == b""
    own: Any = engine._engine
    return engine, header["engine"], own.got


@pytest.mark.parametrize("name", ["set_weights", "set_reference", "load"])
def test_all_ranks_get_the_same_tensors(others: OtherRanks, name: str) -> None:
    engine, number, own = engine_of(others)
    arguments = [STATE] if name == "load" else []
    getattr(engine, name)(tensors(), *arguments)
    ((header, body),) = others.got
    assert (header["call"], header["engine"], header["arguments"]) == (name, number, arguments)
    given = weights_digest(tensors())
    assert weights_digest(read_tensors(header["tensors"], memoryview(body))) == given
    assert own == [(name, given, *arguments)]


def test_all_ranks_get_the_same_batch_and_the_metrics_are_those_of_the_first(
    others: OtherRanks,
) -> None:
    engine, number, own = engine_of(others)
    assert engine.step(batch(step=4)) == {"trainer/loss": 0.5}
    ((header, body),) = others.got
    assert (header["call"], header["engine"], own) == ("step", number, [("step", 4)])
    assert batches.decode(body).step == 4


def test_all_ranks_take_part_in_what_the_first_returns(others: OtherRanks) -> None:
    engine, number, _ = engine_of(others)
    assert weights_digest(engine.weights()) == weights_digest(tensors())
    saved, state = engine.save()
    assert (weights_digest(saved), state) == (weights_digest(tensors()), STATE)
    assert others.got == [
        ({"call": call, "engine": number, "dropped": []}, b"") for call in ("weights", "save")
    ]


def test_the_ranks_drop_an_engine_that_nobody_uses_once(others: OtherRanks) -> None:
    first, number, _ = engine_of(others)
    second, other_number, _ = engine_of(others)
    assert number != other_number
    assert set(others.engines) == {first, second}
    del first
    assert set(others.engines) == {second}
    for _ in range(2):
        second.weights()
    assert [header["dropped"] for header, _ in others.got] == [[number], []]
