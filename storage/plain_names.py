"""Types of the names in stored objects that become parts of keys or of local paths.

    PartName       a policy, a member, a tag     letters, digits, '-' and '_'
    RunId          a run                         the same and '.'
    DataFileName   a file of a tensor folder     {write id}.{name}; no kind of file that is code

They are types of fields, so that no record with an invalid name is built: `json_objects.unseal`
raises CorruptError. Writers raise ConfigError. All other text of stored objects (ids of prompts,
names of tensors, notes, regions) is arbitrary, and never becomes a part of a path.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import islice
from pathlib import PurePosixPath
from typing import Annotated, TypeAlias
from uuid import uuid4

from pydantic import AfterValidator

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
BYTES_MAX = 255
"""Longest file name on the usual file systems, in UTF-8."""
MODEL_SUFFIXES = (".json", ".jinja", ".txt", ".model")
"""Suffixes of the extra files of a model: configuration, chat template, tokenizer. None is code."""
TENSOR_SUFFIX = ".safetensors"
_DATA_FILE = re.compile(r"[0-9a-f]{32}\.(.+)", re.DOTALL)
_SEPARATORS = frozenset("/\\")
_FORBIDDEN = frozenset('<>:"|?*')
_DEVICES = frozenset(
    {
        "CON",
        "PRN",
        "AUX",
        "NUL",
        *(f"{port}{number}" for port in ("COM", "LPT") for number in range(1, 10)),
    }
)
"""Names of devices on Windows, with any suffix."""
_SHOWN_MAX = 80
_LISTED_MAX = 20


def new_write_id() -> str:
    """Return 32 random hex digits, which make the body of a created-once object unique."""
    return uuid4().hex


def fault(name: str) -> str:
    """Return why `name` is not a plain file name; empty for a valid one."""
    if not name:
        return "is empty"
    if _SEPARATORS & set(name):
        return "has a separator of paths"
    if name[0] == ".":
        return "begins with a dot"
    if not name.isprintable():
        return "has characters that cannot be printed"
    if _FORBIDDEN & set(name):
        return f"has one of the characters {' '.join(sorted(_FORBIDDEN))}"
    if name[-1] in ". ":
        return "ends with a dot or a space"
    if name.partition(".")[0].rstrip().upper() in _DEVICES:
        return "is the name of a device on Windows"
    if len(name.encode()) > BYTES_MAX:
        return f"is longer than {BYTES_MAX} bytes"
    return ""


def model_file_fault(name: str) -> str:
    """Return why `name` is not valid for an extra file of a model; empty for a valid one."""
    if PurePosixPath(name).suffix not in MODEL_SUFFIXES:
        return (
            fault(name) or f"is of no kind that is data; those end with {', '.join(MODEL_SUFFIXES)}"
        )
    return fault(name)


def without_write_id(data_file: str) -> str:
    """Return the name of a data file without its write id: `0123….config.json` → `config.json`."""
    return data_file.partition(".")[2]


def quoted(name: str) -> str:
    """Return the name for a message: quoted, escaped, and truncated if it is long."""
    return repr(name if len(name) <= _SHOWN_MAX else f"{name[:_SHOWN_MAX]}…")


def listed(names: Iterable[str]) -> str:
    """Return names for a message: the first 20, each truncated if it is long."""
    shown = [*islice(names, _LISTED_MAX + 1)]
    words = [name if len(name) <= _SHOWN_MAX else f"{name[:_SHOWN_MAX]}…" for name in shown]
    return ", ".join(words[:_LISTED_MAX]) + (", …" if len(words) > _LISTED_MAX else "")


@lru_cache(maxsize=2**16)  # every tensor of a manifest names its file
def _data_file(name: str) -> str:
    if (match := _DATA_FILE.fullmatch(name)) is None:
        raise ValueError(
            f"{quoted(name)} is not the name of a data file, which begins with 32 hex digits and a "
            "dot"
        )
    plain = match[1]
    reason = fault(plain) if plain.endswith(TENSOR_SUFFIX) else model_file_fault(plain)
    if not reason and len(name.encode()) > BYTES_MAX:
        reason = f"is longer than {BYTES_MAX} bytes"
    if reason:
        raise ValueError(f"{quoted(name)} is not the name of a data file: {quoted(plain)} {reason}")
    return name


def _data_file_or_none(name: str) -> str:
    return _data_file(name) if name else name


def _part(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ValueError(f"{quoted(name)} is not a name of up to 100 letters, digits, '_' and '-'")
    return name


def _run_id(name: str) -> str:
    if not RUN_ID.fullmatch(name):
        raise ValueError(
            f"{quoted(name)} is not a run id of up to 100 letters, digits, '.', '_' and '-'"
        )
    return name


def _run_id_or_none(name: str) -> str:
    return _run_id(name) if name else name


PartName: TypeAlias = Annotated[str, AfterValidator(_part)]
RunId: TypeAlias = Annotated[str, AfterValidator(_run_id)]
RunIdOrNone: TypeAlias = Annotated[str, AfterValidator(_run_id_or_none)]
"""The empty string for none."""
DataFileName: TypeAlias = Annotated[str, AfterValidator(_data_file)]
DataFileNameOrNone: TypeAlias = Annotated[str, AfterValidator(_data_file_or_none)]
"""The empty string for none."""
