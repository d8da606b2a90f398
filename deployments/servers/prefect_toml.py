"""The file `prefect.toml`, in which Prefect's own command finds the local server.

With it, `prefect deployment run astraflow/multi-policy` needs no environment variables in a second
terminal in the clone. Prefect reads its settings from the environment, then `.env`, then
`prefect.toml` of the current folder, then `pyproject.toml`, then the profile. A file that the user
wrote is never changed.
"""

import os
from pathlib import Path

from deployments.paths import open_regular, private_file
from storage.errors import ConfigError

_HEADER = "# Written by `astraflow up`, removed by `astraflow down`.\n"


def write(path: Path, api_url: str, auth_string: str) -> bool:
    """Write a file with mode 0600. Return False, and write nothing, where the user has a file."""
    if os.path.lexists(path) and not _is_ours(path):
        return False
    with private_file(path) as file:
        file.write(f'{_HEADER}[api]\nurl = "{api_url}"\nauth_string = "{auth_string}"\n')
    return True


def remove(path: Path) -> None:
    """Delete the file, unless the user wrote it."""
    if _is_ours(path):
        path.unlink(missing_ok=True)


def _is_ours(path: Path) -> bool:
    try:
        with open(path, "rb", opener=open_regular) as file:
            return not path.is_symlink() and file.read(len(_HEADER.encode())) == _HEADER.encode()
    except (OSError, ConfigError):
        return False
