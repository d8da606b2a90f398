"""The train engine of several ranks: each call on it is made on the engines of all ranks."""

import gc
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import TypeVar

from storage.errors import ConfigError
from storage.records.batches import Batch
from storage.records.types import Json
from storage.records.weights import HostTensor
from storage.run import batches
from trainer.config import TrainConfig
from trainer.engines.engine import ReferenceEngine, make_rank_engine
from trainer.engines.ranks.leader import Ranks, place_of
from trainer.engines.ranks.messages import Content, content_of, tensors_content
from trainer.engines.ranks.rendezvous import Rendezvous

T = TypeVar("T")


class RankedEngine:
    """A train engine on several ranks (contract: `trainer/engines/engine.py`).

    The engines of one process share its ranks.
    """

    def __init__(
        self,
        config: TrainConfig,
        model_config: Json,
        seed: int,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        """Start the ranks, if there are none; `rendezvous`: with other nodes (`config.nodes`)."""
        self._ranks = _ranks(config, rendezvous)
        self._number = next(_numbers)
        header: Json = {
            "config": config.model_dump(mode="json"),
            "model_config": model_config,
            "seed": seed,
        }
        self._engine = self._call(
            "new", lambda: make_rank_engine(config, model_config, seed), header
        )
        self._ranks.engines.add(self)
        weakref.finalize(self, self._ranks.dropped.append, self._number)

    def set_weights(self, tensors: Mapping[str, HostTensor]) -> None:
        entries, content = tensors_content(tensors)
        header: Json = {"tensors": entries, "arguments": []}
        with content:
            self._call("set_weights", lambda: self._engine.set_weights(tensors), header, content)

    def set_reference(self, tensors: Mapping[str, HostTensor]) -> None:
        engine = self._engine
        assert isinstance(engine, ReferenceEngine), "the built-in engines are"
        entries, content = tensors_content(tensors)
        header: Json = {"tensors": entries, "arguments": []}
        with content:
            self._call("set_reference", lambda: engine.set_reference(tensors), header, content)

    def step(self, batch: Batch) -> dict[str, float]:
        body = batches.encode(batch)
        batches.decode(body)  # what no rank can read is refused before a rank has it
        with content_of([body]) as content:
            return self._call("step", lambda: self._engine.step(batch), {}, content)

    def weights(self) -> dict[str, HostTensor]:
        return self._call("weights", self._engine.weights)

    def save(self) -> tuple[dict[str, HostTensor], Json]:
        return self._call("save", self._engine.save)

    def load(self, tensors: Mapping[str, HostTensor], state: Json) -> None:
        entries, content = tensors_content(tensors)
        header: Json = {"tensors": entries, "arguments": [state]}
        with content:
            self._call("load", lambda: self._engine.load(tensors, state), header, content)

    def _call(
        self,
        name: str,
        local: Callable[[], T],
        header: Json | None = None,
        content: Content | None = None,
    ) -> T:
        dropped = list(self._ranks.dropped)
        del self._ranks.dropped[: len(dropped)]  # the garbage collector may have added others
        named = {
            **(header or {}),
            "call": name,
            "engine": self._number,
            "dropped": dropped,
        }
        return self._ranks.call(named, content, local)


_numbers = iter(range(sys.maxsize))
_current: Ranks | None = None


def _ranks(config: TrainConfig, rendezvous: Rendezvous | None) -> Ranks:
    """Return the ranks of this process; start them if there are none.

    ConfigError while engines with another number of ranks or device are in use.
    """
    global _current
    if _current is not None and _current.is_open:
        if _current.place == place_of(config):
            return _current
        gc.collect()  # engines that nobody uses any more, and that are in cycles
        if _current.engines:
            raise ConfigError(
                f"a trainer of {place_of(config)}: this process trains already with "
                f"{_current.place}; use another process"
            )
        _current.close()
    if config.nodes > 1 and rendezvous is None:
        raise ConfigError(
            f"train.nodes is {config.nodes}: only a trainer of a run can train on several nodes"
        )
    _current = Ranks(config, rendezvous=rendezvous)
    return _current
