"""A trainer on two nodes, or its other node, as the process of a service that nobody supervises.

python -m tests.faults.trainer_nodes_process FOLDER trainer | node  [PATIENCE_S]
"""

import logging
import sys
import threading
from pathlib import Path

from storage.coordination.lifetime import Lifetime
from storage.store.object_store import open_store
from tests.faults.trainer_process import CONFIG, POLICY, STEPS
from tests.support.runs.lifetimes import heartbeat_writer_of
from trainer.engines.ranks import leader
from trainer.service.node import early_end_reason, train_node
from trainer.service.trainer import train

TWO_NODES = CONFIG.model_copy(update={"nodes": 2})


def main(folder: Path, service: str, patience_s: float = leader.PATIENCE_S) -> None:
    logging.basicConfig(level=logging.INFO, format=f"{service}: %(message)s")
    leader.PATIENCE_S = patience_s
    run = open_store(str(folder))
    if service == "trainer":
        heartbeat = heartbeat_writer_of(run, "trainer")
        train(Lifetime(run, heartbeat, threading.Event()), POLICY, TWO_NODES, STEPS, seed=0)
        return
    lifetime = Lifetime(
        run,
        heartbeat_writer_of(run, "trainer_node"),
        threading.Event(),
        why_over=lambda of: early_end_reason(of, POLICY, STEPS),
    )
    train_node(lifetime, POLICY, TWO_NODES, 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(float, sys.argv[3:]))
