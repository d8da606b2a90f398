"""An independent reader and writer of a store, written from `docs/format.md` only.

Nothing of the project's own decoding is used here.
"""

import hashlib
import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

ZEROS = b"0" * 32
WRITE_ID = "0123456789abcdef" * 2
OVERWRITTEN = ("leases/", "heartbeats/", "usage.json")
"""Begin of the keys of objects without a checksum."""


@dataclass(frozen=True)
class Stranger:
    """Read the folder of a store with json, Arrow, xxhash, hashlib and NumPy according to the page,
    and check every digest.
    """

    root: Path

    def json(self, key: str) -> Any:
        """The object's fields."""
        body = (self.root / key).read_bytes()
        fields = json.loads(body)
        assert fields["format"] == 1
        assert re.fullmatch("[0-9a-f]{32}", fields["write_id"])
        assert ("checksum" in fields) == (not key.startswith(OVERWRITTEN))
        if digits := fields.get("checksum", "").encode():
            assert xxhash.xxh3_128_hexdigest(body.replace(digits, ZEROS, 1)).encode() == digits
        return fields

    def arrow(self, key: str, kind: str) -> tuple[Any, dict[str, list[Any]]]:
        """The header, and the columns by name."""
        body = (self.root / key).read_bytes()
        reader = pa.ipc.open_file(body)
        metadata = reader.schema.metadata
        assert metadata[b"astraflow.format"] == b"1"
        assert metadata[b"astraflow.kind"] == kind.encode()
        digits = metadata[b"astraflow.digest"]
        first, last = body.find(digits), body.rfind(digits)
        assert first != last
        zeroed = body[:first] + ZEROS + body[first + 32 : last] + ZEROS + body[last + 32 :]
        assert xxhash.xxh3_128_hexdigest(zeroed) == digits.decode()
        return json.loads(metadata[b"astraflow.header"]), reader.read_all().to_pydict()

    def folder(self, key: str) -> tuple[Any, dict[str, NDArray[np.uint8]], dict[str, bytes]]:
        """Manifest, the bytes of every tensor, and the model's extra files."""
        manifest = self.json(f"{key}/manifest.json")
        bodies = {
            info["name"]: (self.root / key / info["name"]).read_bytes()
            for info in manifest["files"]
        }
        for info in manifest["files"]:
            body = bodies[info["name"]]
            assert info["name"].startswith(manifest["write_id"] + ".")
            assert info["num_bytes"] == len(body)
            assert info["digest"] == "sha256:" + hashlib.sha256(body).hexdigest()
        results: dict[str, NDArray[np.uint8]] = {}
        for name, info in manifest["tensors"].items():
            (length,) = struct.unpack_from("<Q", bodies[info["file"]])
            header, data = (
                json.loads(bodies[info["file"]][8 : 8 + length]),
                bodies[info["file"]][8 + length :],
            )
            assert (header[name]["dtype"], header[name]["shape"]) == (info["dtype"], info["shape"])
            start, end = header[name]["data_offsets"]
            assert info["digest"] == "xxh3_128:" + xxhash.xxh3_128_hexdigest(data[start:end])
            results[name] = np.frombuffer(data[start:end], np.uint8)
        holders = {info["file"] for info in manifest["tensors"].values()}
        others = {
            name.split(".", 1)[1]: body for name, body in bodies.items() if name not in holders
        }
        return manifest, results, others

    def write(self, key: str, body: bytes) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "xb") as file:
            file.write(body)


def weights_digest(manifest: Any) -> str:
    lines = [
        f"{name} {info['dtype']} {','.join(str(size) for size in info['shape'])} {info['digest']}\n".encode()
        for name, info in manifest["tensors"].items()
    ]
    return "sha256:" + hashlib.sha256(b"".join(sorted(lines))).hexdigest()


def sealed(fields: dict[str, Any]) -> bytes:
    """A created-once JSON object of `fields`, with a correct checksum."""
    others = {name: value for name, value in fields.items() if name != "checksum"}
    documented = {"format": 1, "write_id": WRITE_ID, **others, "checksum": ZEROS.decode()}
    before, after = json.dumps(documented).encode().rsplit(ZEROS, 1)
    return before + xxhash.xxh3_128_hexdigest(before + ZEROS + after).encode() + after
