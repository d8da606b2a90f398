"""Frozen rows of data windows as Arrow files, named after the digest of their bytes.

    run.json  windows.{place}.digest ──▶ prompts/{sha256}.arrow     created before run.json

The same rows give the same bytes, so a creation that is repeated after a crash finds its own
object. Other rows have another key: `run.json` alone says which object is the run's.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from storage import layout
from storage.errors import ConfigError, ConflictError, CorruptError, NotFoundError
from storage.formats import arrow_files
from storage.formats.arrow_sizes import ROWS_MAX
from storage.formats.json_objects import dump, num_values, parse
from storage.formats.safetensors import file_digest
from storage.records.rollouts import Prompt
from storage.records.windows import PromptWindow
from storage.run import orders
from storage.store.object_store import ObjectStore, read_twice

KIND = "prompts"
SCHEMA = arrow_files.schema_of({"id": arrow_files.DICTIONARY, "fields": arrow_files.DICTIONARY})
"""The fields of a prompt are a JSON object."""
TEXT_BYTES_MAX = 2**30
"""Of the ids and fields of all rows that are written: they are in memory at once, several times."""
TEXT_MIN, TEXT_PER_BYTE = 2**25, 256
"""Characters of all rows together: so many in any case, and so many for each byte of the object, up
to `TEXT_BYTES_MAX`. Rows may share a text, and each of its characters may take four bytes.
"""
VALUES_MIN, VALUES_PER_BYTE = 2**21, 16
"""JSON values of all rows together: so many in any case, and so many for each byte of the object.
An evaluation has all of them in memory at once, 64 to 270 bytes each; rows may share a text, which
the object has once. Rows with ids of their own have some ten bytes each, if nothing else.
"""


@dataclass(frozen=True)
class FrozenPrompts:
    """The rows of a data window, in its order."""

    key: str
    """Of the object, for errors."""
    ids: Sequence[str]
    fields: Sequence[str]
    """[N] JSON objects."""

    def prompt(self, index: int) -> Prompt:
        """Return one prompt. CorruptError for fields that are no JSON object, or cannot be stored
        again (NaN, too many levels).
        """
        label = f"{self.key}, row {index},"
        prompt = Prompt(self.ids[index], parse(self.fields[index].encode(), label))
        if fault := orders.fault_of(prompt):
            raise CorruptError(f"{label} cannot be a prompt: {fault}")
        return prompt


def create(run: ObjectStore, prompts: Sequence[Prompt]) -> str:
    """Store the prompts, unless they are stored already, and return their digest.

    Raises:
        ConfigError: they are too large for one object.
        CorruptError: the object of these prompts exists with other bytes.
    """
    ids = [prompt.id for prompt in prompts]
    fields = [dump(prompt.fields) for prompt in prompts]
    num_bytes = sum(map(len, fields)) + sum(len(each.encode()) for each in ids)
    if len(prompts) > ROWS_MAX or num_bytes > TEXT_BYTES_MAX:
        raise ConfigError(
            f"{len(prompts):,} rows of {num_bytes:,} bytes are too many for one object, which has "
            f"at most {ROWS_MAX:,} rows and {TEXT_BYTES_MAX:,} bytes; set limit, or a shorter "
            "window"
        )
    texts = [each.decode() for each in fields]
    body = arrow_files.encode(SCHEMA, {"id": ids, "fields": texts}, KIND, {})
    try:
        _check_size(ids, texts, body)
    except CorruptError as error:
        raise ConfigError(f"{error}; set limit, or a shorter window") from error
    digest = file_digest(body)
    key = layout.prompts(digest)
    try:
        run.create(key, body)
    except ConflictError as error:
        raise CorruptError(
            f"{run.url}/{key} is damaged: its bytes do not have the digest in its name; delete it"
        ) from error
    return digest


def read(run: ObjectStore, window: PromptWindow) -> FrozenPrompts:
    """Read the rows of a window. CorruptError, with the key, where they are missing, have another
    digest, or are not as many as `run.json` says.
    """
    key = layout.prompts(window.digest)
    return read_twice(lambda: _decoded(run, key, window))


def _decoded(run: ObjectStore, key: str, window: PromptWindow) -> FrozenPrompts:
    try:
        body = run.get(key)
    except NotFoundError as error:
        raise CorruptError(
            f"{run.url}/{key} is missing: it has the prompts with which the run was created; put "
            "it back from a copy"
        ) from error
    if file_digest(body) != window.digest:
        raise CorruptError(
            f"{run.url}/{key} does not have the digest {window.digest}, which {layout.RUN} names; "
            "put it back from a copy"
        )
    try:
        table, _ = arrow_files.decode(body, SCHEMA, KIND)
    except CorruptError as error:
        raise CorruptError(f"{run.url}/{key}: {error}") from error
    ids, fields = arrow_files.strings(table, "id"), arrow_files.strings(table, "fields")
    if len(ids) != window.rows or not ids:
        raise CorruptError(
            f"{run.url}/{key} has {len(ids)} rows; {layout.RUN} says {window.rows}, at least one"
        )
    try:
        _check_size(ids, fields, body)
    except CorruptError as error:
        raise CorruptError(f"{run.url}/{key}: {error}") from error
    return FrozenPrompts(key, ids, fields)


def _check_size(ids: Sequence[str], fields: Sequence[str], body: bytes) -> None:
    """Refuse rows that share their texts so often that they take much more than their object."""
    text_max = min(TEXT_BYTES_MAX, max(TEXT_MIN, TEXT_PER_BYTE * len(body)))
    if (num_characters := sum(map(len, ids)) + sum(map(len, fields))) > text_max:
        raise CorruptError(
            f"{len(fields):,} rows have {num_characters:,} characters together in {len(body):,} "
            f"bytes; at most {text_max:,} are read"
        )
    values_max = max(VALUES_MIN, VALUES_PER_BYTE * len(body))
    num_rows = Counter(fields)
    for enough in (values_max, 0):  # an upper bound suffices mostly; the exact number takes longer
        found = sum(n * num_values(text.encode(), enough) for text, n in num_rows.items())
        if found <= values_max:
            return
    raise CorruptError(
        f"{len(fields):,} rows have {found:,} JSON values together in {len(body):,} bytes; at most "
        f"{values_max:,} are read"
    )
