"""The folder of an exported model: which folders an export may replace, and how it is written.

A new folder, an empty one, or an earlier export may be written. An earlier export is recognized by
the metadata of its weights file. A folder with any other file is refused, so that an export deletes
nothing that it has not written.
"""

import json
import os
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from storage.errors import ConfigError
from storage.written_files import TEMPORARY_PREFIX, write_inside

WEIGHTS_FILE = "model.safetensors"
METADATA = {"format": "pt", "written_by": "astraflow export"}
"""Metadata of the weights file. transformers requires `format`, the framework of its tensors."""
_HEADER = json.dumps({"__metadata__": METADATA}, separators=(",", ":")).encode()[:-1]
"""Beginning of the weights file's header, after the 8 bytes with its length."""
_LENGTH_BYTES = 8


def refuse_foreign(folder: Path, names: Collection[str]) -> None:
    """Raise ConfigError for a folder that an export of the files `names` must not replace.

    OSError when the folder cannot be read.
    """
    if not folder.exists():
        return
    existing = sorted(name for name in os.listdir(folder) if not name.startswith(TEMPORARY_PREFIX))
    foreign = [name for name in existing if name not in names]
    if foreign:
        more = f" and {len(foreign) - 1} other files" if len(foreign) > 1 else ""
        raise ConfigError(
            f"{folder} contains {_shown(foreign[0])}{more}, which an export would not replace; "
            "name a new or an empty folder"
        )
    if existing and not _is_export(folder):
        raise ConfigError(
            f"{folder} contains {_shown(existing[0])}, which `astraflow export` has not "
            "written; name a new or an empty folder"
        )


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files, WEIGHTS_FILE among them, into `folder`; all of them or none.

    They are written to a temporary folder inside it and then renamed, the weights last: a folder
    without them cannot be loaded. OSError when the folder cannot be written.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{TEMPORARY_PREFIX}{uuid4().hex}"
    try:
        for name, body in files.items():
            write_inside(temporary, name, body)
        (folder / WEIGHTS_FILE).unlink(missing_ok=True)
        for name in sorted(files, key=lambda name: name == WEIGHTS_FILE):
            os.replace(temporary / name, folder / name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if is_new:
            with suppress(OSError):  # not empty: it was written
                folder.rmdir()


def _shown(name: str) -> str:
    r"""Return a file name with the bytes that are not UTF-8 escaped: `caf\xe9`."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _is_export(folder: Path) -> bool:
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(_LENGTH_BYTES + len(_HEADER))[_LENGTH_BYTES:] == _HEADER
