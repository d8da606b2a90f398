"""The table of built-in workflows, and how a recipe's workflow is built."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from rollout.agents.workflow import Workflow
from rollout.config import WorkflowConfig
from rollout.rewards.math_reward import Reward
from rollout.workflows.actor_and_verify import ActorAndVerify
from rollout.workflows.single_turn import SingleTurn
from storage.errors import ConfigError
from storage.import_path import PluginKind, resolve

WORKFLOWS: Final[Mapping[str, type[Workflow]]] = {
    "single_turn": SingleTurn,
    "actor_and_verify": ActorAndVerify,
}
"""The built-in workflows; any other is named by its import path."""


WORKFLOW: Final = PluginKind("workflow", Workflow, "docs/workflows.md", made_with=("reward",))


def find_workflow(config: WorkflowConfig, key: str = "") -> type[Workflow]:
    """The class of a recipe's workflow, not yet built. ConfigError, beginning with `key`, for a
    name that leads to none.
    """
    found: Any = resolve(config.name, WORKFLOWS, WORKFLOW, key)
    roles = getattr(found, "roles", None)
    if not (isinstance(roles, tuple) and roles and all(isinstance(role, str) for role in roles)):
        raise ConfigError(
            f"{key and f'{key}: '}{config.name} has no class attribute roles, the names of the "
            "policies that it calls, such as "
            f'roles = ("solver",); see {WORKFLOW.page}'
        )
    return cast(type[Workflow], found)


def make_workflow(config: WorkflowConfig, reward: Reward) -> Workflow:
    """The workflow of a recipe. ConfigError for a name that leads nowhere, and for arguments the
    workflow does not take.
    """
    made: Any = find_workflow(config, "rollout.workflow.name")
    for name, why in strange_arguments(made, config).items():
        raise ConfigError(f"rollout.workflow.args.{name}: {why}")
    try:
        workflow: Workflow = made(reward, **config.args)
    except TypeError as error:
        raise ConfigError(
            f"rollout.workflow.args do not fit the workflow {config.name}: {error}"
        ) from error
    return workflow


def strange_arguments(made: Callable[..., Any], config: WorkflowConfig) -> dict[str, str]:
    """Name → what is wrong, for the arguments of a recipe that its workflow `made` does not take,
    as far as it tells.
    """
    try:
        taken = list(inspect.signature(made).parameters.values())[1:]
    except (TypeError, ValueError):
        return {}  # a class written in C
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
        return {}
    names = [parameter.name for parameter in taken]
    why = (
        f"the workflow {config.name} takes no such argument; it takes {', '.join(names) or 'none'}"
    )
    return {name: why for name in config.args if name not in names}


def policies_by_role(
    workflow: Workflow, config: WorkflowConfig, policies: Mapping[str, Any]
) -> dict[str, str]:
    """Which policy plays each role of the workflow. ConfigError for a role or a policy that is not
    there.
    """
    for role in config.roles:
        if role not in workflow.roles:
            raise ConfigError(
                f"rollout.workflow.roles.{role}: the workflow {config.name} has no such role; "
                f"it has {', '.join(workflow.roles)}"
            )
    cast = {role: config.roles.get(role, role) for role in workflow.roles}
    for role, policy in cast.items():
        if policy not in policies:
            raise ConfigError(
                f"the workflow {config.name} wants the role {role} played by policy {policy}, "
                "which the recipe lacks; "
                f"add it under policies, or write rollout.workflow.roles: {{{role}: "
                f"{next(iter(policies), 'NAME')}}}"
            )
    return cast
