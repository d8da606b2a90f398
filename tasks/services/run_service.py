"""Runs one service of a run as a process: opens the run, beats, and drains on SIGTERM or when a newer attempt lives.

The services themselves are plain functions of their rooms; this module gives them what a flow was told by name. Each
function returns None when the service is through, or the state in which its flow run ends because it was told to leave.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from prefect.client.schemas.objects import State

from data_ops.config import PolicyData
from storage.coordination import heartbeats
from storage.coordination.heartbeats import Pulse
from storage.errors import ConfigError, TransientError
from storage.records.control import Stop
from storage.run import runs
from storage.store import object_store
from storage.store.object_store import ObjectStore
from storage.weights import replication
from tasks.recipes.run_config import RunConfig
from tasks.recipes.stored_config import read_config
from tasks.services import store_credentials
from tasks.services.interruption import Interruption, LeftEarlyError
from tasks.services.sigterm import Leave, drained, leave_on_sigterm

log = logging.getLogger(__name__)

MIRROR_PATIENCE_S = 5.0
"""A mirror that is away is tried again by its service, which hears in between that it shall leave."""

Ended: TypeAlias = State[None] | None


@dataclass(frozen=True)
class _Service:
    """What every service is given."""

    run: ObjectStore
    config: RunConfig
    pulse: Pulse
    leave: Leave

    def ended(self) -> Ended:
        return drained() if self.leave.told else None


@contextmanager
def _serving(run_id: str, kind: heartbeats.Kind, member: str, attempt: int, region: str = "") -> Iterator[_Service]:
    """What only a person can mend fails the run at once, with the sentence that says how; anything else that is raised is
    for the supervisor, which starts the member again."""
    store_credentials.load()
    run = runs.open_run(object_store.default_store(), run_id)
    config = read_config(run)
    interval_s = config.supervise.heartbeat_interval_s
    with (
        leave_on_sigterm() as leave,
        Pulse(run, kind, member, attempt, interval_s, region=region, leave=leave.tell) as pulse,
    ):
        try:
            yield _Service(run, config, pulse, leave)
        except ConfigError as error:
            log.error("the run cannot go on: %s", error)
            runs.request_stop(run, Stop("failed", f"{member}: {error}", time.time()))
            raise


def run_base_model(run_id: str, member: str, attempt: int) -> Ended:
    from tasks.base_models.publishing import publish_base_models

    with _serving(run_id, "base_model", member, attempt) as service:
        interruption = Interruption(service.run, service.leave.stop)

        def report(stage: str, fraction: float) -> None:
            service.pulse.update(state="working", note=stage, progress={"base_model": fraction})
            interruption.check()

        models = {policy: spec.model for policy, spec in service.config.policies.items()}
        try:
            publish_base_models(object_store.default_store(), service.run, models, report)
        except LeftEarlyError as error:
            log.info("the base models are not built to their end: %s", error)
    return service.ended()


def run_dataflow_window(run_id: str, member: str, attempt: int) -> Literal["done", "full", "told"]:
    """Serve until the dataflow is through, until this flow run has had its share of tasks, or until told to leave."""
    from data_ops.dataflow.service import serve
    from tasks.services.parallel_ingest import ParallelIntake

    with _serving(run_id, "dataflow", member, attempt) as service:
        run, config, stop = service.run, service.config, service.leave.stop
        policies = {
            name: PolicyData(batch_size=policy.batch_size, steps=config.steps) for name, policy in config.policies.items()
        }
        take_in = ParallelIntake(run, config.data, list(policies), window_full=stop.set)
        serve(run, config.data, policies, config.seed, service.pulse, stop, take_in)
    if service.leave.told:
        return "told"
    return "full" if stop.is_set() else "done"


def run_rollout(run_id: str, member: str, attempt: int, region: str) -> Ended:
    from rollout.service.worker import work

    with _serving(run_id, "rollout", member, attempt, region) as service:
        config = service.config
        sampling = {name: policy.sampling for name, policy in config.policies.items()}
        work(service.run, config.rollout, sampling, region, service.pulse, service.leave.stop)
    return service.ended()


def run_mirror(run_id: str, member: str, attempt: int, region: str) -> Ended:
    with _serving(run_id, "mirror", member, attempt, region) as service:
        run, config, stop = service.run, service.config, service.leave.stop
        spec = config.rollout.regions.get(region)
        if spec is None or not spec.mirror:
            raise ConfigError(f"run {run_id} has no mirror in {region!r}; name one in rollout.regions.{region}.mirror")
        mirror = replace(replication.of_run(run, spec.mirror), patience_s=MIRROR_PATIENCE_S)

        def leave(pause_s: float) -> bool:
            try:
                return stop.wait(pause_s) or ((ended := runs.read_stop(run)) is not None and ended.state != "completed")
            except TransientError:
                return False  # a store that is away is waited for

        replication.keep(run, mirror, list(config.policies), service.pulse, leave, config.steps)
    return service.ended()


def run_trainer(run_id: str, member: str, attempt: int, policy: str) -> Ended:
    from trainer.service.trainer import train

    with _serving(run_id, "trainer", member, attempt) as service:
        config = service.config
        if policy not in config.policies:
            raise ConfigError(f"run {run_id} has no policy {policy!r}; it has {', '.join(config.policies)}")
        settings = config.policies[policy].train
        train(service.run, policy, settings, config.steps, config.seed, service.pulse, service.leave.stop)
    return service.ended()


def run_evaluation(run_id: str, member: str, attempt: int) -> Ended:
    from tasks.evaluation import follow
    from tasks.services.prefect_tasks import evaluation_task

    with _serving(run_id, "evaluation", member, attempt) as service:
        follow(service.run, service.config, service.pulse, service.leave.stop, evaluation_task)
    return service.ended()
