"""A user's own folder `tasks/` or `storage/` in the place of AstraFlow's package of that name.

AstraFlow's packages have plain names, and Python takes the first one of a name on its path:
PYTHONPATH or the working directory may have another. Imports would then fail, or find what somebody
else wrote. This module imports nothing of AstraFlow, and is called before anything that does.
"""

import importlib.util
import sys
from pathlib import Path

PACKAGES = ("storage", "data_ops", "rollout", "trainer", "tasks", "flows")
"""AstraFlow's packages beside this one."""
PROJECT = Path(__file__).resolve().parent.parent
EXIT_CONFIG = 2
"""That of the command line for errors that the user can correct."""


def fault(project: Path = PROJECT) -> str:
    """Return which file or folder Python finds instead of a package of the project; empty: none."""
    for name in PACKAGES:
        expected, found = project / name, _place_of(name)
        if found is None:
            return f"AstraFlow's package {expected} cannot be imported; install AstraFlow again"
        if found != expected:
            return (
                f"{found} is imported instead of AstraFlow's package {expected}; rename it, remove "
                "its folder from PYTHONPATH, or start AstraFlow in another folder"
            )
    return ""


def refuse() -> None:
    """End this process with a message when a package is shadowed."""
    if message := fault():
        print(message, file=sys.stderr)
        sys.exit(EXIT_CONFIG)


def _place_of(name: str) -> Path | None:
    """Return the folder of the package that Python would import, or the file of a module."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module without a spec, such as one that a test has put there
        return None
    if spec is None or spec.origin is None:
        places = list(spec.submodule_search_locations or ()) if spec else []
        return Path(places[0]).resolve() if places else None
    origin = Path(spec.origin).resolve()
    return origin.parent if origin.name == "__init__.py" else origin
