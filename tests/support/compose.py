"""The containers of `docker/compose.yaml` as data, with the variables of `docker/.env` filled in."""

import re
import runpy
from collections.abc import Mapping
from typing import Any

import yaml

from tests.support.checkout import ROOT

FOLDER = ROOT / "docker"
VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)(?::[?-][^}]*)?\}")


def new_env() -> dict[str, str]:
    """The variables that `docker/new_env.py` writes."""
    write = runpy.run_path(str(FOLDER / "new_env.py"))["new_env"]
    lines = write((FOLDER / "env.example").read_text()).splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def compose(env: Mapping[str, str], name: str = "compose.yaml") -> dict[str, Any]:
    """The file, as Compose reads it; a variable that `env` lacks is an error."""
    text = VARIABLE.sub(lambda match: env[match[1]], (FOLDER / name).read_text())
    result: dict[str, Any] = yaml.safe_load(text)
    return result
