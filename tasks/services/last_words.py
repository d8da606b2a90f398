"""The end of the log of a process that died: a few short lines, as plain text and without secrets.

They are shown to everybody who may read Prefect's logs. The log was written by another process, on
any machine, and may contain whatever a model or a workflow wrote.
"""

import os
import re
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from storage.store.addresses import text_without_credentials
from tasks.terminal_text import plain

LOGS = "ASTRAFLOW_LOGS"
"""Environment variable with the folder of the local stack's logs."""
LINES_MAX = 12
LINE_MAX = 300
BYTES_READ = 32_000
"""Read from the end of a file."""
SECRET_MIN = 6
"""Characters of the shortest secret of the environment that is removed; a shorter one may be a part
of a word.
"""
HIDDEN = "…"

_SECRET_NAME = re.compile(r"SECRET|PASSWORD|TOKEN|API_KEY|ACCESS_KEY|AUTH_STRING|CREDENTIAL", re.I)
_ASSIGNED = re.compile(
    r"((?:secret|password|passwd|token|api[_-]?key|access[_-]?key(?:[_-]?id)?|auth[_-]?string"
    r"|authorization)[\"']?\s*[=:]\s*(?:(?:basic|bearer)\s+)?)[\"']?[^\s\"',;]+",
    re.I,
)
_AWS_KEY = re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{12,}")
_STATUS = re.compile(r"status code:? (-?\d{1,3})\b")


def of_file(flow_run_id: str) -> list[str]:
    """Return the end of the output of a flow run's process on this machine; empty without one."""
    folder = os.environ.get(LOGS)
    if not folder:
        return []
    try:
        with open(Path(folder) / "flows" / f"{flow_run_id}.log", "rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - BYTES_READ)
            file.seek(start)
            body = file.read(BYTES_READ)
    except OSError:
        return []
    if start:
        body = body.partition(b"\n")[2]  # of a line that is cut, a part of a secret may be left
    return shown(body.decode(errors="replace").splitlines())


def shown(lines: Iterable[str]) -> list[str]:
    """Return the last lines that are not empty, as they may be shown."""
    kept = [line for line in lines if line.strip()][-LINES_MAX:]
    return [_shortened(without_secrets(plain(line)).rstrip()) for line in kept]


def without_secrets(text: str) -> str:
    """Remove what looks like a secret, and every secret that this process was given."""
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= SECRET_MIN:
            text = text.replace(value, HIDDEN)
    text = _AWS_KEY.sub(HIDDEN, text)
    text = _ASSIGNED.sub(rf"\1{HIDDEN}", text)
    return text_without_credentials(text)


def exit_words(message: str) -> str:
    """Return Prefect's message about the end of a process, with the name of the signal that ended
    it.
    """
    text = _shortened(without_secrets(" ".join(plain(message).split())))
    status = _STATUS.search(text)
    if status is None:
        return text
    number = int(status[1])
    number = -number if number < 0 else number - 128
    with suppress(ValueError):
        name = signal.Signals(number).name
        return text if name in text else f"{text} ({name})"
    return text


def _shortened(text: str) -> str:
    return text if len(text) <= LINE_MAX else f"{text[:LINE_MAX]}…"
