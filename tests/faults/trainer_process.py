"""A trainer in its own processes, killed before each of its writes in turn, then restarted.

    python -m tests.faults.trainer_process FOLDER     prints {"straight": […], "killed": [[…], …]} as JSON

Torch is imported once; every trainer is a fork, so that dozens of deaths take seconds.
"""

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from storage.formats.safetensors import weights_digest
from storage.run import batches, checkpoints
from storage.store.local import LocalFiles
from storage.store.object_store import ObjectStore, open_store
from storage.weights import publisher, reader
from tests.support.models.trainer_cases import (
    MODEL_CONFIG,
    base_weights,
    reference_model,
    sampled_batch,
)
from tests.support.runs.lifetimes import lifetime_of
from trainer.config import TrainConfig
from trainer.service.trainer import train

POLICY = "solver"
STEPS = 5
ROWS = 6
CONFIG = TrainConfig(
    lr=1e-3, warmup_steps=2, minibatches=2, checkpoint_every=2, checkpoints_keep=1, anchor_every=3
)


class DyingFiles(LocalFiles):
    """Local files whose process is killed, as by `kill -9`, before its n-th change."""

    def __init__(self, root: Path, deaths_at: int) -> None:
        super().__init__(root)
        self._left = deaths_at
        self._lock = threading.Lock()

    def _count(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def create(self, key: str, body: bytes) -> bool:
        self._count()
        return super().create(key, body)

    def write(self, key: str, body: bytes) -> None:
        self._count()
        super().write(key, body)

    def delete(self, key: str) -> None:
        self._count()
        super().delete(key)


def prepare(folder: Path) -> None:
    """A run with version 0 and every batch."""
    run = open_store(str(folder))
    base = base_weights()
    publisher.publish(
        run, POLICY, 0, base, extra_files={"config.json": json.dumps(MODEL_CONFIG).encode()}
    )
    model = reference_model(base)
    for step in range(1, STEPS + 1):
        batches.create(run, sampled_batch(model, step, ROWS, noise=0.1))


def trained(run: ObjectStore) -> None:
    train(
        lifetime_of(run, "trainer"), POLICY, CONFIG, STEPS, seed=0, batch_size=ROWS, max_tokens=512
    )


def ending(call: Callable[[], None]) -> int:
    """Run `call` in a fork; return 0, or minus the number of the signal that killed it."""
    child = os.fork()
    if child == 0:
        call()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def outcome(folder: Path) -> list[str]:
    """Digests of all versions as they are stored, and of the tensors of the last checkpoint."""
    run = open_store(str(folder))
    versions = [weights_digest(reader.fetch(run, POLICY, version)) for version in range(STEPS + 1)]
    return [*versions, weights_digest(checkpoints.load(run, POLICY, STEPS)[0])]


def main(folder: Path) -> None:
    prepare(folder / "prepared")
    assert "sklearn" not in sys.modules, "see storage/machine/transformers_import.py"
    shutil.copytree(folder / "prepared", folder / "straight")
    assert ending(lambda: trained(open_store(str(folder / "straight")))) == 0
    killed: list[list[str]] = []
    while True:
        place = folder / f"killed-{len(killed)}"
        shutil.copytree(folder / "prepared", place)
        dying = replace(
            open_store(str(place)), backend=DyingFiles(place, deaths_at=len(killed) + 1)
        )
        end = ending(lambda run=dying: trained(run))  # type: ignore[misc]  # mypy cannot infer a lambda with a default
        if end == 0:
            break  # it survived all its writes
        assert end == -signal.SIGKILL, end
        assert ending(lambda: trained(open_store(str(place)))) == 0  # noqa: B023 — called before the loop goes on
        killed.append(outcome(place))
    json.dump({"straight": outcome(folder / "straight"), "killed": killed}, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
