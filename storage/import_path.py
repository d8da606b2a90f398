"""Resolution of the classes that a recipe names: built-in names, or paths `package.module:Name`.

    name ──▶ module allowed? ──▶ import ──▶ class with the methods of its kind? ──▶ class

Importing a module runs its code: a person who writes a recipe, or a `run.json` into the store,
selects among the modules that are installed where the services run. ASTRAFLOW_IMPORT_ALLOW limits
the selection. Nothing that was imported is called here.
"""

import importlib
import inspect
import os
import re
import sys
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from storage.errors import ConfigError, TransientError
from storage.plain_names import quoted

ALLOW_VARIABLE = "ASTRAFLOW_IMPORT_ALLOW"
"""Packages and modules, joined by commas, whose classes a recipe may name; unset: all installed."""
_PATH = re.compile(r"((?:[A-Za-z]\w*\.)*[A-Za-z]\w*):([A-Za-z]\w*)", re.ASCII)
FOREIGN_ERRORS = (Exception, SystemExit, CancelledError)
"""What foreign code without `async` may raise for reasons of its own."""
_PASSED = (ConfigError, TransientError, MemoryError, ConnectionError, TimeoutError)

T = TypeVar("T")


@dataclass(frozen=True)
class PluginKind:
    """A kind of class that a recipe may name.

    Example: `PluginKind("filter", Filter, page="docs/extending/data_algorithms.md")`.
    """

    noun: str
    protocol: type
    """A class must have its public methods, with the same number of arguments, and coroutines for
    its coroutines.
    """
    page: str
    """Documentation of its contract."""
    constructor_args: tuple[str, ...] = ()
    """Positional arguments of the constructor, before the keyword arguments of the recipe."""

    @property
    def contract(self) -> str:
        """The contract in one clause, for errors: the methods and the documentation."""
        methods = [
            f"{name}({', '.join(signature.parameters)})"
            for name, signature in _methods(self.protocol).items()
        ]
        last = " and ".join(methods[-2:])
        return f"a {self.noun} is a class with {', '.join([*methods[:-2], last])} ({self.page})"


def resolve(name: str, builtins: Mapping[str, T | str], kind: PluginKind, key: str = "") -> T:
    """Return the class that a recipe names.

    Args:
        builtins: name → class, or its import path, so that a heavy module loads only if it is used.
        key: of the recipe, with which an error begins.

    Raises:
        ConfigError: the name is unknown, the import fails, or it is not a class of the kind.
    """
    try:
        return cast(T, _resolve(name, builtins, kind))
    except ConfigError as error:
        if not key:
            raise
        raise ConfigError(f"{key}: {error}") from error


def constructor_fault(cls: Any, kind: PluginKind, arguments: Mapping[str, Any]) -> str:
    """Return why a class cannot be built with the arguments; empty if it can, or if unknown."""
    try:
        signature = inspect.signature(cls)
    except (TypeError, ValueError):
        return ""  # a class written in C
    try:
        signature.bind(*kind.constructor_args, **arguments)
    except TypeError as error:
        return str(error)
    return ""


def find_class(path: str, kind: PluginKind, args: Mapping[str, Any]) -> Any:
    """Import a class of a kind and check, without calling it, that its constructor takes `args`.

    Raises ConfigError for another class, and for arguments that it does not take.
    """
    found: Any = resolve(path, {}, kind)
    if reason := constructor_fault(found, kind, args):
        raise ConfigError(f"{path} does not take args {dict(args)} ({reason}); correct them")
    return found


def message(error: BaseException) -> str:
    """Return the text of an exception of foreign code, also where the exception cannot give it."""
    try:
        return str(error).strip()
    except FOREIGN_ERRORS as broken:
        return f"its message cannot be read: __str__ raised {type(broken).__name__}"


def described(error: BaseException) -> str:
    """Return an exception of foreign code as a clause of a message.

    ValueError and TypeError are written as their text alone, others with their class.
    """
    text = message(error)
    is_plain = isinstance(error, TypeError | ValueError) and text
    return text if is_plain else f"{type(error).__name__}: {text}"


def construct(
    find: Callable[[], Any],
    name: str,
    args: Mapping[str, Any],
    keys: tuple[str, str],
    *passed: type[Exception],
) -> Any:
    """Make an object of the class `name` that `find` imports.

    Args:
        keys: the settings of the class and of its arguments.
        passed: further errors that are raised as they are.

    Raises:
        ConfigError: the class cannot be imported, or its constructor raises; begins with the
            setting at fault.
        TransientError, MemoryError, ConnectionError, TimeoutError: as the constructor raised them
            (`foreign_code`).
    """
    try:
        return find()(**args)
    except ConfigError as error:
        raise ConfigError(f"{keys[0]}: {error}") from error
    except FOREIGN_ERRORS as error:
        if isinstance(error, (*_PASSED, *passed)):
            raise
        raise ConfigError(f"{keys[1]}: {name} refuses {args}: {described(error)}") from error


@contextmanager
def foreign_code(where: str, *passed: type[Exception], advice: str = "") -> Iterator[None]:
    """Run code of the class that a recipe names by an import path.

    Args:
        where: the setting and what is called: `train.loss.path: prepare of my_losses:Cispo`.
        passed: further errors that are raised as they are.
        advice: what to do; the message ends with it.

    Raises:
        ConfigError: the code raised; begins with `where`.
        ConfigError, TransientError, MemoryError, ConnectionError, TimeoutError: as the code raised
            them. All but the first may be gone after a restart. The store's other errors are not
            raised: their handlers would react to an object of the run.
    """
    try:
        yield
    except FOREIGN_ERRORS as error:
        if isinstance(error, (*_PASSED, *passed)):
            raise
        raise ConfigError(f"{where} failed: {described(error)}{advice}") from error


def check_name(name: str, builtins: Mapping[str, Any]) -> None:
    """Raise ConfigError for a name that is neither built in nor an allowed import path.

    Imports nothing: the package may be installed on other machines only.
    """
    if name in builtins:
        return
    if ":" not in name:
        names = ", ".join(sorted(builtins)) or "none"
        raise ConfigError(
            f"{quoted(name)} is not known; use one of {names}, or an import path like "
            "package.module:Name"
        )
    _check_module(name)


def _resolve(name: str, builtins: Mapping[str, Any], kind: PluginKind) -> Any:
    check_name(name, builtins)
    if name in builtins:
        builtin = builtins[name]
        return _load(builtin) if isinstance(builtin, str) else builtin
    value = _load(name)
    try:
        fault = _fault(value, kind)
    except FOREIGN_ERRORS as error:  # its attributes may be computed
        raise ConfigError(
            f"{name} cannot be used: it raised {type(error).__name__}: {message(error)}"
        ) from error
    if fault:
        raise ConfigError(f"{name} {fault}; {kind.contract}")
    return value


def is_allowed(module: str) -> bool:
    """Return whether ASTRAFLOW_IMPORT_ALLOW lets a recipe choose code of a module."""
    allowed = os.environ.get(ALLOW_VARIABLE)
    return allowed is None or any(
        module == package or module.startswith(f"{package}.")
        for package in map(str.strip, allowed.split(","))
        if package
    )


def _check_module(path: str) -> None:
    """Raise ConfigError for an import path whose module may not be imported, by its name alone."""
    module = _split(path)[0]
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise ConfigError(
            f"{path} is part of Python's standard library, which has no class for a recipe"
        )
    if not is_allowed(module):
        allowed = os.environ[ALLOW_VARIABLE] or "nothing"
        raise ConfigError(
            f"{path} is not imported: {ALLOW_VARIABLE} allows {allowed} here; add its package "
            "there if you trust its code"
        )


def _split(path: str) -> tuple[str, str]:
    if (match := _PATH.fullmatch(path)) is None:
        raise ConfigError(
            f"{quoted(path)} is not an import path; write package.module:Name, where no part "
            "begins with an underscore"
        )
    return match[1], match[2]


def _load(path: str) -> Any:
    module_name, attribute = _split(path)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{path} cannot be imported: {error}; is its package installed, or on PYTHONPATH?"
        ) from error
    except FOREIGN_ERRORS as error:
        raise ConfigError(
            f"{path} cannot be imported: its module raised {type(error).__name__}: {message(error)}"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(
            f"the module {module_name} has no {attribute!r} (from {path!r})"
        ) from None
    except FOREIGN_ERRORS as error:  # a module may import its parts lazily
        raise ConfigError(
            f"{path} cannot be imported: its module raised {type(error).__name__}: {message(error)}"
        ) from error


def _fault(value: Any, kind: PluginKind) -> str:
    """Return why an imported value is not a class of the kind; empty if it is one."""
    if inspect.isroutine(value):
        return "is a function and no class"
    if inspect.ismodule(value):
        return "is a module and no class"
    if not isinstance(value, type):
        return f"is a {type(value).__name__} and no class"
    methods = _methods(kind.protocol)
    if missing := [name for name in methods if not callable(getattr(value, name, None))]:
        return f"has no {' and no '.join(missing)}"
    if inspect.isabstract(value) or getattr(value, "_is_protocol", False):
        return "is abstract"
    for name, signature in methods.items():
        if fault := _arguments_fault(value, name, signature) or _coroutine_fault(
            value, name, getattr(kind.protocol, name)
        ):
            return fault
    return _positional_fault(value, kind)


def _methods(protocol: type) -> dict[str, inspect.Signature]:
    """Return the signatures of the protocol's public methods, without `self`."""
    methods: dict[str, inspect.Signature] = {}
    for name, member in vars(protocol).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            signature = inspect.signature(member)
            methods[name] = signature.replace(parameters=list(signature.parameters.values())[1:])
    return methods


def _arguments_fault(cls: type, name: str, expected: inspect.Signature) -> str:
    """Return why a method does not accept the expected arguments; empty if it does."""
    is_bound = isinstance(inspect.getattr_static(cls, name), staticmethod | classmethod)
    try:
        signature = inspect.signature(getattr(cls, name))
    except (TypeError, ValueError):
        return ""  # a method written in C
    try:
        signature.bind(*([] if is_bound else ["self"]), *expected.parameters)
    except TypeError:
        return f"has a {name} that does not take ({', '.join(expected.parameters)})"
    return ""


def _coroutine_fault(cls: type, name: str, expected: Any) -> str:
    """Return why a method must, or must not, be a coroutine; empty if it is right or unknown."""
    method = getattr(getattr(cls, name), "__func__", getattr(cls, name))
    if inspect.iscoroutinefunction(expected):
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


def _positional_fault(cls: type, kind: PluginKind) -> str:
    """Return why the constructor does not accept the positional arguments; empty if it does."""
    try:
        signature = inspect.signature(cls)
    except (TypeError, ValueError):
        return ""  # a class written in C
    try:
        signature.bind_partial(*kind.constructor_args)
    except TypeError:
        return f"cannot be built as {cls.__name__}({', '.join(kind.constructor_args)})"
    return ""
