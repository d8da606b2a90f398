"""Objects with changed content and correct digests, so that only their content can be wrong."""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from storage import layout
from storage.formats import arrow_files
from storage.formats.json_objects import seal
from storage.formats.safetensors import file_digest, from_safetensors, to_safetensors
from storage.records.weights import HostTensor, Manifest
from storage.store.object_store import ObjectStore
from storage.weights import delta_store, manifests

ZEROS = "0" * 32
Change = Callable[[Any], object]


def resealed_text(text: str) -> bytes:
    """The JSON text of a created-once object, with ZEROS replaced by the correct checksum."""
    digits = xxhash.xxh3_128_hexdigest(text.encode())
    return text.replace(f'"checksum":"{ZEROS}"', f'"checksum":"{digits}"', 1).encode()


def resealed(body: bytes, change: Change) -> bytes:
    """The created-once JSON object with its fields changed."""
    fields = {**json.loads(body), "checksum": ZEROS}
    change(fields)
    return resealed_text(json.dumps(fields, separators=(",", ":")))


def rewritten(body: bytes, schema: Any, kind: str, change: Change) -> bytes:
    """The Arrow file with changed fields of its header."""
    table, text = arrow_files.decode(body, schema, kind)
    header = json.loads(text)
    change(header)
    return arrow_file(schema, [table.replace_schema_metadata(None)], kind, header)


def arrow_file(
    schema: Any,
    batches: list[Any],
    kind: str,
    header: object,
    compression: Any = "lz4",
) -> bytes:
    """An Arrow file with a correct digest. `compression`: a name, None, or a `pyarrow.Codec`."""
    place = b"f" * 31 + b"e"
    metadata = {
        b"astraflow.format": b"1",
        b"astraflow.kind": kind.encode(),
        b"astraflow.header": json.dumps(header).encode(),
        b"astraflow.digest": place,
    }
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(
        sink,
        schema.with_metadata(metadata),
        options=pa.ipc.IpcWriteOptions(compression=compression),
    ) as file:
        for batch in batches:
            file.write_batch(batch)
    body: bytes = sink.getvalue().to_pybytes()
    zeroed = body.replace(place, ZEROS.encode())
    return body.replace(place, xxhash.xxh3_128_hexdigest(zeroed).encode())


def safetensors_file(header: str, data: bytes = b"") -> bytes:
    """A file with this text as its header."""
    return struct.pack("<Q", len(header.encode())) + header.encode() + data


def replace_file(
    run: ObjectStore, policy: str, version: int, change: Callable[[bytes], bytes]
) -> Manifest:
    """Replace the first data file of a version, with correct digests of it and of the manifest."""
    manifest = manifests.read_manifest(run, policy, version)
    folder, (file, *others) = layout.weights(policy, version), manifest.files
    body = change(run.get(f"{folder}/{file.name}"))
    run.put(f"{folder}/{file.name}", body)
    changed = replace(
        manifest, files=(replace(file, num_bytes=len(body), digest=file_digest(body)), *others)
    )
    run.put(layout.manifest(folder), seal(changed))
    return changed


def replace_blob(
    run: ObjectStore, version: int, change: Callable[[bytes], bytes], policy: str = "solver"
) -> None:
    """Replace every change in the first file of a version in the same way."""

    def file(body: bytes) -> bytes:
        blobs = {
            name: change(entry.bits.tobytes()) for name, entry in from_safetensors(body).items()
        }
        return to_safetensors(
            {name: of_bytes(blob) for name, blob in blobs.items()}, delta_store.CODEC
        )

    replace_file(run, policy, version, file)


def of_bytes(blob: bytes) -> HostTensor:
    return HostTensor("U8", (len(blob),), np.frombuffer(blob, dtype=np.uint8))


def columns_of(rows: Mapping[str, Any], schema: Any) -> Any:
    return pa.RecordBatch.from_pydict(dict(rows), schema=schema)
