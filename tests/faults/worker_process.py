"""A rollout worker with a scripted engine in its own process: `python -m
tests.faults.worker_process STORE NAME TTL_S`.

SIGTERM drains it, as its Prefect flow would; `kill -9` kills it.
"""

import signal
import sys
import threading

from rollout.service.worker_setup import end_reason, work
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.coordination.lifetime import Lifetime
from storage.run.orders import EPISODES_MAX
from storage.store.object_store import open_store
from tests.support.runs.workers import SAMPLING, config


def main(store: str, name: str, ttl_s: str) -> None:
    run = open_store(store)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with HeartbeatWriter(
        run, "rollout", name, attempt=0, interval_s=0.5, region="us-east"
    ) as heartbeat_writer:
        settings = config("actor_and_verify", lease_ttl_s=float(ttl_s), drain_s=300.0)
        work(
            Lifetime(run, heartbeat_writer, stop, why_over=end_reason),
            settings,
            SAMPLING,
            "us-east",
            episodes_max=EPISODES_MAX,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
