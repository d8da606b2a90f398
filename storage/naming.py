"""How a recipe names code: a built-in's name from one visible table, or an import path `package.module:Name`."""

import importlib
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from storage.errors import ConfigError

T = TypeVar("T")


def resolve(name: str, builtins: Mapping[str, T | str]) -> T:
    """What `name` means. A table's value may itself be an import path, so that heavy modules load only when used.

    ConfigError lists the known names, or says why the import failed.
    """
    if name in builtins:
        found = builtins[name]
        return cast(T, _load(found)) if isinstance(found, str) else found
    if ":" not in name:
        known = ", ".join(sorted(builtins)) or "none"
        raise ConfigError(f"{name!r} is not known; use one of {known}, or an import path like package.module:Name")
    return cast(T, _load(name))


def _load(path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        raise ConfigError(f"{path!r} is not an import path; write package.module:Name")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{path!r} cannot be imported: {error}; is its package installed, or on PYTHONPATH?") from error
    if not hasattr(module, attribute):
        raise ConfigError(f"the module {module_name} has no {attribute!r} (from {path!r})")
    return getattr(module, attribute)
