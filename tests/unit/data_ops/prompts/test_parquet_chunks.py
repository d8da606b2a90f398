"""Files whose footers or pages do not fit together are refused by name, and end no process."""

import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.parquet import encryption

from data_ops.prompts.parquet_chunks import chunks
from data_ops.prompts.path import FilePrompts
from data_ops.prompts.rows import RowsFile
from storage.errors import ConfigError

NUM_ROWS = 24


def table() -> pa.Table:
    return pa.table(
        {
            "question": [f"q{n % 3}" for n in range(NUM_ROWS)],
            "answer": [str(n) for n in range(NUM_ROWS)],
        }
    )


def refused(path: Path) -> str:
    """Return the message with which a file is refused, without the path."""
    with pytest.raises(ConfigError) as caught:
        FilePrompts(path=str(path)).stream()
    return str(caught.value).replace(str(path), "FILE")


class _Keys(encryption.KmsClient):  # type: ignore[misc]  # pyarrow is untyped
    """Keys without a key server."""

    def __init__(self, _: Any) -> None:
        super().__init__()

    def wrap_key(self, key: bytes, _: str) -> bytes:
        return base64.b64encode(key)

    def unwrap_key(self, key: bytes, _: str) -> bytes:
        return base64.b64decode(key)


def write_encrypted(path: Path, column: str) -> None:
    """Write a file of which one column is encrypted, and the footer is not."""
    properties = encryption.CryptoFactory(_Keys).file_encryption_properties(
        encryption.KmsConnectionConfig(),
        encryption.EncryptionConfiguration(
            footer_key="footer", column_keys={"column": [column]}, plaintext_footer=True
        ),
    )
    with pq.ParquetWriter(path, table().schema, encryption_properties=properties) as writer:
        writer.write_table(table())


@pytest.mark.parametrize("column", ["question", "answer"])
def test_an_encrypted_column_is_refused_and_does_not_end_the_process(
    column: str, tmp_path: Path
) -> None:
    write_encrypted(tmp_path / "a.parquet", column)
    assert refused(tmp_path / "a.parquet") == (
        "FILE cannot be read as Parquet (Cannot decrypt ColumnMetadata. "
        "FileDecryption is not setup correctly); write the file again"
    )


def test_an_encrypted_column_that_is_not_read_does_no_harm(tmp_path: Path) -> None:
    write_encrypted(tmp_path / "a.parquet", "answer")
    metadata = pq.ParquetFile(tmp_path / "a.parquet").metadata
    (chunk,) = chunks(RowsFile(tmp_path / "a.parquet", "a"), metadata, 0, ["question"])
    assert (chunk.path, chunk.num_values, chunk.is_text) == ("question", NUM_ROWS, True)


def test_an_index_beyond_its_dictionary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(table(), path, compression="none")
    body = path.read_bytes()
    indices = b"\x24\x49\x92"  # 0, 1, 2, 0, … of two bits each
    assert body.count(indices * 2) == 1
    path.write_bytes(body.replace(indices, b"\x27\x49\x92", 1))
    assert refused(path) == (
        "FILE cannot be read as Parquet (values 0 to 3 of a dictionary that has 3); "
        "write the file again"
    )


def test_a_name_of_a_column_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(table(), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"question", b"questio\xff"))
    assert "FILE cannot be read as Parquet ('utf-8' codec can't decode byte 0xff" in refused(path)


def test_a_row_group_with_other_columns_than_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(table(), path)
    metadata = pq.ParquetFile(path).metadata
    lying = SimpleNamespace(
        schema=metadata.schema, row_group=lambda group: SimpleNamespace(num_columns=3, num_rows=1)
    )
    with pytest.raises(ConfigError, match="row group 1 has 3 columns, and the file 2; write"):
        chunks(RowsFile(path, "a"), lying, 0, ["question"])
