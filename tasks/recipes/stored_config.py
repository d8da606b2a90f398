"""The configuration of a stored run, as this release understands it."""

from pydantic import ValidationError

from storage import layout
from storage.errors import CorruptError
from storage.records.types import Json
from storage.run import runs
from storage.store.object_store import ObjectStore
from tasks.recipes.run_config import RunConfig

FAULTS_SHOWN = 3


def read_config(run: ObjectStore) -> RunConfig:
    """CorruptError when `run.json` cannot be read, or holds a configuration that this release cannot run."""
    return config_of(runs.run_config(run), run)


def config_of(config: Json, run: ObjectStore) -> RunConfig:
    """The same of a configuration that was read already; `run` is named in the error."""
    try:
        found = RunConfig.model_validate(config)
        faults = [
            f"{name!r} is no name" for name in (*found.policies, *found.rollout.regions) if not layout.NAME.fullmatch(name)
        ]
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, one['loc'])) or 'config'}: {one['msg']}" for one in error.errors()]
    if faults:
        more = f", and {len(faults) - FAULTS_SHOWN} more" if len(faults) > FAULTS_SHOWN else ""
        raise CorruptError(
            f"the configuration in {run.url}/run.json does not fit this release: {'; '.join(faults[:FAULTS_SHOWN])}{more}; "
            "use the release that made the run"
        )
    return found
