"""Run one service of a run as the body of a flow: open the run, write heartbeats, make the
`Lifetime`.

A service stops, after it has drained, on SIGTERM and when a newer attempt of the same member is
alive. The services themselves are plain functions of their packages; a flow calls the functions of
this module with names alone. Each returns None when the service is done, or the final state of its
flow run when the service was stopped.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

from prefect.client.schemas.objects import State

from data_ops.config import PolicyData
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.coordination.lifetime import Lifetime, StoppedError, stop_reason
from storage.coordination.machine_monitor import MachineMonitor
from storage.coordination.progress_log import ProgressLog
from storage.errors import ConfigError
from storage.records.control import ServiceState, Stop
from storage.records.progress import BaseModelProgress, ServiceKind
from storage.run import runs
from storage.store import object_store
from storage.store.object_store import ObjectStore
from storage.weights import replication
from tasks.recipes.run_config import RunConfig
from tasks.recipes.stored_config import read_config
from tasks.services import store_credentials
from tasks.services.service_logs import service_logs
from tasks.services.sigterm import drained, stop_on_sigterm
from trainer.config import TrainConfig

log = logging.getLogger(__name__)

Ended: TypeAlias = State[None] | None


@dataclass(frozen=True)
class _Service:
    """What every service needs."""

    run: ObjectStore
    config: RunConfig
    heartbeat: HeartbeatWriter
    stop: threading.Event
    """Set by SIGTERM, and when a newer attempt of the same member is alive."""

    def lifetime(self, why_over: Callable[[ObjectStore], str] = stop_reason) -> Lifetime:
        return Lifetime(self.run, self.heartbeat, self.stop, why_over=why_over)

    def ended(self) -> Ended:
        """Return the final state of the flow run; None when the service is done."""
        return drained() if self.stop.is_set() else None


@contextmanager
def _serving(
    run_id: str, kind: ServiceKind, member: str, attempt: int, region: str = ""
) -> Iterator[_Service]:
    """Open the run and write its member's heartbeats.

    A ConfigError, which only a person can correct, fails the run at once with its message. After
    any other error the supervisor restarts the member.
    """
    store_credentials.load()
    run = runs.open_run(object_store.default_store(), run_id)
    config = read_config(run)
    interval_s = config.supervise.heartbeat_interval_s
    with service_logs(config.log_level), stop_on_sigterm() as stop, MachineMonitor() as monitor:
        writer = HeartbeatWriter(
            *(run, kind, member, attempt, interval_s),
            region=region,
            leave=stop.set,
            observe=ProgressLog(config.log_every_s, config.log_every_steps).observe,
            machine=monitor.last,
        )
        log.info("attempt %d runs on %s, pid %d", attempt, *_process())
        try:
            with writer as heartbeat:
                yield _Service(run, config, heartbeat, stop)
        except ConfigError as error:
            log.error("the run cannot go on: %s", error)
            runs.request_stop(run, Stop("failed", f"{member}: {error}", time.time()))
            raise


def _process() -> tuple[str, int]:
    """Return the names of this machine and process."""
    return socket.gethostname(), os.getpid()


def run_base_model(run_id: str, member: str, attempt: int) -> Ended:
    from tasks.base_models.publishing import publish_base_models, publish_origin

    with _serving(run_id, "base_model", member, attempt) as service:
        lifetime = service.lifetime()

        def report(stage: str, fraction: float) -> None:
            progress = BaseModelProgress(base_model=fraction)
            service.heartbeat.update(state=ServiceState.WORKING, note=stage, progress=progress)
            lifetime.check()

        specs = service.config.policies
        origins = runs.read_run(service.run).origins
        models = {policy: spec.model for policy, spec in specs.items() if policy not in origins}
        try:
            for number, (policy, spec) in enumerate(specs.items()):
                if (origin := origins.get(policy)) is not None:
                    report(f"reading version {origin.version} of {origin.run}", number / len(specs))
                    publish_origin(
                        service.run, policy, spec.model, spec.train.adapter.stored(), origin
                    )
            publish_base_models(object_store.default_store(), service.run, models, report)
        except StoppedError as error:
            log.info("the base models are not completed: %s", error)
    return service.ended()


def run_dataflow_window(
    run_id: str, member: str, attempt: int
) -> Literal["done", "full", "stopped"]:
    """Serve until the dataflow is done or stopped, or this flow run has had its share of tasks."""
    from data_ops.dataflow.service import serve
    from tasks.services.parallel_ingest import ParallelIngest
    from tasks.services.task_runners import make_task_runner

    with _serving(run_id, "dataflow", member, attempt) as service:
        config = service.config
        policies = {
            name: PolicyData(batch_size=policy.batch_size, steps=config.steps)
            for name, policy in config.policies.items()
        }
        with make_task_runner(config.data.task_runner) as runner:
            ingest = ParallelIngest(
                object_store.default_store(), run_id, config.data.shards_per_task, runner
            )
            full = "the next window begins"
            lifetime = service.lifetime(lambda run: full if ingest.is_full else stop_reason(run))
            serve(
                lifetime,
                config.data,
                policies,
                config.seed,
                ingest,
                ingest.write_batch,
                max_tokens=config.rollout.engine.max_tokens,
            )
    if service.stop.is_set():
        return "stopped"
    return "full" if ingest.is_full else "done"


def run_rollout(run_id: str, member: str, attempt: int, region: str) -> Ended:
    from rollout.service.worker_setup import end_reason, work

    with _serving(run_id, "rollout", member, attempt, region) as service:
        config = service.config
        sampling = {name: policy.sampling for name, policy in config.policies.items()}
        episodes_max = config.data.episodes_per_order
        lifetime = service.lifetime(end_reason)
        work(lifetime, config.rollout, sampling, region, episodes_max=episodes_max)
    return service.ended()


def run_mirror(run_id: str, member: str, attempt: int, region: str) -> Ended:
    with _serving(run_id, "mirror", member, attempt, region) as service:
        spec = service.config.rollout.regions.get(region)
        if spec is None or not spec.mirror:
            raise ConfigError(
                f"run {run_id} has no mirror in {region!r}; name one in "
                f"rollout.regions.{region}.mirror"
            )
        mirror = replication.of_run(service.run, spec.mirror)
        lifetime = service.lifetime(replication.early_stop_reason)
        replication.replicate(lifetime, mirror, list(service.config.policies), service.config.steps)
    return service.ended()


def run_trainer(run_id: str, member: str, attempt: int, policy: str) -> Ended:
    from trainer.service.trainer import train

    with _serving(run_id, "trainer", member, attempt) as service:
        settings = _train_config(service.config, run_id, policy)
        config = service.config
        batch_size = config.policies[policy].batch_size
        train(
            service.lifetime(),
            policy,
            settings,
            config.steps,
            config.seed,
            batch_size=batch_size,
            max_tokens=config.rollout.engine.max_tokens,
        )
    return service.ended()


def run_trainer_node(run_id: str, member: str, attempt: int, policy: str, node: int) -> Ended:
    from trainer.service.node import early_end_reason, train_node

    with _serving(run_id, "trainer_node", member, attempt) as service:
        settings = _train_config(service.config, run_id, policy)
        if not 0 < node < settings.nodes:
            raise ConfigError(
                f"the trainer of {policy} in run {run_id} has no node {node}: it has "
                f"{settings.nodes}, and node 0 is the member trainer-{policy}"
            )
        steps = service.config.steps
        lifetime = service.lifetime(lambda run: early_end_reason(run, policy, steps))
        train_node(lifetime, policy, settings, node)
    return service.ended()


def _train_config(config: RunConfig, run_id: str, policy: str) -> TrainConfig:
    if policy not in config.policies:
        raise ConfigError(
            f"run {run_id} has no policy {policy!r}; it has {', '.join(config.policies)}"
        )
    return config.policies[policy].train


def run_evaluation(run_id: str, member: str, attempt: int) -> Ended:
    from tasks.evaluation import follow
    from tasks.services.prefect_tasks import evaluation_task

    with _serving(run_id, "evaluation", member, attempt) as service:
        follow(service.lifetime(), service.config, evaluation_task)
    return service.ended()
