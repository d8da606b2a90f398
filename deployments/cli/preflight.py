"""Checks before a run is started: errors that its supervisor would report late.

Nothing is started or changed. Every function raises ConfigError with a message about the fix.
"""

import importlib.util
from collections.abc import Iterator

from data_ops.prompts.hub import HubPrompts
from deployments.registration import flow_runs
from storage import layout
from storage.errors import ConfigError
from storage.records.control import Stop
from storage.run import runs
from storage.store.object_store import ObjectStore, open_store
from tasks.base_models.stored import RunModel, resolve
from tasks.monitoring import closing_steps
from tasks.recipes import stored_config
from tasks.recipes.placement import overfull, placement
from tasks.recipes.run_config import RunConfig
from tasks.supervision.members import Member, members_of


def refuse_restart(store: ObjectStore, run_id: str, config: RunConfig | None) -> Stop | None:
    """Return the stored stop that a new start of an existing run would remove.

    Raises ConfigError when `config` differs from the run's; None is not compared.
    """
    settings = None if config is None else config.model_dump(mode="json")
    return runs.check_restart(
        store, run_id, settings, stored_config.comparable, closing_steps.all_taken
    )


def continues_runs(config: RunConfig) -> bool:
    """Return whether a base model is a version of another run."""
    return any(isinstance(spec.model, RunModel) for spec in config.policies.values())


def refuse_missing_origins(store: ObjectStore, run_id: str, config: RunConfig) -> None:
    """Raise ConfigError for a base model that is a version of another run which cannot be used.

    A run that exists has its versions already. Models that MLflow has registered are looked up by
    the supervisor: MLflow may still be starting.
    """
    models = {
        policy: spec.model
        for policy, spec in config.policies.items()
        if isinstance(spec.model, RunModel)
    }
    if not store.sub(layout.run_prefix(run_id)).exists(layout.RUN):
        resolve(store, models)


def refuse_missing_deployments(api_url: str, config: RunConfig) -> None:
    """Raise ConfigError when the server lacks the deployment of a member."""
    members = members_of(config)
    flows = {member.deployment.partition("/")[0] for member in members}
    registered = {flow: flow_runs.deployments_of(api_url, flow) for flow in flows}
    for member in members:
        flow = member.deployment.partition("/")[0]
        if member.deployment not in registered[flow]:
            raise ConfigError(_missing(api_url, member, registered[flow]))


def _missing(api_url: str, member: Member, registered: list[str]) -> str:
    missing = f"{api_url} has no deployment {member.deployment}, which {member.id} needs"
    if member.kind != "rollout" or member.queue:
        return f"{missing}; `astraflow deploy` registers it"
    return (
        f"{missing}; it has {', '.join(registered) or 'none of this flow'}: correct "
        f"rollout.regions.{member.parameters['region']}.deployment, or leave it out"
    )


def refuse_mirrors_at_home(store: ObjectStore, config: RunConfig) -> None:
    """Raise ConfigError for a mirror that is the run's own store: it would copy nothing."""
    for region, spec in config.rollout.regions.items():
        if spec.mirror and open_store(spec.mirror).address == store.address:
            raise ConfigError(
                f"rollout.regions.{region}.mirror is the run's own store {store.address}; "
                "name a store in the region, or leave it out"
            )


def refuse_what_this_machine_lacks(config: RunConfig) -> None:
    """Raise ConfigError for missing packages or GPUs, when the services run on this machine."""
    if missing := list(_missing_on_this_machine(config)):
        raise ConfigError("; ".join(missing))


def _missing_on_this_machine(config: RunConfig) -> Iterator[str]:
    sources = {"data": config.data.prompts}
    if config.evaluation is not None:
        sources["evaluation"] = config.evaluation.prompts
    for section, source in sources.items():
        if isinstance(source, HubPrompts) and importlib.util.find_spec("datasets") is None:
            yield (
                f"{section}.prompts.hub: {source.hub} needs the package `datasets`, which is not "
                "installed here: pip install datasets"
            )
    devices = {"rollout.engine.device": config.rollout.engine.device}
    devices |= {
        f"policies.{name}.train.device": policy.train.device
        for name, policy in config.policies.items()
    }
    for gpu, named in overfull(placement(config)).items():
        yield (
            f"GPU {gpu} of this machine: {named}; the shares of members that run at the same time "
            "add up to more than 1: name other GPUs in devices, or lower device_share "
            "(docs/deploying.md, GPUs)"
        )
    on_gpu = [key for key, device in devices.items() if device.startswith("cuda")]
    if on_gpu and not _has_cuda():
        yield (
            f"{', '.join(on_gpu)}: torch finds no CUDA device on this machine; set cpu, or run "
            "where there is one"
        )


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
