"""The recipe of a run that continues another: the same settings, from one of its versions.

models           versions of the other run, from which the new run's step 0 begins
steps            those of the new run, counted from 0, as its learning-rate schedule is
seed             the next one: the same seed would sample the same numbers again
prompts          go on behind the newest order of the other run that has a position
train.reference  the version that the new run begins with
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from data_ops.prompts.source import PromptPosition
from storage import layout
from storage.errors import ConfigError, CorruptError, NotFoundError
from storage.records.types import Json
from storage.run import orders, runs
from storage.store.object_store import ObjectStore
from tasks.base_models.origins import LATEST
from tasks.recipes import schema
from tasks.recipes.stored_config import read_config

log = logging.getLogger(__name__)

SEEDS = 2**63
"""Seeds are smaller than this."""


def continuation(
    run: ObjectStore, steps: int, versions: Mapping[str, str], *, with_optimizer: bool = False
) -> dict[str, Any]:
    """Return the recipe, as plain data, of a run of `steps` steps that continues `run`.

    Args:
        versions: policy → number, tag or `latest`, which is the default.
        with_optimizer: begin with the optimizers' moments, too.
    """
    config = read_config(run)
    data = config.model_dump(mode="json")
    for policy, settings in data["policies"].items():
        settings["model"] = {
            "run": runs.run_id(run),
            "policy": policy,
            "version": versions.get(policy, LATEST),
            "with_optimizer": with_optimizer,
        }
        if settings["train"]["schedule_steps"] == config.steps:  # it ended with the run
            settings["train"]["schedule_steps"] = None
        if settings["train"]["reference"] is not None:
            settings["train"]["reference"]["version"] = 0
    data["steps"], data["seed"] = steps, (config.seed + 1) % SEEDS
    data["data"]["start"] = prompts_end(run)
    # Defaults that a stored recipe has written out; what is in a section before the section.
    for path in sorted(schema.without_effect(data, config), key=len, reverse=True):
        _remove(data, path)
    return data


def prompts_end(run: ObjectStore) -> Json:
    """Return the position behind the prompts of the run's newest readable order whose cursor is
    one. Orders are listed: below a stray one of a high number any number may be missing.
    """
    for number in reversed(layout.numbers(run.list(f"{layout.ORDERS}/"), layout.order)):
        try:
            cursor = orders.read(run, number).cursor
        except (CorruptError, NotFoundError):
            continue  # the prompts of a damaged order are taken again
        try:
            return PromptPosition.model_validate(cursor, strict=True).model_dump(mode="json")
        except ValidationError:
            log.warning("order %d of %s has no position of prompts as its cursor", number, run.url)
    return PromptPosition().model_dump(mode="json")


def parse_versions(words: Iterable[str], policies: Iterable[str]) -> dict[str, str]:
    """Return policy → version from words such as `40`, `best` or `solver@best`.

    A word without a policy is that of all policies that no other word names. ConfigError for an
    unknown policy, and for two words of one policy.
    """
    known = list(policies)
    named: dict[str, str] = {}
    for text in words:
        policy, _, word = text.rpartition("@")
        if policy and policy not in known:
            raise ConfigError(
                f"--version {text} names none of the run's policies, which are {', '.join(known)}"
            )
        if policy in named:
            raise ConfigError(f"--version {text}: a version of {policy or 'all'} is given twice")
        named[policy] = word
    default = named.pop("", LATEST)
    return {policy: named.get(policy, default) for policy in known}


def _remove(data: dict[str, Any], path: tuple[str, ...]) -> None:
    section: Any = data
    for part in path[:-1]:
        section = section[int(part)] if isinstance(section, list) else section[part]
    del section[path[-1]]
