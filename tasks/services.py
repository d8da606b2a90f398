"""Runs one service of a run as a process: opens the run, beats, and turns SIGTERM into a request to drain.

The services themselves are plain functions of their rooms; this module gives them what a flow was told by name.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from prefect.exceptions import TerminationSignal

from data_ops.config import PolicyData
from storage import objects, runs
from storage.errors import ConfigError
from storage.heartbeats import Pulse
from storage.objects import ObjectStore
from tasks.config import RunConfig


@contextmanager
def draining_on_sigterm() -> Iterator[threading.Event]:
    """Yields an event that SIGTERM sets.

    A service that was told to drain ends in Prefect's own TerminationSignal, so that Prefect records a cancellation as one.
    """
    stop = threading.Event()
    told = threading.Event()

    def ask_to_stop(signum: int, frame: FrameType | None) -> None:
        told.set()
        stop.set()

    before = signal.signal(signal.SIGTERM, ask_to_stop)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)
    if told.is_set():
        raise TerminationSignal(signal=signal.SIGTERM)


def open_configured(run_id: str) -> tuple[ObjectStore, RunConfig]:
    run = runs.open_run(objects.default_store(), run_id)
    return run, RunConfig.model_validate(runs.run_config(run))


@contextmanager
def _beating(
    run: ObjectStore, config: RunConfig, kind: Any, member: str, attempt: int, region: str = ""
) -> Iterator[Pulse]:
    with Pulse(run, kind, member, attempt, config.supervise.heartbeat_interval_s, region=region) as pulse:
        yield pulse


def run_base_model(run_id: str, member: str, attempt: int) -> None:
    from tasks.base_models import publish_base_models

    run, config = open_configured(run_id)
    with draining_on_sigterm(), _beating(run, config, "base_model", member, attempt) as pulse:

        def report(stage: str, fraction: float) -> None:
            pulse.update(state="working", note=stage, progress={"base_model": fraction})

        models = {policy: spec.model for policy, spec in config.policies.items()}
        publish_base_models(objects.default_store(), run, models, report)


def run_dataflow_window(run_id: str, member: str, attempt: int) -> bool:
    """Serve until the dataflow's work is done (True) or this flow run has had its share of tasks (False)."""
    from data_ops.service import serve
    from tasks.parallel_intake import ParallelIntake

    run, config = open_configured(run_id)
    policies = {
        name: PolicyData(batch_size=policy.batch_size, steps=config.steps) for name, policy in config.policies.items()
    }
    with draining_on_sigterm() as stop, _beating(run, config, "dataflow", member, attempt) as pulse:
        window_full = threading.Event()

        def end_window() -> None:
            window_full.set()
            stop.set()

        take_in = ParallelIntake(run, config.data, list(policies), end_window)
        serve(run, config.data, policies, config.seed, pulse, stop, take_in)
    return not window_full.is_set()


def run_rollout(run_id: str, member: str, attempt: int, region: str) -> None:
    from rollout.worker import work

    run, config = open_configured(run_id)
    sampling = {name: policy.sampling for name, policy in config.policies.items()}
    with draining_on_sigterm() as stop, _beating(run, config, "rollout", member, attempt, region) as pulse:
        work(run, config.rollout, sampling, region, pulse, stop)


def run_trainer(run_id: str, member: str, attempt: int, policy: str) -> None:
    from trainer.service import train

    run, config = open_configured(run_id)
    if policy not in config.policies:
        raise ConfigError(f"run {run_id} has no policy {policy!r}; it has {', '.join(config.policies)}")
    with draining_on_sigterm() as stop, _beating(run, config, "trainer", member, attempt) as pulse:
        train(run, policy, config.policies[policy].train, config.steps, config.seed, pulse, stop)


def run_evaluation(run_id: str, member: str, attempt: int) -> None:
    from tasks import prefect_tasks
    from tasks.evaluation import follow

    run, config = open_configured(run_id)
    with draining_on_sigterm() as stop, _beating(run, config, "evaluation", member, attempt) as pulse:
        follow(run, config, pulse, stop, lambda versions: prefect_tasks.evaluate_versions(run_id, versions))
