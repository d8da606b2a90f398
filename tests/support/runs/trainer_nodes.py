"""Nodes of a trainer as processes of this machine.

python -m tests.support.runs.trainer_nodes STORE NODE CONFIG
"""

import os
import subprocess
import sys
import tempfile
import threading
import time

from storage.store.object_store import open_store
from tests.support.checkout import ROOT
from tests.support.runs.lifetimes import lifetime_of
from trainer.config import TrainConfig
from trainer.engines.ranks import engine as ranked
from trainer.engines.ranks import node as ranked_node
from trainer.engines.ranks.leader import place_of
from trainer.service.rendezvous import StoreRendezvous, join, lead

POLICY = "solver"
_started: list[subprocess.Popen[bytes]] = []
"""The nodes of this process's trainers, which end with them."""


def rendezvous_of(config: TrainConfig) -> StoreRendezvous | None:
    """Start the other nodes of this process's trainer, and meet them; None where they have met."""
    current = ranked._current
    if current is not None and current.is_open and current.place == place_of(config):
        return None
    address = tempfile.mkdtemp(prefix="nodes-")
    for node in range(1, config.nodes):
        _started.append(start_node(address, node, config))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    return lead(lifetime_of(open_store(address), "trainer"), POLICY, config.nodes)


def start_node(address: str, node: int, config: TrainConfig) -> subprocess.Popen[bytes]:
    """Start a node; it ends with the leader, and with this process."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.support.runs.trainer_nodes"),
            *(address, str(node), config.model_dump_json()),
        ],
        cwd=ROOT,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
        stdin=subprocess.DEVNULL,
    )


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


def main(address: str, node: str, config: str) -> None:
    threading.Thread(target=_end_with, args=[os.getppid()], daemon=True).start()
    lifetime = lifetime_of(open_store(address), "trainer")
    rendezvous = join(lifetime, POLICY, int(node))
    settings = TrainConfig.model_validate_json(config)
    # The tests of one process train with one set of nodes and many settings.
    why = ranked_node.serve(settings, int(node), rendezvous, lambda: False, trusts_leader=True)
    print(f"node {node}: {why}", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
