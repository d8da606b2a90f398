"""A trainer on two nodes, or its other node, as the process of a service that nobody supervises.

The processes are forks of one server that has imported torch and transformers (`FORKS`), so that a
start does not take the seconds of these imports.
"""

import atexit
import faulthandler
import logging
import multiprocessing
import os
import threading
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from storage.coordination.lifetime import Lifetime
from storage.store.object_store import open_store
from tests.faults.trainer_process import CONFIG, POLICY, ROWS, STEPS
from tests.support.models.trainer_cases import base_weights
from tests.support.patience import PATIENCE_S
from tests.support.runs.lifetimes import heartbeat_writer_of
from trainer.engines.ranks import leader
from trainer.service.node import early_end_reason, train_node
from trainer.service.trainer import train

TWO_NODES = CONFIG.model_copy(update={"nodes": 2})
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])
base_weights()  # imports the model's own module too


def start(folder: Path, service: str, patience_s: float) -> ForkServerProcess:
    process = FORKS.Process(target=_main, args=(folder, service, patience_s))
    process.start()
    return process


def _main(folder: Path, service: str, patience_s: float) -> None:
    faulthandler.dump_traceback_later(PATIENCE_S / 2)  # shows where it waits
    try:
        _serve(folder, service, patience_s)
    finally:
        atexit._run_exitfuncs()  # as at the end of every process but a fork


def _serve(folder: Path, service: str, patience_s: float) -> None:
    logging.basicConfig(level=logging.INFO, format=f"{service}: %(message)s")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    leader.PATIENCE_S = patience_s
    run = open_store(str(folder))
    if service == "trainer":
        heartbeat = heartbeat_writer_of(run, "trainer")
        lifetime = Lifetime(run, heartbeat, threading.Event())
        train(lifetime, POLICY, TWO_NODES, STEPS, seed=0, batch_size=ROWS, max_tokens=512)
        return
    lifetime = Lifetime(
        run,
        heartbeat_writer_of(run, "trainer_node"),
        threading.Event(),
        why_over=lambda of: early_end_reason(of, POLICY, STEPS),
    )
    train_node(lifetime, POLICY, TWO_NODES, 1)
