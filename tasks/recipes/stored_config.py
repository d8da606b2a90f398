"""The configuration of a stored run, migrated from earlier releases.

Earlier releases stored a section that selects one of several variants with the fields of all
variants:

    loss: {name: m2po, m2_threshold: 0.01, clip_low: 0.2, …}
    model: {tiny: null, path: null, hub: x}

`migrated` keeps the fields of the variant that the section selects.
"""

import copy
import hashlib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from storage import layout
from storage.errors import CorruptError
from storage.records.types import Json
from storage.run import runs
from storage.store.object_store import ObjectStore
from tasks.recipes import schema
from tasks.recipes.run_config import RunConfig

FAULTS_SHOWN = 3
KEY_READ_MAX = 1_000
"""Characters of a key of the stored configuration: pydantic copies it for each fault below it."""
KEY_MAX = 200
"""Characters of a dotted key: keys of a class's arguments may be long. MLflow takes 250."""


def read_config(run: ObjectStore) -> RunConfig:
    """Return the configuration of a run.

    Raises CorruptError for a `run.json` that cannot be read or that this release cannot run.
    """
    return config_of(runs.read_run_config(run), run)


def migrated(config: Json) -> Json:
    """Return a stored configuration in the form of this release.

    Settings of variants that a section does not select are removed: they had no effect. Any other
    setting that this release does not have stays, and is refused when the configuration is read.

    Raises CorruptError for a key of more than KEY_READ_MAX characters.
    """
    _check_keys(config)
    config = copy.deepcopy(config)
    for setting in schema.foreign(config):
        setting.remove()
    return config


def _check_keys(config: Json) -> None:
    pending: list[Any] = [config]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            longest = max(map(len, part), default=0)
            if longest > KEY_READ_MAX:
                raise CorruptError(
                    f"a key has {longest:,} characters; at most {KEY_READ_MAX:,} are read"
                )
            pending += part.values()
        elif isinstance(part, list):
            pending += part


def filled(config: Json) -> Json:
    """Return a stored configuration in the form of this release, with the defaults of new settings.

    A configuration that this release cannot run is returned unchanged.
    """
    try:
        return RunConfig.model_validate(migrated(config)).model_dump(mode="json")
    except ValidationError:
        return config


def comparable(config: Json) -> Json:
    """Return what must be equal when a run is started again: `filled`, without the budget."""
    return {key: value for key, value in filled(config).items() if key != "budget"}


def config_of(config: Json, run: ObjectStore) -> RunConfig:
    """`read_config` of a configuration that was read already; the error names `run`."""
    try:
        validated = RunConfig.model_validate(migrated(config))
        names = (*validated.policies, *validated.rollout.regions)
        faults = [f"{name!r} is no name" for name in names if not layout.NAME.fullmatch(name)]
    except ValidationError as error:
        faults = [
            f"{'.'.join(schema.without_tags(each['loc'])) or 'config'}: {each['msg']}"
            for each in error.errors()
        ]
    except CorruptError as error:
        faults = [str(error)]
    if faults:
        more = f", and {len(faults) - FAULTS_SHOWN} more" if len(faults) > FAULTS_SHOWN else ""
        raise CorruptError(
            f"the configuration in {run.url}/run.json does not fit this release: "
            f"{'; '.join(faults[:FAULTS_SHOWN])}{more}; "
            "use the release that made the run"
        )
    return validated


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings into dotted ones. Example: `{"a": {"b": 1}}` → `{"a.b": 1}`; lists
    stay whole, and of a long key the end is a digest.
    """
    flat: dict[str, Any] = {}
    for key, item in value.items():
        name = _shortened(f"{prefix}{key}")
        flat |= flatten(item, f"{name}.") if isinstance(item, Mapping) and item else {name: item}
    return flat


def _shortened(key: str) -> str:
    if len(key) <= KEY_MAX:
        return key
    return f"{key[:KEY_MAX]}-{hashlib.sha256(key.encode(errors='replace')).hexdigest()[:8]}"
