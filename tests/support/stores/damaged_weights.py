"""Weights whose bytes differ from their manifest."""

from storage import layout
from storage.store.object_store import ObjectStore
from storage.weights import manifests


def spoil(run: ObjectStore, policy: str, version: int) -> None:
    """Change a byte of each tensor file of a version."""
    manifest = manifests.read_manifest(run, policy, version)
    for file in {info.file for info in manifest.tensors.values()}:
        key = f"{layout.weights(policy, version)}/{file}"
        body = run.get(key)
        run.put(key, body[:-1] + bytes([body[-1] ^ 1]))
