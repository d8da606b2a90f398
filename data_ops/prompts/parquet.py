"""Rows of a Parquet file, in bounded memory however much text the file repeats.

    row group ──▶ batches, text still as dictionaries ──measure──▶ rows as plain data

Parquet stores repeated text once: a file of 600 bytes can hold gigabytes. Therefore each row's text
and values are counted before they are made, and rows are made only as they are taken.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from data_ops.prompts.rows import Unreadable
from storage.errors import ConfigError
from storage.formats import json_values
from storage.records.types import Json

ROWS_PER_BATCH = 1_000
BATCH_BYTES = 2**26
"""Text that is made at once; the rows of a batch with more are made one by one."""
TEXT_BYTES_MAX = 2**24
"""Of one row, as of a line of a JSONL file."""
MEMORY_BYTES_MAX = 2**32
"""Of all rows that are taken, as estimated with the two sizes below."""
ROW_BYTES, VALUE_BYTES = 512, 64
"""What one row and each of its values take besides text."""

Counts: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

log = logging.getLogger(__name__)


def read_rows(path: Path) -> Iterator[tuple[int, Json | Unreadable]]:
    """Yield each row with its number (from 1); in place of a row that is too large or cannot be
    converted, why.

    Raises ConfigError for a file that is not Parquet, and when the rows so far fill the memory.
    """
    import pyarrow as pa

    number = 0
    try:
        for number, row in enumerate(_rows(path), start=1):
            yield number, row
    except (pa.ArrowMemoryError, MemoryError):
        raise ConfigError(
            f"prompts.path {path}: the rows after row {number} do not fit in the memory of this "
            "machine; set prompts.limit, or write the file in smaller row groups"
        ) from None
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"prompts.path {path} cannot be read as Parquet ({error}); write the file again"
        ) from error


def _rows(path: Path) -> Iterator[Json | Unreadable]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        leaves = [file.schema.column(index) for index in range(len(file.schema))]
        text = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
        schema = _plain_schema(file.schema_arrow, path)
    memory_bytes = num_rows = 0
    with pq.ParquetFile(path, read_dictionary=text) as file:
        for group in range(file.num_row_groups):
            size = _rows_per_batch(file.metadata.row_group(group), path)
            batches = file.iter_batches(
                size, row_groups=[group], columns=schema.names, use_threads=False
            )
            for batch in batches:
                for row, row_bytes in _converted(batch.select(schema.names), schema):
                    memory_bytes += row_bytes
                    if memory_bytes > MEMORY_BYTES_MAX:
                        raise ConfigError(
                            f"prompts.path {path}: more than {num_rows:,} rows take more than "
                            f"{MEMORY_BYTES_MAX / 2**30:g} GiB of memory; set prompts.limit to at "
                            f"most {num_rows}, or correct the file"
                        )
                    num_rows += 1
                    yield row


def _rows_per_batch(group: Any, path: Path) -> int:
    """Return a number of rows whose columns take about BATCH_BYTES, if they are of similar size."""
    values = [group.column(index).num_values for index in range(group.num_columns)]
    if max(values, default=0) > json_values.VALUES_MAX * group.num_rows:
        raise ConfigError(
            f"prompts.path {path}: {group.num_rows:,} rows have {max(values):,} values in one "
            f"column, more than the limit of {json_values.VALUES_MAX:,} for each row; shorten the "
            "lists"
        )
    row_bytes = (group.total_byte_size + 8 * sum(values)) // max(group.num_rows, 1)
    return int(np.clip(BATCH_BYTES // max(row_bytes, 1), 1, ROWS_PER_BATCH))


def _plain_schema(schema: Any, path: Path) -> Any:
    """Return the schema of the columns whose types JSON has: orders store prompts as JSON."""
    import pyarrow as pa

    scalars = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_boolean,
    )
    nested = (pa.types.is_list, pa.types.is_large_list, pa.types.is_struct, pa.types.is_null)

    def plain(kind: Any) -> bool:
        if pa.types.is_dictionary(kind):
            return plain(kind.value_type)
        if any(check(kind) for check in nested):
            return all(plain(kind.field(i).type) for i in range(kind.num_fields))
        return any(check(kind) for check in scalars)

    names: list[str] = schema.names
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"prompts.path {path} has the column {twice[0]!r} twice; keep one")
    dropped = [column.name for column in schema if not plain(column.type)]
    if dropped:
        log.warning(
            "%s: columns %s are left out, because JSON cannot hold their types",
            path,
            ", ".join(dropped),
        )
    return pa.schema([column for column in schema if column.name not in dropped])


def _converted(batch: Any, schema: Any) -> Iterator[tuple[Json | Unreadable, int]]:
    """Yield the rows of a batch as plain data, and the memory that each takes.

    `schema` is that of the batch without dictionaries, of which rows are made much faster.
    """
    text, values = _row_sizes(batch.to_struct_array())
    values -= 1  # the row itself
    sizes = (text + VALUE_BYTES * values + ROW_BYTES).tolist()
    too_large = (text > TEXT_BYTES_MAX) | (values > json_values.VALUES_MAX)
    if not too_large.any() and text.sum() <= BATCH_BYTES:
        try:
            rows = batch.cast(schema).to_pylist()
        except ValueError:  # text that is not UTF-8: convert row by row to find it
            pass
        else:
            yield from zip(rows, sizes, strict=True)
            return
    for index, row_bytes in enumerate(sizes):
        if too_large[index]:
            yield _too_large(int(text[index]), int(values[index])), ROW_BYTES
            continue
        try:
            (row,) = batch.slice(index, 1).cast(schema).to_pylist()
            yield row, row_bytes
        except ValueError as error:
            yield Unreadable(f"not readable ({error})"), ROW_BYTES


def _too_large(text: int, values: int) -> Unreadable:
    return Unreadable(
        f"{text:,} bytes of text and {values:,} values, more than the limits of "
        f"{TEXT_BYTES_MAX:,} bytes and {json_values.VALUES_MAX:,} values"
    )


def _row_sizes(array: Any) -> tuple[Counts, Counts]:
    """Return the bytes of text and the number of values in each element of an Arrow array.

    A dictionary's text is counted at each use, which is how often plain data has it.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    text, values = np.zeros(len(array), np.int64), np.ones(len(array), np.int64)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        text = pc.fill_null(pc.binary_length(array), 0).to_numpy().astype(np.int64)
    elif pa.types.is_dictionary(kind) and len(array.dictionary):
        text, values = (
            counts[pc.fill_null(array.indices, 0).to_numpy()]
            for counts in _row_sizes(array.dictionary)
        )
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        ends = array.offsets.to_numpy()
        inner_text, inner_values = map(_running_sum, _row_sizes(array.values))
        text = inner_text[ends[1:]] - inner_text[ends[:-1]]
        values += inner_values[ends[1:]] - inner_values[ends[:-1]]
    elif pa.types.is_struct(kind):
        for index in range(kind.num_fields):
            field_text, field_values = _row_sizes(array.field(index))
            text, values = text + field_text, values + field_values
    return text, values


def _running_sum(counts: Counts) -> Counts:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
