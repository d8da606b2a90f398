"""How a recipe names code: a built-in's name from one visible table, or an import path
`package.module:Name`.

    name ──▶ is the module one that may be imported? ──▶ import ──▶ is it a class with the methods of its kind? ──▶ the class

Importing a module runs it, and so does building what it defines: whoever writes a recipe, or a
`run.json` into the store, chooses among the modules that are installed where the services run.
ASTRAFLOW_IMPORT_ALLOW limits the choice. What was found is called only after it was proved to be a
class of its kind, and nothing here calls it.
"""

import importlib
import inspect
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from storage.errors import ConfigError
from storage.plain_names import quoted

ALLOW_VARIABLE = "ASTRAFLOW_IMPORT_ALLOW"
"""Packages and modules, joined by commas, whose classes a recipe may name; any that is installed
where it is not set.
"""
_PATH = re.compile(r"((?:[A-Za-z]\w*\.)*[A-Za-z]\w*):([A-Za-z]\w*)", re.ASCII)

T = TypeVar("T")


@dataclass(frozen=True)
class PluginKind:
    """What a recipe may name at one place. Example:
    `Kind("filter", Filter, page="docs/data_algorithms.md")`.
    """

    noun: str
    protocol: type
    """The class that is named must have its public methods, with as many arguments, and coroutines
    where it has them.
    """
    page: str
    """Where its contract is written down."""
    made_with: tuple[str, ...] = ()
    """What its constructor is given by position, before the arguments that the recipe names."""

    @property
    def wanted(self) -> str:
        methods = [
            f"{name}({', '.join(taken.parameters)})"
            for name, taken in _methods(self.protocol).items()
        ]
        last = " and ".join(methods[-2:])
        return f"a {self.noun} is a class with {', '.join([*methods[:-2], last])} ({self.page})"


def resolve(name: str, builtins: Mapping[str, T | str], kind: PluginKind, key: str = "") -> T:
    """The class that `name` means, not yet called. A table's value may itself be an import path, so
    that heavy modules load only when they are used.

    ConfigError, beginning with the recipe's `key`, lists the known names, or says why the import
    failed, or what was found where which class is wanted.
    """
    try:
        return cast(T, _resolved(name, builtins, kind))
    except ConfigError as error:
        if not key:
            raise
        raise ConfigError(f"{key}: {error}") from error


def constructor_fault(made: Any, kind: PluginKind, arguments: Mapping[str, Any]) -> str:
    """Why the class `made` cannot be built with these arguments; empty where it can, or where it
    does not tell.
    """
    try:
        taken = inspect.signature(made)
    except (TypeError, ValueError):
        return ""  # a class written in C
    try:
        taken.bind(*kind.made_with, **arguments)
    except TypeError as error:
        return str(error)
    return ""


def check_name(name: str, builtins: Mapping[str, Any]) -> None:
    """Raise ConfigError for a name that is neither in the table nor an import path that may be
    imported here. Imports nothing: its package may be installed on other machines only.
    """
    if name in builtins:
        return
    if ":" not in name:
        names = ", ".join(sorted(builtins)) or "none"
        raise ConfigError(
            f"{quoted(name)} is not known; use one of {names}, or an import path like "
            "package.module:Name"
        )
    _refuse_module(name)


def _resolved(name: str, builtins: Mapping[str, Any], kind: PluginKind) -> Any:
    check_name(name, builtins)
    if name in builtins:
        known = builtins[name]
        return _load(known) if isinstance(known, str) else known
    found = _load(name)
    try:
        wrong = _fault(found, kind)
    except Exception as error:  # a class of somebody else, whose attributes may be computed
        raise ConfigError(
            f"{name} cannot be used: it raised {type(error).__name__}: {str(error).strip()}"
        ) from error
    if wrong:
        raise ConfigError(f"{name} {wrong}; {kind.wanted}")
    return found


def _refuse_module(path: str) -> None:
    """ConfigError for an import path whose module may not be imported. Looks at the path alone."""
    module = _split(path)[0]
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise ConfigError(
            f"{path} is part of Python's standard library, which has nothing that a recipe names"
        )
    allowed = os.environ.get(ALLOW_VARIABLE)
    if allowed is not None and not any(
        module == one or module.startswith(f"{one}.")
        for one in map(str.strip, allowed.split(","))
        if one
    ):
        raise ConfigError(
            f"{path} is not imported: {ALLOW_VARIABLE} allows {allowed or 'nothing'} here; "
            "add its package there if you trust its code"
        )


def _split(path: str) -> tuple[str, str]:
    if (found := _PATH.fullmatch(path)) is None:
        raise ConfigError(
            f"{quoted(path)} is not an import path; write package.module:Name, where no part begins "
            "with an underscore"
        )
    return found[1], found[2]


def _load(path: str) -> Any:
    module_name, attribute = _split(path)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{path} cannot be imported: {error}; is its package installed, or on PYTHONPATH?"
        ) from error
    except (
        Exception,
        SystemExit,
    ) as error:  # the module is somebody else's program, which may end in any way
        raise ConfigError(
            f"{path} cannot be imported: its module raised {type(error).__name__}: {error}"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(
            f"the module {module_name} has no {attribute!r} (from {path!r})"
        ) from None
    except (
        Exception,
        SystemExit,
    ) as error:  # a module may import its parts when they are first asked for
        raise ConfigError(
            f"{path} cannot be imported: its module raised {type(error).__name__}: {error}"
        ) from error


def _fault(found: Any, kind: PluginKind) -> str:
    """What is wrong with what a path leads to; empty for a class of the kind."""
    if not isinstance(found, type):
        what = (
            "function"
            if inspect.isroutine(found)
            else "module"
            if inspect.ismodule(found)
            else type(found).__name__
        )
        return f"is a {what} and no class"
    methods = _methods(kind.protocol)
    if missing := [name for name in methods if not callable(getattr(found, name, None))]:
        return f"has no {' and no '.join(missing)}"
    if inspect.isabstract(found) or getattr(found, "_is_protocol", False):
        return "is abstract"
    for name, wanted in methods.items():
        if wrong := _wrong_arguments(found, name, wanted) or _wrong_way(
            found, name, getattr(kind.protocol, name)
        ):
            return wrong
    return _wrong_constructor(found, kind)


def _methods(protocol: type) -> dict[str, inspect.Signature]:
    """The protocol's public methods, their arguments without `self`."""
    found: dict[str, inspect.Signature] = {}
    for name, member in vars(protocol).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            taken = inspect.signature(member)
            found[name] = taken.replace(parameters=list(taken.parameters.values())[1:])
    return found


def _wrong_arguments(found: type, name: str, wanted: inspect.Signature) -> str:
    own = (
        []
        if isinstance(inspect.getattr_static(found, name), staticmethod | classmethod)
        else ["self"]
    )
    try:
        taken = inspect.signature(getattr(found, name))
    except (TypeError, ValueError):
        return ""  # a method written in C
    try:
        taken.bind(*own, *wanted.parameters)
    except TypeError:
        return f"has a {name} that does not take ({', '.join(wanted.parameters)})"
    return ""


def _wrong_way(found: type, name: str, wanted: Any) -> str:
    """What is wrong with how a method gives its result: awaited or not. One that is no Python
    function does not tell.
    """
    method = getattr(getattr(found, name), "__func__", getattr(found, name))
    if inspect.iscoroutinefunction(wanted):
        if not inspect.isfunction(method) or inspect.iscoroutinefunction(inspect.unwrap(method)):
            return ""  # a decorator may hide a coroutine behind a function that returns it
        return f"has a {name} that cannot be awaited: write async def {name}"
    if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
        return f"has a {name} that would have to be awaited: write def {name} without async"
    return (
        f"has a {name} that is a generator: return the result"
        if inspect.isgeneratorfunction(method)
        else ""
    )


def _wrong_constructor(found: type, kind: PluginKind) -> str:
    """What is wrong with the arguments by position; those that a recipe names are judged by
    `unfit`.
    """
    try:
        taken = inspect.signature(found)
    except (TypeError, ValueError):
        return ""  # a class written in C
    try:
        taken.bind_partial(*kind.made_with)
    except TypeError:
        return f"cannot be built as {found.__name__}({', '.join(kind.made_with)})"
    return ""
