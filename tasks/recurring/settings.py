"""The recipe of a night's run: the recurring recipe, with what differs from night to night.

seed               the recipe's and the night's number: the same seed would sample the same again
policies.*.model   the champion's versions
data.prompts       a data window: from the end of the last judged night's to this night's due time
data.start         other prompts: behind the last ones of the last judged night
"""

from datetime import UTC, datetime
from typing import Any

from data_ops.prompts.window import WindowPrompts
from storage.errors import ConfigError
from storage.records.nights import NightPlan
from storage.run import runs
from storage.store.object_store import ObjectStore
from tasks.recipes.continuation import SEEDS, prompts_end
from tasks.recipes.run_config import RunConfig
from tasks.recipes.stored_config import read_config


def of_night(store: ObjectStore, config: RunConfig, plan: NightPlan) -> dict[str, Any]:
    """Return the settings that the night replaces, by dotted key.

    Args:
        config: the recurring recipe, without them.

    Raises ConfigError where the champion's policies are not those of the recipe.
    """
    settings: dict[str, Any] = {"seed": (config.seed + plan.number) % SEEDS}
    return settings | _models(config, plan) | _prompts(store, config, plan)


def _models(config: RunConfig, plan: NightPlan) -> dict[str, Any]:
    if not plan.team:
        return {}
    if set(plan.team) != set(config.policies):
        raise ConfigError(
            f"the champion of {plan.name} has the policies {', '.join(plan.team)}, and the recipe "
            f"has {', '.join(config.policies)}; give the recipe the same policies, another name, "
            "or begin with the recipe's models (begin_with: recipe)"
        )
    return {
        f"policies.{policy}.model": {
            "run": member.run_id,
            "policy": policy,
            "version": member.version,
        }
        for policy, member in plan.team.items()
    }


def _prompts(store: ObjectStore, config: RunConfig, plan: NightPlan) -> dict[str, Any]:
    source = config.data.prompts
    if isinstance(source, WindowPrompts):
        bounds: dict[str, Any] = {"data.prompts.window.until": _iso(plan.until_s)}
        if plan.since_s is not None:
            bounds["data.prompts.window.since"] = _iso(plan.since_s)
        return bounds
    if plan.prompts_of is None:
        return {}
    before = runs.open_run(store, plan.prompts_of)
    if read_config(before).data.prompts != source:
        return {}  # the position is one of other prompts
    return {"data.start": dict(prompts_end(before))}


def _iso(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds")
