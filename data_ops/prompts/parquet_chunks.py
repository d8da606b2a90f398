"""What the footer of a Parquet file says about the columns of a row group, before they are read.

Arrow ends the whole process when it is asked for the metadata of a column that it cannot decode,
such as an encrypted one. A reader reports the same fault as an error, so one is built first, over a
file of which nothing can be read.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_ops.prompts.rows import RowsFile
from storage.errors import ConfigError
from storage.formats import json_values

_BUFFER_BYTES = 4096
"""Any size: with a buffer, a reader checks all columns before it reads the first."""


@dataclass(frozen=True)
class Chunk:
    """One leaf of a column in a row group. Example: `Chunk("question", 300, 8_192, True, …)`."""

    path: str
    """Names of the column and of what is nested in it, joined by dots."""
    num_values: int
    num_bytes: int
    """Of the decompressed pages."""
    is_text: bool
    encodings: frozenset[str]


def chunks(file: RowsFile, metadata: Any, group: int, names: Sequence[str]) -> list[Chunk]:
    """Return the leaves of these columns of a row group, in the order of the file.

    Raises:
        ConfigError: the group has other columns than the file, or too many values for its rows.
        OSError, pyarrow.ArrowException: the metadata of a column cannot be decoded.
    """
    row_group, schema = metadata.row_group(group), metadata.schema
    if row_group.num_columns != len(schema):
        raise ConfigError(
            f"{file}: row group {group + 1} has {row_group.num_columns} columns, and "
            f"the file {len(schema)}; write the file again"
        )
    _check_decodable(file.path, metadata, group, names)
    starts = tuple(f"{name}." for name in names)
    read = [
        _chunk(leaf_path, row_group.column(index))
        for index, leaf_path in enumerate(schema.column(index).path for index in range(len(schema)))
        if f"{leaf_path}.".startswith(starts)
    ]
    num_values = max((chunk.num_values for chunk in read), default=0)
    if num_values > json_values.VALUES_MAX * row_group.num_rows:
        raise ConfigError(
            f"{file}: {row_group.num_rows:,} rows have {num_values:,} values in one "
            f"column, more than the limit of {json_values.VALUES_MAX:,} for each row; shorten the "
            "lists"
        )
    return read


def _chunk(leaf_path: str, column: Any) -> Chunk:
    return Chunk(
        path=leaf_path,
        num_values=column.num_values,
        num_bytes=column.total_uncompressed_size,
        is_text=column.physical_type == "BYTE_ARRAY",
        encodings=frozenset(column.encodings),
    )


class _NothingReadError(Exception):
    """All columns are decodable: the reader has begun to read their data."""


class _WithoutData(io.RawIOBase):
    """A file of some size of which nothing can be read."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._num_bytes}
        self._position = start[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        raise _NothingReadError


def _check_decodable(path: Path, metadata: Any, group: int, names: Sequence[str]) -> None:
    """Raise Arrow's error for a column whose metadata cannot be decoded."""
    import pyarrow.parquet as pq

    source = _WithoutData(path.stat().st_size)
    with pq.ParquetFile(
        source, metadata=metadata, buffer_size=_BUFFER_BYTES, pre_buffer=True
    ) as file:
        rows = file.iter_batches(1, row_groups=[group], columns=list(names), use_threads=False)
        try:
            next(rows, None)
        except _NothingReadError:
            return
