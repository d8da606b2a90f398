"""The built-in train engine: a transformers model with float32 master weights and AdamW.

    engine ─▶ train_step (gradients, shared by all built-in engines)
           ─▶ one_process, fsdp (weights, optimizer)
           ─▶ reference (a frozen version, where train.reference asks for one)
           ─▶ saved_state (the form of a checkpoint)

With several ranks, each has an engine, and all make the same calls (`ranks/leader.py`). Rank 0
alone returns tensors; the others take part in gathering them, one at a time.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from storage.errors import AstraFlowError, ConfigError, CorruptError
from storage.records.batches import Batch
from storage.records.types import Json
from storage.records.weights import HostTensor
from trainer.config import TrainConfig
from trainer.engines.step.train_step import train_step
from trainer.engines.torch import rng_state
from trainer.engines.torch.changed_elements import DeviceScan
from trainer.engines.torch.host_tensors import to_host, to_torch
from trainer.engines.torch.one_process import OneProcess
from trainer.engines.torch.optimizer import checked_moments
from trainer.engines.torch.reference import Reference
from trainer.engines.torch.saved_state import SavedState, below, read_state, with_random_states
from trainer.optimizers import CustomOptimizer


class TorchTrainEngine:
    """Train engine of torch alone (contract: `trainer/engines/engine.py`)."""

    def __init__(self, config: TrainConfig, model_config: Json, seed: int) -> None:
        torch.set_num_threads(config.threads)
        self._config = config
        self._model_config = model_config
        self._seed = seed
        self._loss = config.loss.make()
        self._trained: OneProcess
        self._scan: DeviceScan | None
        self._reference: Reference | None = None

    def set_weights(self, tensors: Mapping[str, HostTensor]) -> None:
        rng_state.seed_all(self._seed)  # a new adapter has random weights
        self._open(tensors)
        rng_state.seed_all(self._seed)

    def set_reference(self, tensors: Mapping[str, HostTensor]) -> None:
        self._reference = None  # its memory, before that of another
        self._reference = Reference(self._config, self._model_config, tensors)

    def _open(self, weights: Mapping[str, HostTensor]) -> None:
        """Build the model with `weights` and a fresh optimizer."""
        self._trained = self._make_trained(weights)
        # On several ranks the published bits would be a second whole model on the device of rank 0.
        scans = _is_remote(self._trained.device) and self._trained.collectives.num_ranks == 1
        self._scan = DeviceScan() if scans else None

    def _make_trained(self, weights: Mapping[str, HostTensor]) -> OneProcess:
        if self._config.num_ranks > 1 and self._config.optimizer.name != "adamw":
            raise ConfigError(
                f"train.optimizer: {self._config.optimizer.name} cannot be used with train.ranks "
                f"{self._config.ranks} and train.nodes {self._config.nodes}: each rank has a part "
                "of every matrix, and only AdamW is known to give the update of the whole; use "
                "adamw, or one rank"
            )
        if self._config.num_ranks == 1:
            return OneProcess(self._config, self._model_config, weights)
        from trainer.engines.torch.fsdp import Fsdp  # torch.distributed takes a while to import

        return Fsdp(self._config, self._model_config, weights)

    def weights(self) -> dict[str, HostTensor]:
        tensors = self._own(self._trained.published())
        return {name: self._published(name, tensor) for name, tensor in tensors}

    def step(self, batch: Batch) -> dict[str, float]:
        if self._config.reference is not None and self._reference is None:
            raise ValueError("train.reference is set: call set_reference before the first step")
        return train_step(
            batch, self._trained, self._loss, self._config, self._seed, self._reference
        )

    def save(self) -> tuple[dict[str, HostTensor], Json]:
        tensors = {
            f"model/{name}": tensor if isinstance(tensor, HostTensor) else to_host(tensor)
            for name, tensor in self._own(self._trained.saved())
        }
        moments, progress = self._trained.saved_state()
        tensors |= {f"optimizer/{name}": moment for name, moment in moments.items()}
        tensors, state = with_random_states(tensors, progress)
        if isinstance(chosen := self._config.optimizer, CustomOptimizer):
            try:
                self._moments(tensors, read_state(state))
            except (AstraFlowError, ValueError) as error:
                raise ConfigError(
                    f"train.optimizer: a trainer could not resume with the state of {chosen.path}: "
                    f"{error}"
                ) from error
        return tensors, state

    def load(self, tensors: Mapping[str, HostTensor], state: Json) -> None:
        saved = read_state(state)
        model = below("model/", tensors)
        for name, tensor in model.items():
            if not to_torch(tensor).float().isfinite().all():
                raise CorruptError(f"model/{name} has an element that is not finite")
        self._open(model)
        if lacking := self._trained.parameters.keys() - model.keys():
            raise CorruptError(
                f"the saved state lacks {min(lacking)}, which is trained; was it saved without "
                "train.adapter? Resume with the settings that it was saved with"
            )
        self._trained.restore_state(self._moments(tensors, saved), saved)
        rng_state.restore(below("rng/", tensors), saved.rng)

    def _moments(
        self, tensors: Mapping[str, HostTensor], saved: SavedState
    ) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer's moments in a saved state; CorruptError for unusable ones."""
        return checked_moments(
            below("optimizer/", tensors),
            saved.updates,
            self._trained.shapes,
            saved.moments,
            is_custom=self._config.optimizer.name == "custom",
        )

    def _own(
        self, tensors: Iterable[tuple[str, Tensor | HostTensor]]
    ) -> Iterable[tuple[str, Tensor | HostTensor]]:
        """Yield the tensors on rank 0, and none on the others, which gather them with it."""
        for name, tensor in tensors:
            if self._trained.collectives.rank == 0:
                yield name, tensor

    def _published(self, name: str, tensor: Tensor | HostTensor) -> HostTensor:
        if isinstance(tensor, HostTensor):
            return tensor
        dtype = self._config.publish_dtype if tensor.is_floating_point() else None
        return self._scan.to_host(name, tensor, dtype) if self._scan else to_host(tensor, dtype)


def _is_remote(device: torch.device) -> bool:
    """Return whether a copy to the host crosses a bus; on a CPU, storage's comparison is faster."""
    return device.type != "cpu"
