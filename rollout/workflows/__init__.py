"""The table of built-in workflows, and how a recipe's workflow is built."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from rollout.agents.workflow import Workflow
from rollout.config import WorkflowConfig
from rollout.rewards.reward import Reward
from rollout.workflows.actor_and_verify import ActorAndVerify
from rollout.workflows.single_turn import SingleTurn
from storage.errors import ConfigError
from storage.import_path import PluginKind, foreign_code, resolve

WORKFLOWS: Final[Mapping[str, type[Workflow]]] = {
    "single_turn": SingleTurn,
    "actor_and_verify": ActorAndVerify,
}
"""Built-in workflows; any other workflow is named by its import path."""


WORKFLOW: Final = PluginKind(
    "workflow", Workflow, "docs/extending/workflows.md", constructor_args=("reward",)
)


def find_workflow(config: WorkflowConfig, key: str = "") -> type[Workflow]:
    """Return the class of a recipe's workflow.

    Raises:
        ConfigError: the name is unknown, or the class is no workflow; begins with `key`.
    """
    workflow_class: Any = resolve(config.name, WORKFLOWS, WORKFLOW, key)
    roles = getattr(workflow_class, "roles", None)
    if not (isinstance(roles, tuple) and roles and all(isinstance(role, str) for role in roles)):
        raise ConfigError(
            f"{key and f'{key}: '}{config.name} has no class attribute roles, the names of the "
            f'policies that it calls, such as roles = ("solver",); see {WORKFLOW.page}'
        )
    return cast(type[Workflow], workflow_class)


def make_workflow(config: WorkflowConfig, reward: Reward) -> Workflow:
    """Build the workflow of a recipe.

    Raises:
        ConfigError: its name or an argument is unknown, or its constructor raises.
    """
    workflow_class: Any = find_workflow(config, "rollout.workflow.name")
    for name, message in unknown_arguments(workflow_class, config).items():
        raise ConfigError(f"rollout.workflow.args.{name}: {message}")
    with foreign_code(f"rollout.workflow.args: the constructor of {config.name}"):
        workflow: Workflow = workflow_class(reward, **config.args)
    return workflow


def unknown_arguments(workflow_class: Callable[..., Any], config: WorkflowConfig) -> dict[str, str]:
    """Return name → message for the recipe's arguments that the workflow's constructor lacks.

    Empty for a class without a readable signature.
    """
    try:
        parameters = list(inspect.signature(workflow_class).parameters.values())[1:]
    except (TypeError, ValueError):
        return {}  # a class written in C
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return {}
    names = [parameter.name for parameter in parameters]
    message = (
        f"the workflow {config.name} takes no such argument; it takes {', '.join(names) or 'none'}"
    )
    return {name: message for name in config.args if name not in names}


def policies_by_role(
    workflow: Workflow | type[Workflow], config: WorkflowConfig, policies: Mapping[str, Any]
) -> dict[str, str]:
    """Return role → policy of the workflow; ConfigError for an unknown role or policy."""
    for role in config.roles:
        if role not in workflow.roles:
            raise ConfigError(
                f"rollout.workflow.roles.{role}: the workflow {config.name} has no such role; "
                f"it has {', '.join(workflow.roles)}"
            )
    policy_of = {role: config.roles.get(role, role) for role in workflow.roles}
    for role, policy in policy_of.items():
        if policy not in policies:
            raise ConfigError(
                f"the workflow {config.name} needs policy {policy} for the role {role}, "
                "which the recipe lacks; "
                f"add it under policies, or write rollout.workflow.roles: {{{role}: "
                f"{next(iter(policies), 'NAME')}}}"
            )
    return policy_of
