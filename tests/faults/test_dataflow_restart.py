"""The dataflow is killed at each of its writes in turn; another one continues from the store."""

from dataclasses import replace

import pytest

from data_ops.config import PolicyData
from data_ops.dataflow.service import Dataflow
from storage.errors import TransientError
from storage.store.object_store import ObjectStore
from tests.support.runs.dataflow_world import AwayBackend, DyingBackend, Killed, World, world

KILLS_MAX = 200
LONG = {
    "solver": PolicyData(batch_size=4, steps=40),
    "verifier": PolicyData(batch_size=4, steps=40),
}


def run_with_a_death(made: World, dies_at: int, after: bool) -> bool:
    """Kill the dataflow at its n-th write and let another one finish the run; return whether there
    were so many writes.
    """
    backend = DyingBackend(backend=made.run.backend, dies_at=dies_at, after=after)
    try:
        made.finish(made.dataflow(replace(made.run, backend=backend)))
    except Killed:
        made.finish(made.dataflow())
        return True
    return False


@pytest.mark.parametrize("after", [False, True], ids=["before the write", "after the write"])
def test_a_dataflow_killed_at_any_write_is_replaced_without_loss(
    memory_store: ObjectStore, after: bool
) -> None:
    for dies_at in range(1, KILLS_MAX):
        made = world(memory_store.sub(f"{dies_at}"), max_staleness=2)
        died = run_with_a_death(made, dies_at, after)
        made.check()
        if not died:
            assert dies_at > 12, "8 batches and some orders are written at least"
            return
    raise AssertionError(f"the run makes more than {KILLS_MAX} writes; raise KILLS_MAX")


@pytest.mark.parametrize("after", [False, True], ids=["before the write", "after the write"])
def test_a_write_that_fails_once_is_retried_by_the_same_dataflow(
    memory_store: ObjectStore, after: bool
) -> None:
    for dies_at in range(1, KILLS_MAX):
        made = world(memory_store.sub(f"{dies_at}"), max_staleness=2)
        # The store itself does not retry, so the dataflow has to.
        backend = DyingBackend(
            backend=made.run.backend,
            dies_at=dies_at,
            after=after,
            error=TransientError("the answer got lost"),
        )
        dataflow = made.dataflow(replace(made.run, backend=backend, patience_s=1e-6))
        try:
            made.finish(dataflow)
        except TransientError:
            made.finish(dataflow)
            made.check()
        else:
            return
    raise AssertionError(f"the run makes more than {KILLS_MAX} writes; raise KILLS_MAX")


def test_two_dataflows_of_one_run_keep_the_ledger_consistent(
    memory_store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    made = world(memory_store, max_staleness=2)
    first, second = made.dataflow(), made.dataflow()
    for _ in range(200):
        first.round()
        second.round()
        if first.done and second.done:
            break
        made.play(made.open_orders()[:2])
        made.train("solver")
        second.round()
        made.train("verifier")
    made.check()
    assert "another dataflow was faster" in caplog.text


def test_a_rebuild_that_fails_halfway_is_repeated(memory_store: ObjectStore) -> None:
    made = world(memory_store, max_staleness=2)
    away = AwayBackend(made.run.backend)
    slow = made.dataflow(replace(made.run, backend=away, patience_s=1e-6))
    fast = made.dataflow()
    while not made.batches("verifier"):
        fast.round()
        made.play(made.open_orders())
    away.key = "batches/verifier"
    with pytest.raises(TransientError, match="batches/verifier"):
        made.finish(
            slow
        )  # its first order collides, and half of the store is unreachable during the rebuild
    away.key = ""
    made.finish(slow)
    made.check()


def test_an_order_used_but_not_recorded_as_seen_is_recorded_after_a_restart(
    memory_store: ObjectStore,
) -> None:
    num_unseen = 0
    for dies_at in range(5, 40):
        made = world(memory_store.sub(f"{dies_at}"), max_staleness=2, policies=LONG)
        with pytest.raises(Killed):
            made.finish(
                made.dataflow(
                    replace(
                        made.run, backend=DyingBackend(backend=made.run.backend, dies_at=dies_at)
                    )
                )
            )
        used = {
            number for policy in LONG for batch in made.batches(policy) for number in batch.shards
        }
        num_unseen += len(used - seen(made))
        dataflow = made.dataflow()
        for _ in range(6):
            dataflow.round()
            made.play(made.open_orders())
            made.train("solver")
            made.train("verifier")
        assert used <= seen(made)
    assert num_unseen > 0


def seen(made: World) -> set[int]:
    listed = [number for order in made.orders() for number in order.seen]
    assert len(listed) == len(set(listed)), "an order is folded once"
    return set(listed)


def test_a_restart_after_every_round_keeps_all_guarantees(
    memory_store: ObjectStore,
) -> None:
    made = world(memory_store, max_staleness=1)
    dataflow: Dataflow = made.dataflow()
    for _ in range(400):
        dataflow = made.dataflow()
        dataflow.round()
        if dataflow.done:
            break
        made.play(made.open_orders()[:1])
        made.train("verifier")
        made.train("solver")
    made.check()
