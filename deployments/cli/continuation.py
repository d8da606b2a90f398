"""The request of `astraflow continue`: a new run from the versions of another."""

from collections.abc import Sequence

from deployments.cli.run_launcher import RunRequest, check_deployment, new_run_id
from storage import layout
from storage.errors import ConfigError
from storage.run import runs
from storage.store.object_store import ObjectStore
from tasks.recipes import loader, yaml_file
from tasks.recipes.continuation import continuation, parse_versions
from tasks.recipes.source import parse_assignments
from tasks.recipes.stored_config import read_config

DEPLOYMENT = "astraflow/multi-policy"
"""Of a run that no deployment started."""


def prepare(
    store: ObjectStore,
    run_id: str,
    steps: int,
    words: Sequence[str],
    assignments: Sequence[str],
    new_id: str | None,
    *,
    with_optimizer: bool,
) -> RunRequest:
    """Return the checked request for a run that continues the run `run_id`.

    Args:
        words: versions, as `parse_versions` reads them.
        assignments: `KEY=VALUE`, which replace settings of the recipe. Other prompts are taken from
            their beginning.

    Raises ConfigError for a run, a version or a setting that cannot be used.
    """
    if new_id is not None:
        layout.run_prefix(new_id)  # ConfigError for an invalid run id
    run = runs.open_run(store, run_id)
    record, config = runs.read_run(run), read_config(run)
    versions = parse_versions(words, config.policies)
    data = continuation(run, steps, versions, with_optimizer=with_optimizer)
    overrides = parse_assignments(list(assignments))
    recipe = yaml_file.write(data)
    loaded = loader.load(recipe, overrides)
    if loaded.data.prompts != config.data.prompts:  # the position is one of the other prompts
        del data["data"]["start"]
        recipe = yaml_file.write(data)
        loaded = loader.load(recipe, overrides)
    deployment = record.deployment or DEPLOYMENT
    check_deployment(deployment)
    if "/" not in deployment:
        raise ConfigError(f"run {run_id} names the deployment {deployment!r}, without its flow")
    return RunRequest(
        deployment=deployment,
        run_id=new_id or new_run_id(loaded.name),
        recipe=recipe,
        overrides=overrides,
        config=loaded,
    )
