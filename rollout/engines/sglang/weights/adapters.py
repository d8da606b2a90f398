"""Adapters that a server applies itself: their form on disk, and which of them run.

    version n: W, A, B ──▶ W, as the weights of the server, once
                       ──▶ A, B, as the adapter `3f9c21aa-7.1`: requests name it

A running request keeps the adapter with which it began, and so does each of its tokens its version.
Policies that share a server have adapters of their own there; a version without one is W alone.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rollout.engines.sglang.weights.folder import weights_folder
from storage.errors import ConfigError
from storage.formats import adapters
from storage.formats.adapters import LORA_A, is_adapter
from storage.records.weights import HostTensor, StoredAdapter
from storage.written_files import write_inside

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers of Llama and Qwen models, for whose A and B a server has room."""
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, eq=False)
class Served:
    """An adapter in a server, or the weights of the server alone."""

    name: str
    """In requests to that server; empty: they name no adapter."""
    version: int


@dataclass(eq=False)
class Running:
    """The adapters of one policy in one server, and how many requests name each."""

    newest: Served | None = None
    """The one that the next request names."""
    requests: dict[Served, int] = field(default_factory=dict)
    loaded: int = 0
    """Adapters so far, which makes a name of each: a server takes no name twice."""

    def begin(self) -> Served | None:
        """Count a request of the newest adapter."""
        if self.newest is not None:
            self.requests[self.newest] += 1
        return self.newest

    def end(self, served: Served | None) -> None:
        if served in self.requests:  # not after a restart of the server
            self.requests[served] -= 1

    def add(self, served: Served) -> None:
        """Let the next request name an adapter that the server has."""
        self.requests[served] = 0
        self.newest = served

    def remove_unused(self) -> list[Served]:
        """Forget the adapters that no request names now nor later, and return them."""
        unused = [
            served
            for served, count in self.requests.items()
            if not count and served is not self.newest
        ]
        for served in unused:
            del self.requests[served]
        return unused


def split(tensors: Mapping[str, HostTensor]) -> tuple[dict[str, HostTensor], dict[str, HostTensor]]:
    """Return the tensors of the base model, and A and B."""
    own = {name: tensor for name, tensor in tensors.items() if is_adapter(name)}
    return {name: tensor for name, tensor in tensors.items() if name not in own}, own


def check_adapter(form: StoredAdapter, tensors: Mapping[str, HostTensor], rank_max: int) -> None:
    """Raise ConfigError for an adapter for which the servers have no room, or that is none."""
    if form.rank > rank_max:
        raise ConfigError(
            f"the adapter has rank {form.rank}, and rollout.engine.sglang.adapter_rank is "
            f"{rank_max}; set it to the rank of train.adapter"
        )
    if reason := adapters.fault(form, tensors):
        raise ConfigError(f"the version {reason}")
    if unknown := sorted(set(_targets(tensors)) - set(TARGETS)):
        raise ConfigError(
            f"the adapter changes {', '.join(unknown)}, and SGLang serves adapters of "
            f"{', '.join(TARGETS)}; set train.adapter.targets, or adapter_rank: 0"
        )


@contextmanager
def adapter_folder(form: StoredAdapter, tensors: Mapping[str, HostTensor]) -> Iterator[Path]:
    """Write A and B as a folder in the form of the library peft, which is deleted at the end."""
    config = {
        "peft_type": "LORA",
        "r": form.rank,
        "lora_alpha": form.scale * form.rank,  # a server's scale is lora_alpha / r
        "target_modules": _targets(tensors),
        "bias": "none",
    }
    named = {PEFT_PREFIX + name: tensor for name, tensor in tensors.items()}
    with weights_folder(named) as folder:
        write_inside(folder, "adapter_config.json", json.dumps(config).encode())
        yield folder


def _targets(tensors: Mapping[str, HostTensor]) -> list[str]:
    layers = {name.removesuffix(LORA_A) for name in tensors if name.endswith(LORA_A)}
    return sorted({layer.rpartition(".")[2] for layer in layers})
