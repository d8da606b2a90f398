"""Write `store/` and `next/` with the code of the release that `README.md` names. Run by hand, in a
checkout of that release: `python make_store.py`.

    real services in threads ──▶ store/   a run in the middle: versions 0 to 4 of 6, batches to 5
    a trainer on a copy      ──▶ next/    version 5 of each policy, as that release trains it
"""

import shutil
import socket
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from data_ops.service import serve as serve_dataflow
from rollout.worker import work
from storage.heartbeats import Pulse
from storage.objects import ObjectStore, open_store
from tasks.config import RunConfig

from data_ops.config import PolicyData
from storage import batches, checkpoints, layout, runs, tags, weights
from tasks import evals, recipes
from tasks.base_models.publishing import publish_base_models
from tasks.evaluation import follow
from trainer.service import train

HERE = Path(__file__).parent
RUN_ID = "old-1"
LAST = 4
"""The newest version in `store/`."""
INTERVAL_S = 0.5
"""Between two heartbeats."""
DEADLINE_S = 600.0


def main() -> None:
    socket.gethostname = lambda: "laptop"
    config = recipes.load(str(HERE / "recipe.yaml"))
    with TemporaryDirectory() as folder:
        store = open_store(f"{folder}/store")
        run = runs.create_run(store, RUN_ID, config.model_dump(mode="json"), "astraflow/old")
        models = {policy: spec.model for policy, spec in config.policies.items()}
        with Pulse(run, "base_model", "base_model", 0, INTERVAL_S):
            publish_base_models(store, run, models, lambda stage, share: None)
        until_batch(run, config, LAST + 1)
        tags.give(run, "best", "solver", LAST - 1)
        shutil.copytree(f"{folder}/store", f"{folder}/copy")
        copy = runs.open_run(open_store(f"{folder}/copy"), RUN_ID)
        for policy in config.policies:
            one_trainer(copy, config, policy, LAST + 1)
        for name in ("store", "next"):
            shutil.rmtree(HERE / name, ignore_errors=True)
        shutil.copytree(f"{folder}/store", HERE / "store")
        for policy in config.policies:
            version = layout.weights(policy, LAST + 1)
            shutil.copytree(f"{folder}/copy/runs/{RUN_ID}/{version}", HERE / "next" / version)


def until_batch(run: ObjectStore, config: RunConfig, step: int) -> None:
    """Run each service until each policy has its batch `step` and version `LAST`."""
    stop = threading.Event()
    vector = config.evaluated_versions()[1]
    sampling = {policy: spec.sampling for policy, spec in config.policies.items()}
    data = {
        policy: PolicyData(batch_size=spec.batch_size, steps=config.steps)
        for policy, spec in config.policies.items()
    }

    def dataflow() -> None:
        with Pulse(run, "dataflow", "dataflow", 0, INTERVAL_S) as heartbeat_writer:
            serve_dataflow(run, config.data, data, config.seed, heartbeat_writer, stop)

    def rollout() -> None:
        with Pulse(
            run, "rollout", "rollout-us-east-0", 0, INTERVAL_S, region="us-east"
        ) as heartbeat_writer:
            work(run, config.rollout, sampling, "us-east", heartbeat_writer, stop)

    def evaluation() -> None:
        with Pulse(run, "evaluation", "evaluation", 0, INTERVAL_S) as heartbeat_writer:
            follow(run, config, heartbeat_writer, stop)

    services = [threading.Thread(target=serve) for serve in (dataflow, rollout, evaluation)]
    services += [
        threading.Thread(target=one_trainer, args=(run, config, policy, LAST))
        for policy in config.policies
    ]
    with Pulse(run, "supervisor", "supervisor", 0, INTERVAL_S) as heartbeat_writer:
        heartbeat_writer.update(state="working")
        for service in services:
            service.start()
        deadline_s = time.monotonic() + DEADLINE_S
        while not all(ready(run, policy, step) for policy in config.policies) or not evals.exists(
            run, vector
        ):
            assert time.monotonic() < deadline_s, "a service has failed; its exception is above"
            time.sleep(0.1)
        time.sleep(2 * INTERVAL_S)
        working = {key: run.get(key) for key in run.list(layout.HEARTBEATS)}
        stop.set()
        for service in services:
            service.join()
    for key, heartbeat in working.items():
        run.put(key, heartbeat)


def one_trainer(run: ObjectStore, config: RunConfig, policy: str, steps: int) -> None:
    with Pulse(run, "trainer", f"trainer-{policy}", 0, INTERVAL_S) as heartbeat_writer:
        settings = config.policies[policy].train
        train(run, policy, settings, steps, config.seed, heartbeat_writer, threading.Event())


def ready(run: ObjectStore, policy: str, step: int) -> bool:
    newest = checkpoints.newest(run, policy)
    return (
        batches.exists(run, policy, step)
        and weights.exists(run, policy, LAST)
        and newest is not None
        and newest.step == LAST
    )


if __name__ == "__main__":
    main()
