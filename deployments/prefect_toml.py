"""Leaves the server's address where Prefect's own commands look for it, so that a second terminal needs no environment:
`prefect deployment run astraflow/multi-policy`, typed inside the clone, finds the stack.

Prefect reads its settings from the environment, then `.env`, then `prefect.toml` of the current folder, then
`pyproject.toml`, then the profile. A file that somebody else wrote is left alone.
"""

from pathlib import Path

_OURS = "# Written by `astraflow up`, removed by `astraflow down`.\n"


def write(path: Path, api_url: str) -> bool:
    """Returns False, and writes nothing, when there is a file of somebody else's."""
    if path.exists() and not _is_ours(path):
        return False
    path.write_text(f'{_OURS}[api]\nurl = "{api_url}"\n')
    return True


def remove(path: Path) -> None:
    if _is_ours(path):
        path.unlink(missing_ok=True)


def _is_ours(path: Path) -> bool:
    try:
        return path.read_text().startswith(_OURS)
    except (OSError, UnicodeDecodeError):
        return False
