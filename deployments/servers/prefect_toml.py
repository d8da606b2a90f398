"""Leaves the server's address and auth string where Prefect's own commands look for them, so that a
second terminal needs no environment: `prefect deployment run astraflow/multi-policy`, typed inside
the clone, finds the stack.

Prefect reads its settings from the environment, then `.env`, then `prefect.toml` of the current
folder, then `pyproject.toml`, then the profile. A file that somebody else wrote is left alone.
"""

import os
from pathlib import Path

from deployments.paths import open_private

_OURS = "# Written by `astraflow up`, removed by `astraflow down`.\n"


def write(path: Path, api_url: str, auth_string: str) -> bool:
    """Writes a file that only its owner may read. Returns False, and writes nothing, where somebody
    else's file is.
    """
    if os.path.lexists(path) and not _is_ours(path):
        return False
    with open(path, "w", opener=open_private) as file:
        file.write(f'{_OURS}[api]\nurl = "{api_url}"\nauth_string = "{auth_string}"\n')
    return True


def remove(path: Path) -> None:
    if _is_ours(path):
        path.unlink(missing_ok=True)


def _is_ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return not path.is_symlink() and file.read(len(_OURS.encode())) == _OURS.encode()
    except OSError:
        return False
