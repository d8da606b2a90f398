"""The terms of a stored run that `storage.verify` checks, read from its configuration.

Only the settings that `docs/format.md` names are read, so that runs of other releases can be
verified, too.
"""

from typing import Any

from storage import layout
from storage.errors import ConfigError, CorruptError, NotFoundError
from storage.records.numbers import QUANTITY_MAX
from storage.records.promotions import POLICIES_MAX
from storage.records.types import Json
from storage.run import runs
from storage.store.object_store import ObjectStore
from storage.verify.verify import RunTerms


def run_terms(run: ObjectStore) -> RunTerms:
    """Read the terms of a run.

    Raises:
        ConfigError: the run does not exist, or its `run.json` cannot be read or lacks a setting.
    """
    try:
        record = runs.read_run(run)
    except (NotFoundError, CorruptError) as error:
        raise ConfigError(
            f"{run.url} cannot be verified, because its {layout.RUN} cannot be read: {error}; put "
            "it back from a copy"
        ) from error
    config = record.config
    policies = _section(config.get("policies"), run, "policies")
    if len(policies) > POLICIES_MAX:
        raise ConfigError(
            f"{run.url} cannot be verified, because the config in its {layout.RUN} has "
            f"{len(policies):,} policies; a run has at most {POLICIES_MAX}"
        )
    return RunTerms(
        steps=_count(config.get("steps"), run, "steps"),
        max_staleness=_count(
            _section(config.get("data"), run, "data").get("max_staleness"),
            run,
            "data.max_staleness",
        ),
        batch_sizes={
            policy: _count(
                _section(settings, run, f"policies.{policy}").get("batch_size"),
                run,
                f"policies.{policy}.batch_size",
            )
            for policy, settings in policies.items()
        },
        origins=record.origins,
        windows=record.windows,
    )


def _section(value: Any, run: ObjectStore, key: str) -> Json:
    if isinstance(value, dict):
        return value
    raise ConfigError(
        f"{run.url} cannot be verified, because the config in its {layout.RUN} has no section "
        f"{key!r}"
    )


def _count(value: Any, run: ObjectStore, key: str) -> int:
    if type(value) is int and 0 <= value <= QUANTITY_MAX:
        return value
    raise ConfigError(
        f"{run.url} cannot be verified, because the config in its {layout.RUN} has no whole number "
        f"{key!r}"
    )
