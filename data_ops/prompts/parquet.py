"""Rows of a Parquet file, in bounded memory however much text the file repeats.

    row group ──▶ batches, text still as dictionaries ──measure──▶ rows as plain data

Parquet stores repeated text once: a file of 600 bytes can hold gigabytes. Therefore each row's text
and values are counted before they are made, and rows are made only as they are taken.
"""

import logging
from collections.abc import Collection, Iterator
from typing import Any, TypeAlias

import numpy as np

from data_ops.prompts.parquet_chunks import Chunk, chunks
from data_ops.prompts.rows import RowsFile, Unreadable
from storage.errors import ConfigError
from storage.formats import json_values
from storage.records.types import Json

READ_BYTES = 2**27
"""Of a row group that are read at once, if its rows are of similar size."""
REPEATED_BYTES = 2**30
"""Of text that is read at once without a dictionary, if each value has all text of its column."""
ROWS_PER_BATCH = 1_000
BATCH_BYTES = 2**26
"""Text that is made at once; the rows of a batch with more are made one by one."""
TEXT_BYTES_MAX = 2**24
"""Of one row, as of a line of a JSONL file."""
MEMORY_BYTES_MAX = 2**32
"""Of all rows that are taken, as estimated with the two sizes below."""
COLUMNS_MAX = 4_096
"""Each name is compared with all columns of each row group."""
FOOTER_ENTRIES_MAX = 10_000
"""Of each list in the footer. Arrow follows nested columns by recursion, and ends the process at
somewhat more levels.
"""
ROW_BYTES, VALUE_BYTES = 512, 64
"""What one row and each of its values take besides text."""
DICTIONARY = frozenset({"RLE_DICTIONARY", "PLAIN_DICTIONARY"})
REPEATING = DICTIONARY | {"DELTA_BYTE_ARRAY"}
"""Encodings that store repeated text once; the latter stores what a value and the next share."""

Counts: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

log = logging.getLogger(__name__)


def read_rows(
    file: RowsFile, dates: Collection[str] = ()
) -> Iterator[tuple[int, Json | Unreadable]]:
    """Yield each row with its number (from 1); in place of a row that is too large or cannot be
    converted, why. Times in the columns `dates` become text.

    Raises ConfigError for a file that is not Parquet, and when the rows so far fill the memory.
    """
    import pyarrow as pa

    number = 0
    try:
        for number, row in enumerate(_rows(file, dates), start=1):
            yield number, row
    except (pa.ArrowMemoryError, MemoryError):
        raise ConfigError(
            f"{file}: the rows after row {number} do not fit in the memory of this "
            "machine; set prompts.limit, or write the file in smaller row groups"
        ) from None
    except RecursionError:
        raise ConfigError(
            f"{file} has a column that is nested too deep to be read; at most "
            f"{json_values.DEPTH_MAX} levels can be stored: write the file without it"
        ) from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        limit = (
            f", with at most {FOOTER_ENTRIES_MAX:,} row groups and nested columns"
            if "Exceeded size limit" in str(error)
            else ""
        )
        raise ConfigError(
            f"{file} cannot be read as Parquet ({str(error).strip()}); write the file again{limit}"
        ) from error


def _rows(file: RowsFile, dates: Collection[str]) -> Iterator[Json | Unreadable]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(file.path, thrift_container_size_limit=FOOTER_ENTRIES_MAX) as opened:
        metadata, schema = opened.metadata, _plain_schema(opened.schema_arrow, file, dates)
    memory_bytes = num_rows = 0
    for group in range(metadata.num_row_groups):
        for batch in _batches(file, metadata, group, schema.names):
            for row, row_bytes in _converted(_without_times(batch, schema), schema):
                memory_bytes += row_bytes
                if memory_bytes > MEMORY_BYTES_MAX:
                    raise ConfigError(
                        f"{file}: more than {num_rows:,} rows take more than "
                        f"{MEMORY_BYTES_MAX / 2**30:g} GiB of memory; set prompts.limit to at "
                        f"most {num_rows}, or correct the file"
                    )
                num_rows += 1
                yield row


def _batches(file: RowsFile, metadata: Any, group: int, names: list[str]) -> Iterator[Any]:
    """Yield these columns of a row group: text that is stored as a dictionary stays one.

    Arrow has no dictionary of 2^31 bytes, and none of a chunk that is partly in another encoding:
    the rest of such a group is read without dictionaries, few rows at a time.
    """
    import pyarrow as pa

    columns = chunks(file, metadata, group, names)
    dictionaries = [
        column.path
        for column in columns
        if column.is_text and not DICTIONARY.isdisjoint(column.encodings)
    ]
    num_read = 0
    try:
        for batch in _read(file, metadata, group, names, columns, dictionaries):
            yield batch
            num_read += batch.num_rows
    except (pa.ArrowNotImplementedError, pa.ArrowCapacityError):
        if not dictionaries:
            raise
        for batch in _read(file, metadata, group, names, columns, []):
            num_again = min(num_read, batch.num_rows)
            num_read -= num_again
            yield batch.slice(num_again)


def _read(
    file: RowsFile,
    metadata: Any,
    group: int,
    names: list[str],
    columns: list[Chunk],
    dictionaries: list[str],
) -> Iterator[Any]:
    """Yield batches of a bounded size. Arrow copies the dictionaries into each: few are best."""
    import pyarrow.parquet as pq

    num_rows = metadata.row_group(group).num_rows
    group_bytes = repeated_bytes = 1
    for column in columns:
        group_bytes += 8 * column.num_values
        if column.path not in dictionaries:
            group_bytes += column.num_bytes
            if column.is_text and not REPEATING.isdisjoint(column.encodings):
                values_per_row = max(column.num_values // max(num_rows, 1), 1)
                value_bytes = min(column.num_bytes, TEXT_BYTES_MAX)
                repeated_bytes += value_bytes * values_per_row
    batch_rows = min(READ_BYTES * num_rows // group_bytes, REPEATED_BYTES // repeated_bytes)
    with pq.ParquetFile(file.path, metadata=metadata, read_dictionary=dictionaries) as opened:
        for batch in opened.iter_batches(
            int(np.clip(batch_rows, 1, max(num_rows, 1))),
            row_groups=[group],
            columns=names,
            use_threads=False,
        ):
            yield batch.select(names)


def _plain_schema(schema: Any, file: RowsFile, dates: Collection[str]) -> Any:
    """Return the schema of the columns whose types JSON has: orders store prompts as JSON.

    The columns `dates` with times are text in it.
    """
    import pyarrow as pa

    if len(schema) > COLUMNS_MAX:
        raise ConfigError(
            f"{file} has {len(schema):,} columns, and at most {COLUMNS_MAX:,} are read; write the "
            "file with those of the prompts alone"
        )
    for index, column in enumerate(schema):
        if column.name in dates and (
            pa.types.is_timestamp(column.type) or pa.types.is_date(column.type)
        ):
            schema = schema.set(index, column.with_type(pa.string()))

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
        raise ConfigError(f"{file} has the column {twice[0]!r} twice; keep one")
    dropped = {column.name: column.type for column in schema if not plain(column.type)}
    if len(dropped) == len(names):
        types = ", ".join(f"{name!r} {kind}" for name, kind in dropped.items())
        raise ConfigError(
            f"{file} has no column with a type that JSON has (found "
            f"{types or 'no column'}); write its text as string"
        )
    if dropped:
        log.warning(
            "%s: columns %s are left out, because JSON cannot hold their types",
            file,
            ", ".join(map(repr, dropped)),
        )
    return pa.schema([column for column in schema if column.name not in dropped])


def _without_times(batch: Any, schema: Any) -> Any:
    """Return the batch with those columns as text that are text in `schema` alone."""
    import pyarrow as pa

    for index, column in enumerate(batch.schema):
        if pa.types.is_timestamp(column.type):
            utc = batch.column(index).cast(pa.timestamp(column.type.unit, column.type.tz and "UTC"))
            batch = batch.set_column(index, schema.field(index), utc.cast(pa.string()))
        elif pa.types.is_date(column.type):
            batch = batch.set_column(
                index, schema.field(index), batch.column(index).cast(pa.string())
            )
    return batch


def _converted(batch: Any, schema: Any) -> Iterator[tuple[Json | Unreadable, int]]:
    """Yield the rows of a batch as plain data, and the memory that each takes.

    `schema` is that of the batch without dictionaries, of which rows are made much faster.
    """
    rows = batch.to_struct_array()
    text, values = _row_sizes(rows)
    values -= 1  # the row itself
    for start in range(0, len(rows), ROWS_PER_BATCH):
        part = slice(start, start + ROWS_PER_BATCH)
        yield from _converted_part(rows[part], schema, text[part], values[part])


def _converted_part(
    rows: Any, schema: Any, text: Counts, values: Counts
) -> Iterator[tuple[Json | Unreadable, int]]:
    sizes = (text + VALUE_BYTES * values + ROW_BYTES).tolist()
    too_large = (text > TEXT_BYTES_MAX) | (values > json_values.VALUES_MAX)
    if not too_large.any() and text.sum() <= BATCH_BYTES:
        try:
            plain = _alone(rows).cast(schema).to_pylist()
        except ValueError:  # text that is not UTF-8: convert row by row to find it
            pass
        else:
            yield from zip(plain, sizes, strict=True)
            return
    for index, row_bytes in enumerate(sizes):
        if too_large[index]:
            yield _too_large(int(text[index]), int(values[index])), ROW_BYTES
            continue
        try:
            (row,) = _alone(rows[index : index + 1]).cast(schema).to_pylist()
            yield row, row_bytes
        except ValueError as error:
            yield Unreadable(f"not readable ({error})"), ROW_BYTES


def _alone(rows: Any) -> Any:
    """Return a slice as a batch without the rows behind it, whose lists a cast would convert too.

    Dictionaries are not copied.
    """
    import pyarrow as pa

    return pa.RecordBatch.from_struct_array(pa.concat_arrays([rows, rows[:0]]))


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
    elif pa.types.is_dictionary(kind):
        _check_indices(array)
        if len(array.dictionary):
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


def _check_indices(array: Any) -> None:
    """Raise ArrowInvalid for an index outside the dictionary: Arrow checks none when it reads them,
    and a cast would read other memory.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    num_texts, used = len(array.dictionary), pc.min_max(array.indices).as_py()
    if used["max"] is not None and not 0 <= used["min"] <= used["max"] < num_texts:
        raise pa.ArrowInvalid(
            f"values {used['min']} to {used['max']} of a dictionary that has {num_texts}"
        )


def _running_sum(counts: Counts) -> Counts:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
