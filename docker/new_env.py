"""Write docker/.env from docker/env.example, with new random secrets: `python3 docker/new_env.py`.

It needs Python alone, and refuses to replace a file: the databases keep their first passwords.
"""

import os
import secrets
import sys
from pathlib import Path

MARK = "GENERATED"
SECRET_BYTES = 24


def new_env(example: str) -> str:
    """Return the text of `.env`; each secret is another one, of characters that URLs accept."""
    lines = (
        line.removesuffix(MARK) + secrets.token_hex(SECRET_BYTES) if _has_secret(line) else line
        for line in example.splitlines()
    )
    return "\n".join(lines) + "\n"


def main(folder: Path) -> None:
    """Write the file with mode 0600."""
    path = folder / ".env"
    text = new_env((folder / "env.example").read_text())
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        sys.exit(f"{path} exists; delete it only together with the volumes, which need its secrets")
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    print(f"wrote {path}")


def _has_secret(line: str) -> bool:
    return not line.startswith("#") and line.endswith(MARK)


if __name__ == "__main__":
    main(Path(__file__).resolve().parent)
