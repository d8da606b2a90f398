"""A policy whose versions are a base model of one layer, and an adapter that changes."""

import torch

from storage.records.weights import HostTensor, StoredAdapter
from storage.store.object_store import ObjectStore
from storage.weights import publisher
from storage.weights.manifests import LoadedWeights
from trainer.engines.torch.host_tensors import to_host

LORA = StoredAdapter(kind="lora", rank=2, alpha=3.0)
W, A, B = "l.weight", "l.lora_A.weight", "l.lora_B.weight"


def drawn(dtype: str = "BF16", seed: int = 0) -> dict[str, HostTensor]:
    """A layer [64, 5] with an adapter of rank 2, and a norm."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {W: (64, 5), A: (2, 5), B: (64, 2), "norm.weight": (5,)}
    return {
        name: to_host(torch.randn(shape, generator=generator), dtype)
        for name, shape in shapes.items()
    }


def publish_adapters(run: ObjectStore, num_versions: int = 3) -> dict[str, HostTensor]:
    """Publish the base model, then versions of which only A and B change; return the base."""
    base = {name: tensor for name, tensor in drawn().items() if name not in (A, B)}
    loaded = LoadedWeights(publisher.publish(run, "solver", 0, base), base)
    for version in range(1, num_versions):
        tensors = base | {name: drawn(seed=version)[name] for name in (A, B)}
        manifest = publisher.publish(run, "solver", version, tensors, base=loaded, adapter=LORA)
        loaded = LoadedWeights(manifest, tensors)
    return base
