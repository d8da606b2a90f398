"""Checks of a recipe as a whole: roles have policies, files exist, times fit.

Each check is a function from a valid `RunConfig` to problems. Beside the configuration it reads
only files that the recipe names and classes that it imports.
"""

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from data_ops.algorithms.custom import CustomAlgorithm
from data_ops.algorithms.filters import ZeroAdvantage
from rollout.config import DTYPES
from rollout.placement import engine_gpus
from storage import import_path, layout, plain_names
from storage.config_model import no_effect
from storage.errors import ConfigError
from storage.run import orders
from storage.store.object_store import open_store
from tasks.base_models.config import CustomModel, FolderModel
from tasks.base_models.folders import refuse_links
from tasks.promotion import gate_checks
from tasks.recipes import placement, prices, prompt_checks, schema
from tasks.recipes.run_config import RunConfig
from tasks.recipes.source import KeyPath
from trainer.losses.corrections import CustomCorrection
from trainer.losses.custom import CustomLoss
from trainer.optimizers import CustomOptimizer

NAME_MAX = 60
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}")
_DEVICE = re.compile(r"(?!meta)[a-z]+(:\d{1,4})?")
EXPERIMENT_MAX = 195
"""Characters of an experiment's name: MLflow stores up to 256 of a model's, which is the
experiment's, a hyphen and the policy's.
"""
BEATS_PER_LEASE_MIN = 2
"""Heartbeats per lease: a worker that misses one must not lose its leases."""


class Problem(NamedTuple):
    """One mistake. Example: `Problem(("data", "max_staleness"), "must be at least 0, not -1")`."""

    path: KeyPath
    message: str


def problems(config: RunConfig, written: Mapping[str, Any]) -> list[Problem]:
    """Return all problems of `config`, in no particular order.

    `written` is the same configuration as plain data, without the defaults.
    """
    checks = (
        _names, _roles, _rewards, _engines, _rollout_engine, _train_engines, _trained_by,
        _algorithms, _groups, _sampling, _prompts, _gate, _models, _mirrors, _times,
        _placement_and_prices,
    )  # fmt: skip
    without_effect = [
        Problem(path, why) for path, why in schema.without_effect(written, config).items()
    ]
    return [*without_effect, *(problem for check in checks for problem in check(config))]


def _names(config: RunConfig) -> Iterator[Problem]:
    named: list[tuple[KeyPath, str]] = [(("policies", name), name) for name in config.policies]
    named += [(("rollout", "regions", name), name) for name in config.rollout.regions]
    for path, name in named:
        if not layout.NAME.fullmatch(name) or len(name) > NAME_MAX:
            yield Problem(
                path,
                f"a name is at most {NAME_MAX} letters, digits, - and _ only, since it becomes "
                "part of file names",
            )
    for name, spec in config.policies.items():
        for node in range(1, spec.train.nodes):
            if (taken := f"{name}-node-{node}") in config.policies:
                yield Problem(
                    ("policies", taken),
                    f"the trainer of this policy would have the name of node {node} of {name}, "
                    f"whose train.nodes is {spec.train.nodes}; choose another name",
                )
    if config.evaluation is not None:
        dataset = config.evaluation.dataset
        if not dataset.strip() or not dataset.isprintable():
            yield Problem(
                ("evaluation", "dataset"),
                f"{dataset!r} cannot be shown as the name of a set; use printable characters",
            )
        if all(map(layout.NAME.fullmatch, config.policies)):
            file = layout.evaluation(dict.fromkeys(config.policies, config.steps)).split("/")[-1]
            if len(file) > plain_names.BYTES_MAX:
                yield Problem(
                    ("policies",),
                    f"the file of an evaluation, which has the names of all {len(config.policies)} "
                    f"policies, would have a name of {len(file)} bytes, and at most "
                    f"{plain_names.BYTES_MAX} are possible; use shorter names, or leave evaluation "
                    "out",
                )
    experiment = config.tracking.experiment
    if not experiment.strip() or not experiment.isprintable() or len(experiment) > EXPERIMENT_MAX:
        yield Problem(
            ("tracking", "experiment"),
            f"MLflow's experiments have names of 1 to {EXPERIMENT_MAX} printable characters; write "
            "such a name",
        )
    if not _RUN_NAME.fullmatch(config.name):
        yield Problem(
            ("name",),
            "run ids begin with it: use up to 60 letters, digits, '.', '_' and '-', a letter or "
            "digit first",
        )


def _roles(config: RunConfig) -> Iterator[Problem]:
    from rollout.workflows import WORKFLOW, find_workflow, unknown_arguments

    workflow = config.rollout.workflow
    at: KeyPath = ("rollout", "workflow")
    try:
        workflow_class = find_workflow(workflow)
    except ConfigError as error:
        yield Problem((*at, "name"), str(error))
        return
    strange = unknown_arguments(workflow_class, workflow)
    yield from (Problem((*at, "args", name), why) for name, why in strange.items())
    if not strange and (
        wrong := import_path.constructor_fault(workflow_class, WORKFLOW, workflow.args)
    ):
        yield Problem((*at, "args"), f"do not fit the workflow {workflow.name}: {wrong}")
    roles = workflow_class.roles
    for role in workflow.roles:
        if role not in roles:
            yield Problem(
                (*at, "roles", role), f"{workflow.name} has no such role; {_one_of(role, roles)}"
            )
    players = {role: workflow.roles.get(role, role) for role in roles}
    for role, policy in players.items():
        if policy not in config.policies:
            path = (*at, "roles", role) if role in workflow.roles else (*at, "name")
            yield Problem(
                path,
                f"{workflow.name} asks for the policy {policy}, which policies lacks (it has "
                f"{plain_names.listed(config.policies)}); add policies.{policy}, or name one that "
                "plays it in roles: "
                f"{{{role}: {next(iter(config.policies))}}}",
            )
    for policy in config.policies:
        if policy not in players.values():
            yield Problem(
                ("policies", policy),
                f"no role of {workflow.name} is played by it, so it would wait for ever for "
                "something to train on; "
                "remove it, or give it a role in rollout.workflow.roles",
            )


def _rewards(config: RunConfig) -> Iterator[Problem]:
    from rollout.rewards.reward import find_reward

    try:
        find_reward(config.rollout.workflow.reward)
    except ConfigError as error:
        yield Problem(("rollout", "workflow", "reward"), str(error))


def _engines(config: RunConfig) -> Iterator[Problem]:
    """Check the names of engines, without importing them.

    Their requirements may be installed only where the services run.
    """
    from rollout.engines import engine as rollout_engine
    from trainer.engines import engine as train_engine

    engine = config.rollout.engine
    named: list[tuple[KeyPath, str, Mapping[str, Any], str]] = [
        (("rollout", "engine", "name"), engine.name, rollout_engine.ENGINES, engine.device)
    ]
    for name, policy in config.policies.items():
        train = policy.train
        named.append(
            (
                ("policies", name, "train", "engine"),
                train.engine,
                train_engine.ENGINES,
                train.device,
            )
        )
    for path, engine_name, table, device in named:
        try:
            import_path.check_name(engine_name, table)
        except ConfigError as error:
            yield Problem(path, str(error))
        if engine_name == "torch" and not _DEVICE.fullmatch(device):
            yield Problem(
                (*path[:-1], "device"),
                f"{device!r} is not the name of a device; use cpu, cuda, or a number with it as in "
                "cuda:1",
            )


def _rollout_engine(config: RunConfig) -> Iterator[Problem]:
    engine = config.rollout.engine
    at: KeyPath = ("rollout", "engine")
    if engine.name == "torch" and engine.dtype not in DTYPES:
        yield Problem((*at, "dtype"), f"{engine.dtype!r} is not one of {', '.join(DTYPES)}")
    own_servers = engine.name == "sglang" and not engine.sglang.urls
    if own_servers and engine.device != "cpu" and not engine_gpus(engine):
        yield Problem(
            (*at, "device"), f"{engine.device!r} cannot be used by sglang; use cpu, cuda or cuda:N"
        )


def _train_engines(config: RunConfig) -> Iterator[Problem]:
    """Check what the built-in engines cannot do, before a trainer finds it."""
    for name, policy in config.policies.items():
        train, at = policy.train, ("policies", name, "train")
        if train.engine not in ("torch", "deepspeed"):
            continue
        in_parts = train.engine == "deepspeed" or train.num_ranks > 1
        if in_parts and train.optimizer.name != "adamw":
            yield Problem(
                (*at, "optimizer"),
                f"{train.optimizer.name} needs whole matrices, and the engine deepspeed, or "
                "several ranks, have parts of them; use adamw, or engine: torch with one rank",
            )
        if train.ranks > 1 and train.device not in ("cpu", "cuda"):
            yield Problem(
                (*at, "device"),
                f"{train.device!r} is one device for {train.ranks} ranks; use cuda, with the GPU "
                "of each rank in devices, or cpu",
            )
        if train.deepspeed.offload_optimizer and train.device == "cpu":
            yield Problem(
                (*at, "deepspeed", "offload_optimizer"),
                no_effect("with device: cpu", "set device: cuda"),
            )


def _trained_by(config: RunConfig) -> Iterator[Problem]:
    for name, policy in config.policies.items():
        at: KeyPath = ("policies", name, "train")
        for path, plugin in (
            ((*at, "loss"), policy.train.loss),
            ((*at, "loss", "correction"), policy.train.loss.correction),
            ((*at, "optimizer"), policy.train.optimizer),
        ):
            try:
                if isinstance(plugin, CustomLoss | CustomCorrection | CustomOptimizer):
                    plugin.find()
            except ConfigError as error:
                yield Problem((*path, "path"), str(error))


def _algorithms(config: RunConfig) -> Iterator[Problem]:
    for place in ("curate", "filter", "sample"):
        for index, algorithm in enumerate(getattr(config.data, place)):
            try:
                if isinstance(algorithm, CustomAlgorithm):
                    algorithm.find()
            except ConfigError as error:
                yield Problem(("data", place, str(index)), str(error))


def _groups(config: RunConfig) -> Iterator[Problem]:
    alone = config.data.samples_per_prompt == 1
    if alone and any(isinstance(algorithm, ZeroAdvantage) for algorithm in config.data.filter):
        yield Problem(
            ("data", "samples_per_prompt"),
            "with 1 sample every advantage is 0 and the filter zero_advantage drops everything; "
            "use 2 or more",
        )
    prompts, samples = config.data.prompts_per_order, config.data.samples_per_prompt
    if prompts * samples > orders.EPISODES_MAX:
        yield Problem(
            ("data", "prompts_per_order" if prompts > samples else "samples_per_prompt"),
            f"{prompts:,} prompts with {samples:,} samples each are {prompts * samples:,} episodes "
            "in one order, and at most "
            f"{orders.EPISODES_MAX:,} are played; lower prompts_per_order or samples_per_prompt",
        )


def _sampling(config: RunConfig) -> Iterator[Problem]:
    longest = config.rollout.engine.max_tokens
    for name, policy in config.policies.items():
        at: KeyPath = ("policies", name, "sampling")
        if policy.sampling.max_new_tokens >= longest:
            yield Problem(
                (*at, "max_new_tokens"),
                f"{policy.sampling.max_new_tokens} leaves no room for a prompt: "
                f"rollout.engine.max_tokens is {longest}; "
                "lower the one or raise the other",
            )
        if policy.sampling.temperature == 0:
            yield Problem(
                (*at, "temperature"),
                "greedy tokens have log-probability 0 and cannot be trained on; use 1.0 or the "
                "like",
            )
        for key, off in (("top_p", 1.0), ("top_k", 0)):
            if getattr(policy.sampling, key) != off:
                yield Problem(
                    (*at, key),
                    "the trainer's probabilities are those of the whole vocabulary: tokens drawn "
                    f"with {key} "
                    f"{getattr(policy.sampling, key)} would look off-policy at once; leave it out, "
                    f"or set {off:g}",
                )


def _prompts(config: RunConfig) -> Iterator[Problem]:
    yield from (Problem(path, message) for path, message in prompt_checks.faults(config))


def _gate(config: RunConfig) -> Iterator[Problem]:
    yield from (Problem(path, message) for path, message in gate_checks.faults(config))


def _models(config: RunConfig) -> Iterator[Problem]:
    for name, policy in config.policies.items():
        at: KeyPath = ("policies", name, "model")
        try:
            if isinstance(policy.model, CustomModel):
                policy.model.find()
            elif isinstance(policy.model, FolderModel):
                _refuse_folder(Path(policy.model.path))
        except ConfigError as error:
            key = "custom" if isinstance(policy.model, CustomModel) else "path"
            yield Problem((*at, key), str(error).removeprefix("model.path: "))


def _refuse_folder(folder: Path) -> None:
    """Raise ConfigError for a folder without a model, or with symbolic links in it."""
    if not os.path.isfile(folder / "config.json"):
        raise ConfigError(
            f"{folder} holds no config.json; name a folder saved with save_pretrained"
        )
    refuse_links(folder)


def _mirrors(config: RunConfig) -> Iterator[Problem]:
    owners: dict[str, str] = {}
    for name, region in config.rollout.regions.items():
        path: KeyPath = ("rollout", "regions", name, "mirror")
        try:
            address = open_store(region.mirror).address if region.mirror else ""
        except ConfigError as error:
            yield Problem(path, str(error))
            continue
        if address and owners.setdefault(address, name) != name:
            yield Problem(
                path,
                f"is the mirror of {owners[address]} too, and both would copy into it; "
                "give each region its own bucket or prefix",
            )


def _times(config: RunConfig) -> Iterator[Problem]:
    beat_s = config.supervise.heartbeat_interval_s
    limit_s = BEATS_PER_LEASE_MIN * beat_s
    if config.rollout.lease_ttl_s < limit_s:
        yield Problem(
            ("rollout", "lease_ttl_s"),
            f"{config.rollout.lease_ttl_s:g} s is too short for beats every {beat_s:g} s "
            f"(supervise.heartbeat_interval_s); use {limit_s:g} or more",
        )
    if config.supervise.heartbeat_limit_s < limit_s:
        yield Problem(
            ("supervise", "heartbeat_limit_s"),
            f"{config.supervise.heartbeat_limit_s:g} s would call members with beats every "
            f"{beat_s:g} s lost; "
            f"use {limit_s:g} or more",
        )


def _placement_and_prices(config: RunConfig) -> Iterator[Problem]:
    for faults in (placement.faults, prices.faults):
        yield from (Problem(path, message) for path, message in faults(config))


def _one_of(word: str, names: tuple[str, ...]) -> str:
    if close := difflib.get_close_matches(word, names, n=1):
        return f"did you mean {close[0]}?"
    return f"it has {plain_names.listed(names)}"
