from dataclasses import replace

from storage import layout
from storage.run import shards
from storage.store.object_store import ObjectStore, open_store
from storage.weights import publisher, reader, traffic
from storage.weights.read_through import read_through_mirror
from tests.support.runs import builders
from tests.support.runs.builders import mirror_next


def test_only_bytes_of_weights_are_counted_by_policy(
    memory_store: ObjectStore,
) -> None:
    run = memory_store.sub("runs/weights")  # a name that resembles a part of the layout
    run, counted = traffic.counted(run)
    run.put("weights/solver/00000003/a", b"12345")
    run.put("weights/my-verifier_2/00000003/manifest.json", b"123")
    run.put("orders/00000000.json", b"1")
    for key in (
        "weights/solver/00000003/a",
        "weights/my-verifier_2/00000003/manifest.json",
        "orders/00000000.json",
    ):
        run.get(key)
    assert run.get("weights/solver/00000003/a") == b"12345"
    assert run.backend.read_part("runs/weights/weights/solver/00000003/a", 1, 3) == b"23"
    assert counted.weights() == {"solver": 12, "my-verifier_2": 3}
    assert counted.shards() == 0


def test_shards_are_counted_once_and_losing_ones_are_not(memory_store: ObjectStore) -> None:
    run, counted = traffic.counted(memory_store)
    assert shards.create(run, builders.shard(order=0))
    assert not shards.create(run, builders.shard(order=0))
    run.put("orders/00000000.json", b"no shard")
    assert counted.shards() == len(memory_store.get(layout.shard(0)))


def test_home_and_mirror_are_counted_separately() -> None:
    home, mirror = (
        open_store(f"memory://counting-{name}").sub("runs/one") for name in ("home", "mirror")
    )
    publisher.publish(home, "solver", 0, builders.tensors(0))
    assert mirror_next(home, mirror)
    far, at_home = traffic.counted(home)
    near, at_mirror = traffic.counted(replace(mirror, patience_s=1e-6))
    reader.fetch(read_through_mirror(far, near), "solver", 0)
    (data,) = (key for key in home.list("weights/solver") if key.endswith(".safetensors"))
    manifest = home.get("weights/solver/00000000/manifest.json")
    assert at_home.weights() == {"solver": len(manifest)}
    assert at_mirror.weights() == {"solver": len(home.get(data))}
