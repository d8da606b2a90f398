"""Calls that a test looks at, and that are still made."""

from types import ModuleType
from typing import Any

import pytest


def first_arguments(patch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list[Any]:
    """Return a list that gets the first argument of each call of a function of `module`."""
    given: list[Any] = []
    function = getattr(module, name)

    def recorded(first: Any, *args: Any, **kwargs: Any) -> Any:
        given.append(first)
        return function(first, *args, **kwargs)

    patch.setattr(module, name, recorded)
    return given
