"""A node of a trainer beside its leader: ranks of this machine that make the leader's calls.

    trainer-solver          ──▶ engine.step(batch)     reads batches, writes versions, checkpoints
    trainer-solver-node-1   ──▶ engine.step(batch)     computes its part, and writes nothing

A node has no state of its own. It trains in one round (`storage/coordination/rounds.py`) and ends
with it; the next process of the node joins the next round, which begins from the checkpoint.
"""

import logging
import time

from storage.coordination.gpus_of_service import gpus_of_service
from storage.coordination.lifetime import Lifetime, StoppedError, stop_reason
from storage.records.control import ServiceState
from storage.run import checkpoints
from storage.store.object_store import ObjectStore
from trainer.config import TrainConfig
from trainer.engines.ranks import node as ranked_node
from trainer.engines.ranks.rendezvous import RankLostError
from trainer.placement import rank_gpus
from trainer.service import rendezvous

log = logging.getLogger(__name__)

LEAVE_S = 20.0
"""Time after SIGTERM in which a node still makes calls: a leader that was asked to stop with it
saves a checkpoint.
"""
SETTLE_S = 5.0
"""Time in which the end of the run is expected after the leader has left."""


def early_end_reason(run: ObjectStore, policy: str, steps: int) -> str:
    """Return why no node of the policy is needed; empty while one is.

    The last checkpoint is stored after the last version, and a trainer that dies between the two
    needs its nodes again.
    """
    is_done = checkpoints.exists(run, policy, steps)
    return stop_reason(run) or (f"{policy} has reached version {steps}" if is_done else "")


def train_node(lifetime: Lifetime, policy: str, config: TrainConfig, node: int) -> None:
    """Train with the leader of the policy until it leaves, or the service must stop.

    Raises RankLostError when the round ended before the training did: another process of this node
    must join the next one.
    """
    try:
        with gpus_of_service(lifetime, rank_gpus(config), config.device_share) as are_held:
            if not are_held:
                return
            joined = rendezvous.join(lifetime, policy, node)
            lifetime.heartbeat.update(state=ServiceState.WORKING)
            why = ranked_node.serve(config, node, joined, _Departure(lifetime).is_due)
    except StoppedError as error:
        log.info("node %d of %s leaves before a round began: %s", node, policy, error)
        return
    if not lifetime.wait(SETTLE_S):
        raise RankLostError(
            f"node {node} of {policy}: {why}, and the training goes on; another process of this "
            "node joins the next round"
        )
    lifetime.heartbeat.update(state=ServiceState.DRAINING, note=why)


class _Departure:
    """When a node that was asked to stop leaves, though its leader has not."""

    def __init__(self, lifetime: Lifetime) -> None:
        self._lifetime = lifetime
        self._asked_s: float | None = None

    def is_due(self) -> bool:
        if not self._lifetime.stop.is_set():
            return False
        if self._asked_s is None:
            self._asked_s = time.monotonic()
        return time.monotonic() - self._asked_s > LEAVE_S
