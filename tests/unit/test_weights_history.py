import numpy as np

from deployments import tables
from storage import layout, retention, weights
from storage.heartbeats import Pulse
from storage.objects import ObjectStore
from storage.records import HostTensor
from storage.retention import Retention
from storage.weights import Held
from tasks.weights_history import history


def test_every_version_says_how_it_was_made_and_who_serves_it(memory_store: ObjectStore) -> None:
    held: Held | None = None
    for version in range(4):
        tensors = {
            "w": HostTensor("BF16", (4000,), np.arange(4000, dtype=np.uint16) + np.uint16(version)),
            "fixed": HostTensor("BF16", (9000,), np.arange(9000, dtype=np.uint16)),
        }
        metrics = {"trainer/publish_s": 0.1 * version, "trainer/publish_wait_s": 0.01 * version}
        held = Held(weights.publish(memory_store, "solver", version, tensors, base=held, metrics=metrics), tensors)
    pulse = Pulse(memory_store, "rollout", "rollout-a-0", attempt=0, interval_s=3600.0)
    pulse.update(versions={"solver": 2})
    with pulse:
        pass  # its last beat stands
    found = history(memory_store, "solver")
    assert [(one.version, one.kind, one.changed_tensors, one.held_by) for one in found] == [
        (0, "anchor", 2, []),
        (1, "delta", 1, []),
        (2, "delta", 1, ["rollout-a-0"]),
        (3, "delta", 1, []),
    ]
    assert [one.publish_s for one in found] == [0.1, 0.2, 0.1 * 3, None]  # told by the version after it
    assert found[1].ratio > 10 > found[0].ratio
    planned = retention.plan(memory_store, "solver", Retention(last=1, every=0, grace_s=0.0), found[-1].created_s + 1e4)
    assert planned.retired == {}
    memory_store.put(layout.retired("solver", 1), b"{}")
    assert [one.retired for one in history(memory_store, "solver")] == [False, True, False, False]
    assert history(memory_store, "verifier") == []


def test_numbers_that_follow_each_other_are_shown_as_ranges() -> None:
    assert tables._ranges([0, 5, 6, 7, 9]) == "0, 5–7, 9"
    assert tables._ranges([]) == ""
