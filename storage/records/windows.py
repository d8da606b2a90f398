"""Records of data windows: which rows of which files a run was created with.

`run.json` has them, and `storage/run/prompt_windows.py` stores the rows.
"""

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from pydantic import Field

from storage.records.numbers import Count, UnixTime

WINDOWS_MAX = 16
"""Places of a run with a data window; a recipe has two. `verify` reads the rows of each."""
Sha256: TypeAlias = Annotated[str, Field(pattern=r"\Asha256:[0-9a-f]{64}\z")]
"""`sha256:` and 64 hex digits; part of a key."""


@dataclass(frozen=True, kw_only=True)
class WindowFile:
    """One file that was read. Example: `WindowFile(name="s3://bucket/feedback/1.jsonl",
    num_bytes=812, modified_s=1700000000.0, digest="sha256:…", rows=4)`.
    """

    name: str
    """Absolute path, or address without query."""
    num_bytes: Count
    modified_s: UnixTime
    digest: Sha256
    """Of the bytes that were read."""
    rows: Count
    """Rows of it that are in the window."""


@dataclass(frozen=True, kw_only=True)
class PromptWindow:
    """The rows of one place of a recipe, such as `data.prompts`, frozen when the run was created.

    A row is in the window if since ≤ date < until.
    """

    since_s: UnixTime | None
    """None: no lower bound."""
    until_s: UnixTime | None
    """None: no upper bound."""
    date_column: str | None
    """Column with the date of a row; None: the modification time of its file."""
    files: tuple[WindowFile, ...]
    """The files that were read, sorted by name."""
    rows: Count
    """Rows in the frozen object."""
    digest: Sha256
    """Of the frozen object, whose key has the same digits: `prompts/{digits}.arrow`."""
