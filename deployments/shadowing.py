"""What Python, Prefect and numba would take from a folder that is not AstraFlow's.

Packages: AstraFlow's have plain names, and Python takes the first one of a name on its path, so
PYTHONPATH or the working directory may have another `tasks/` or `storage/`. Imports would then
fail, or find what somebody else wrote.

Settings: Prefect and numba read files of the working directory. One may name a configuration of
logging, which calls any function, another a folder of pickled code: in a folder such as /tmp,
another user would run code.

This module imports nothing of AstraFlow, and is called before anything that does.
"""

import importlib.util
import os
import stat
import sys
from pathlib import Path

PACKAGES = ("storage", "data_ops", "rollout", "trainer", "tasks", "flows")
"""AstraFlow's packages beside this one."""
PROJECT = Path(__file__).resolve().parent.parent
SETTINGS = {
    "prefect.toml": "Prefect",
    ".env": "Prefect",
    "pyproject.toml": "Prefect",
    ".numba_config.yaml": "numba",
}
"""Files of the working directory with settings → the library that reads them."""
SHARED = (".env", "pyproject.toml")
"""Those that usually have settings of other programs."""
ROOT = 0
BYTES_MAX = 1_000_000
"""Of a file of another user that is searched for settings of Prefect."""
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


def foreign_settings(folder: Path, project: Path = PROJECT) -> str:
    """Return which file of another user would set a library up; empty: none.

    Files of root are trusted, and so is the project's folder: its owner can change the code.
    """
    for name, library in SETTINGS.items() if folder != project else ():
        path = folder / name
        if _is_foreign(path) and (name not in SHARED or _may_set_prefect(path)):
            return (
                f"{path} belongs to another user, and {library} would read its settings from it, "
                "which can run code; start AstraFlow in another folder"
            )
    return ""


def refuse() -> None:
    """End this process with a message when a package is shadowed, or settings are foreign."""
    if message := fault() or foreign_settings(_working_folder()):
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


def _working_folder() -> Path:
    try:
        return Path.cwd().resolve()
    except OSError:  # it was deleted
        return PROJECT


def _is_foreign(path: Path) -> bool:
    """Return whether the file, or a link in its place, is neither this user's nor root's."""
    try:
        owners = {path.lstat().st_uid, path.stat().st_uid}
    except OSError:  # not there, or a link to nothing
        return False
    return not owners <= {os.geteuid(), ROOT}


def _may_set_prefect(path: Path) -> bool:
    """Return whether a file contains a setting of Prefect; true where that cannot be seen."""
    import tomllib  # few commands start beside a file of another user

    about = path.stat()
    if not stat.S_ISREG(about.st_mode) or about.st_size > BYTES_MAX:
        return True
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".toml":
            return "PREFECT" in text.upper()
        tools = tomllib.loads(text).get("tool", {})
        return not isinstance(tools, dict) or "prefect" in tools
    except (OSError, ValueError, RecursionError):
        return True
