import gc
import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from deployments.cli.output import tables
from storage import layout
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.records.progress import RolloutProgress
from storage.records.weights import HostTensor, Manifest
from storage.store.backend import Backend
from storage.store.object_store import ObjectStore
from storage.weights import publisher, retention
from storage.weights.manifests import LoadedWeights
from storage.weights.retention import Retention
from tasks.monitoring import weights_table
from tasks.monitoring.weights_table import history
from tests.support.runs import builders


def test_each_version_has_its_kind_and_the_members_that_loaded_it(
    memory_store: ObjectStore,
) -> None:
    loaded: LoadedWeights | None = None
    for version in range(4):
        tensors = {
            "w": HostTensor("BF16", (4000,), np.arange(4000, dtype=np.uint16) + np.uint16(version)),
            "fixed": HostTensor("BF16", (9000,), np.arange(9000, dtype=np.uint16)),
        }
        metrics = {"trainer/publish_s": 0.1 * version, "trainer/publish_wait_s": 0.01 * version}
        loaded = LoadedWeights(
            publisher.publish(
                memory_store, "solver", version, tensors, base=loaded, metrics=metrics
            ),
            tensors,
        )
    writer = HeartbeatWriter(memory_store, "rollout", "rollout-a-0", attempt=0, interval_s=3600.0)
    writer.update(versions={"solver": 2}, progress=RolloutProgress(refresh_s={"solver": 0.25}))
    with writer:
        pass  # the last heartbeat stays
    result = history(memory_store, "solver").readable
    assert [(item.version, item.kind, item.held_by) for item in result] == [
        (0, "anchor", {}),
        (1, "delta", {}),
        (2, "delta", {"rollout-a-0": 0.25}),
        (3, "delta", {}),
    ]
    assert [item.changed for item in result] == [None, *[4000 / 13000] * 3]
    assert [item.publish_s for item in result] == [
        0.1,
        0.2,
        0.1 * 3,
        None,
    ]  # known from the manifest of the next version
    assert (result[0].delta_bytes, result[0].ratio) == (None, None)
    assert (result[1].ratio or 0) > 10
    assert all((item.encode_s or 0) + (item.upload_s or 0) > 0 for item in result)
    for width, headers in ((130, ("bytes", "upload", "visible")), (80, ("smaller", "visible"))):
        shown = Console(width=width, record=True, file=io.StringIO())
        shown.print(tables.weights_table(result, width))
        text = shown.export_text()
        assert "rollout-a-0" in text
        assert "…" not in text
        assert all(header in text for header in headers)
    planned = retention.plan(
        memory_store, "solver", Retention(last=1, every=0, grace_s=0.0), result[-1].created_s + 1e4
    )
    assert planned.retired == {}
    memory_store.put(layout.retired("solver", 1), b"{}")
    assert [one.retired for one in history(memory_store, "solver").readable] == [
        False,
        True,
        False,
        False,
    ]
    assert history(memory_store, "verifier").readable == ()
    whole = publisher.publish(memory_store, "solver", 4, tensors, base=loaded, anchor=True)
    last = history(memory_store, "solver").readable[4]
    assert (last.kind, last.delta_bytes, last.num_bytes) == ("anchor", 0, whole.files[0].num_bytes)


@pytest.mark.parametrize("lost", [1, 2, 3, 5])
def test_a_missing_version_is_named_and_does_not_hide_the_others(
    memory_store: ObjectStore, lost: int
) -> None:
    for version in range(8):
        metrics = {"trainer/publish_s": 0.1 * version}
        publisher.publish(
            memory_store, "solver", version, builders.tensors(version), metrics=metrics
        )
    memory_store.delete(f"weights/solver/{lost:08d}/manifest.json")
    seen = history(memory_store, "solver")
    assert [one.version for one in seen.readable] == [
        version for version in range(8) if version != lost
    ]
    assert seen.unreadable == {
        f"weights/solver/{lost:08d}/manifest.json": f"weights/solver/{lost:08d}/manifest.json is missing"
    }
    assert seen.readable[lost - 1].publish_s is None  # the version after it would have told


def test_a_version_of_a_very_large_number_is_named_without_further_requests(
    memory_store: ObjectStore,
) -> None:
    publisher.publish(memory_store, "solver", 0, builders.tensors(0))
    memory_store.put(f"weights/solver/{2**63 - 1}/manifest.json", b"{")
    seen = history(memory_store, "solver")
    assert [one.version for one in seen.readable] == [0]
    assert seen.unreadable[f"weights/solver/{2**63 - 1}/manifest.json"].startswith(
        "weights/solver/9223372036854775807"
    )
    assert (
        seen.unreadable["weights/solver"]
        == "and 9,223,372,036,854,775,706 more versions of solver are missing"
    )


class CountsManifests:
    """A backend that counts the manifests in memory at every check whether a version is retired."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.alive: list[int] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.backend, name)

    def exists(self, key: str) -> bool:
        if key.endswith(layout.RETIRED):
            self.alive.append(sum(type(item) is Manifest for item in gc.get_objects()))
        return self.backend.exists(key)


def test_the_number_of_manifests_in_memory_is_limited(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_table, "READ_THREADS", 1)
    for version in range(12):
        publisher.publish(memory_store, "solver", version, builders.tensors(version))
    counting = CountsManifests(memory_store.backend)
    store = replace(memory_store, backend=counting)  # type: ignore[arg-type]  # the rest is delegated
    gc.freeze()  # else the many objects of other tests are looked through each time
    try:
        assert [one.version for one in history(store, "solver").readable] == list(range(12))
    finally:
        gc.unfreeze()
    assert len(counting.alive) == 12
    assert max(counting.alive) <= 1
