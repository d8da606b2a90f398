"""The work pools as data: `deployments/pools.yaml`, or a user's file with the same fields.

rollout:
  type: kubernetes
  concurrency: 16
  environment: {HF_HUB_OFFLINE: "1"}
  job_variables: {image: registry.example/astraflow:1.0, namespace: training}
  regions: {eu-west: {concurrency: 8}}
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from deployments.paths import PROJECT
from storage import plain_names
from storage.config_model import Count, Frozen
from storage.errors import ConfigError
from storage.formats import json_values
from storage.store.addresses import holds_credentials
from tasks.recipes import yaml_file

BUILT_IN: Final = PROJECT / "deployments" / "pools.yaml"
CONTROL, TRAINERS, ROLLOUT = "control", "trainers", "rollout"
NAMES: Final = (CONTROL, TRAINERS, ROLLOUT)
"""The pools that deployments name (`deployments.py`)."""
RESERVED: Final = frozenset(("command", "env", "stream_output"))
"""Job variables that AstraFlow sets itself."""
_SECRET = re.compile(
    r"(SECRET_ACCESS|SECRET|PRIVATE|API)[_-]?KEY|CLIENT[_-]?SECRET|PASSW(OR)?D|AUTH_STRING|TOKEN$",
    re.I,
)
"""In the name of an environment variable with a secret."""
Variable: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=200)]


class RegionQueue(Frozen):
    """The work queue of a region in the pool `rollout`."""

    concurrency: Count | None = None
    """Most flow runs of the region at a time; null: no limit."""


class Pool(Frozen):
    """One work pool."""

    description: str = ""
    type: str = "process"
    """A type of work pool that the Prefect server has, such as process, docker or kubernetes."""
    concurrency: Count | None = None
    """Most flow runs of the pool at a time; null: no limit."""
    environment: Mapping[Variable, str] = {}
    """Environment variables of every flow run; many users can read them: no secrets."""
    job_variables: Mapping[str, Any] = {}
    """Defaults of other variables of the pool's type: image, namespace, …"""
    regions: Mapping[str, RegionQueue] = {}
    """Of the pool `rollout`: the work queues with a limit; the others need no entry."""


_POOLS: Final = TypeAdapter(dict[str, Pool])


def load(path: Path = BUILT_IN) -> dict[str, Pool]:
    """Read a file of work pools; return them by name.

    Raises:
        ConfigError: the file is unreadable or has a mistake; the message names file, line and key.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(f"{path} is not a file; name a file of work pools")
    try:
        with path.open("rb") as opened:
            text = opened.read(yaml_file.BYTES_MAX + 1).decode()
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the name
        raise ConfigError(f"{path} cannot be read as a file of work pools: {error}") from None
    document = yaml_file.read(text, str(path))
    try:
        pools = _POOLS.validate_python(document.value or {})
    except ValidationError as error:
        first = error.errors()[0]
        keys = tuple(str(part) for part in first["loc"])
        raise _fault(path, document, keys, first["msg"]) from None
    for name, pool in pools.items():
        for keys, why in _mistakes(name, pool):
            raise _fault(path, document, keys, why)
    return pools


def _mistakes(name: str, pool: Pool) -> Iterator[tuple[yaml_file.KeyPath, str]]:
    """Yield the key and the fault of each mistake that the fields' types do not show."""
    if name not in NAMES:
        yield (name,), f"is no pool of AstraFlow; use {', '.join(NAMES)}"
    if fault := json_values.fault(pool.model_dump()):
        path, why = fault
        yield (name, *path.split(".")), why
        return
    if not pool.type.strip() or not pool.type.isprintable():
        yield (
            (name, "type"),
            f"{plain_names.quoted(pool.type)} cannot be a type of work pool: it is empty, or has "
            "characters that cannot be printed; write process, docker, kubernetes or another type "
            "that the Prefect server has, or leave it out",
        )
    texts = {"description": pool.description}
    for field, values in (("environment", pool.environment), ("job_variables", pool.job_variables)):
        texts |= {f"{field}.{variable}": value for variable, value in values.items()}
    for field, value in texts.items():
        if any("\0" in text for text in json_values.strings(value)):
            yield (name, *field.split(".")), "has a NUL, which no process and no database accepts"
    for variable in sorted(RESERVED & pool.job_variables.keys()):
        yield (name, "job_variables", variable), "is set by AstraFlow; for env, use `environment`"
    secret = (
        "is a secret, and many users can read a work pool; set it in the environment of the "
        "workers, or see ASTRAFLOW_STORE_SECRET in docs/deploying.md"
    )
    for variable, value in pool.environment.items():
        if _SECRET.search(variable) or holds_credentials(value):
            yield (name, "environment", variable), secret
    for variable, value in pool.job_variables.items():
        if _has_secret({variable: value}):
            yield (name, "job_variables", variable), secret
    if pool.regions and name != ROLLOUT:
        yield (name, "regions"), f"only {ROLLOUT} has regions"
    for region in pool.regions:
        if not plain_names.NAME.fullmatch(region):
            yield (name, "regions", region), "cannot be the name of a region"


def _has_secret(value: Any) -> bool:
    """Return whether a job variable has a text that is a secret: by its key, as the value of an
    environment variable in one of the forms of Docker and Kubernetes, or as an address.
    """
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            named = {**part, part["name"]: part.get("value")} if _is_name(part) else part
            if any(
                isinstance(text, str) and text and _SECRET.search(key)
                for key, text in named.items()
            ):
                return True
            pending += part.values()
        elif isinstance(part, list | tuple):
            pending += part
        elif isinstance(part, str):
            variable, separator, text = part.partition("=")
            if holds_credentials(part) or (separator and text and _SECRET.search(variable)):
                return True
    return False


def _is_name(part: Mapping[str, Any]) -> bool:
    return isinstance(part.get("name"), str)


def _fault(
    path: Path, document: yaml_file.Document, keys: yaml_file.KeyPath, why: str
) -> ConfigError:
    prefixes = (keys[:end] for end in range(len(keys), 0, -1))
    known = (document.lines[keys] for keys in prefixes if keys in document.lines)
    line = next(known, document.first_line)
    return ConfigError(f"{path}, line {line}: {'.'.join(keys) or 'the file'}: {why}")
