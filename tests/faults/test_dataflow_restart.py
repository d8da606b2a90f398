"""The dataflow is killed at each of its writes in turn; another one continues from the store."""

from dataclasses import replace

import pytest

from data_ops.config import PolicyData
from data_ops.dataflow.service import Dataflow
from rollout.service.order_leasing import OrderLeasing
from storage import layout
from storage.errors import TransientError
from storage.store.object_store import ObjectStore
from tests.support.runs.dataflow_world import DyingBackend, Killed, UnreachableBackend, World, world

KILLS_MAX = 200
LONG = {
    "solver": PolicyData(batch_size=4, steps=40),
    "verifier": PolicyData(batch_size=4, steps=40),
}


def run_with_a_kill(simulation: World, dies_at: int, after: bool) -> bool:
    """Kill the dataflow at its n-th write and let another one finish the run; return whether there
    were so many writes.
    """
    backend = DyingBackend(backend=simulation.run.backend, dies_at=dies_at, after=after)
    try:
        simulation.finish(simulation.dataflow(replace(simulation.run, backend=backend)))
    except Killed:
        simulation.finish(simulation.dataflow())
        return True
    return False


@pytest.mark.parametrize("after", [False, True], ids=["before the write", "after the write"])
def test_a_dataflow_killed_at_any_write_is_replaced_without_loss(
    memory_store: ObjectStore, after: bool
) -> None:
    for dies_at in range(1, KILLS_MAX):
        simulation = world(memory_store.sub(f"{dies_at}"), max_staleness=2)
        died = run_with_a_kill(simulation, dies_at, after)
        simulation.check()
        if not died:
            assert dies_at > 12, "8 batches and some orders are written at least"
            return
    raise AssertionError(f"the run makes more than {KILLS_MAX} writes; raise KILLS_MAX")


@pytest.mark.parametrize("after", [False, True], ids=["before the write", "after the write"])
def test_a_write_that_fails_once_is_retried_by_the_same_dataflow(
    memory_store: ObjectStore, after: bool
) -> None:
    for dies_at in range(1, KILLS_MAX):
        simulation = world(memory_store.sub(f"{dies_at}"), max_staleness=2)
        # The store itself does not retry, so the dataflow has to.
        backend = DyingBackend(
            backend=simulation.run.backend,
            dies_at=dies_at,
            after=after,
            error=TransientError("the answer got lost"),
        )
        dataflow = simulation.dataflow(replace(simulation.run, backend=backend, patience_s=1e-6))
        try:
            simulation.finish(dataflow)
        except TransientError:
            simulation.finish(dataflow)
            simulation.check()
        else:
            return
    raise AssertionError(f"the run makes more than {KILLS_MAX} writes; raise KILLS_MAX")


def test_two_dataflows_of_one_run_keep_the_ledger_consistent(
    memory_store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    simulation = world(memory_store, max_staleness=2)
    first, second = simulation.dataflow(), simulation.dataflow()
    for _ in range(200):
        first.round()
        second.round()
        if first.done and second.done:
            break
        simulation.play(simulation.open_orders()[:2])
        simulation.train("solver")
        second.round()
        simulation.train("verifier")
    simulation.check()
    assert "another dataflow was faster" in caplog.text


def test_a_rebuild_that_fails_halfway_is_repeated(memory_store: ObjectStore) -> None:
    simulation = world(memory_store, max_staleness=2)
    unreachable = UnreachableBackend(simulation.run.backend)
    slow = simulation.dataflow(replace(simulation.run, backend=unreachable, patience_s=1e-6))
    fast = simulation.dataflow()
    while not simulation.batches("verifier"):
        fast.round()
        simulation.play(simulation.open_orders())
    unreachable.key = "batches/verifier"
    with pytest.raises(TransientError, match="batches/verifier"):
        simulation.finish(
            slow
        )  # its first order collides, and half of the store is unreachable during the rebuild
    unreachable.key = ""
    simulation.finish(slow)
    simulation.check()


def test_an_order_used_but_not_recorded_as_seen_is_recorded_after_a_restart(
    memory_store: ObjectStore,
) -> None:
    num_runs_with_unseen = 0
    for dies_at in range(5, KILLS_MAX):
        simulation = world(memory_store.sub(f"{dies_at}"), max_staleness=2, policies=LONG)
        with pytest.raises(Killed):
            simulation.finish(
                simulation.dataflow(
                    replace(
                        simulation.run,
                        backend=DyingBackend(backend=simulation.run.backend, dies_at=dies_at),
                    )
                )
            )
        used = {
            number
            for policy in LONG
            for batch in simulation.batches(policy)
            for number in batch.shards
        }
        num_runs_with_unseen += bool(used - seen(simulation))
        dataflow = simulation.dataflow()
        for _ in range(6):
            dataflow.round()
            simulation.play(simulation.open_orders())
            simulation.train("solver")
            simulation.train("verifier")
        assert used <= seen(simulation)
        if num_runs_with_unseen == 3:
            return
    raise AssertionError("no write leaves used orders unrecorded; another crash has to")


def seen(simulation: World) -> set[int]:
    listed = [number for order in simulation.orders() for number in order.seen]
    assert len(listed) == len(set(listed)), "an order is folded once"
    return set(listed)


def test_a_restart_after_every_round_keeps_all_guarantees(
    memory_store: ObjectStore,
) -> None:
    simulation = world(memory_store, max_staleness=1)
    dataflow: Dataflow = simulation.dataflow()
    for _ in range(400):
        dataflow = simulation.dataflow()
        dataflow.round()
        if dataflow.done:
            break
        simulation.play(simulation.open_orders()[:1])
        simulation.train("verifier")
        simulation.train("solver")
    simulation.check()


def work(simulation: World, claims: OrderLeasing) -> int | None:
    """Finish the next order that can be leased; return its number."""
    leased = claims.next()
    if leased is None:
        return None
    simulation.play([leased.order.number])
    claims.done(leased)
    return leased.order.number


def test_a_shard_lost_between_its_ingestion_and_a_restart_is_rolled_out_again(
    memory_store: ObjectStore,
) -> None:
    """The worker has passed the order, and the restarted dataflow waits for its shard."""
    now_s = 0.0
    simulation = world(memory_store, max_staleness=0, batches_ahead=0)
    dataflow = simulation.dataflow()
    claims = OrderLeasing(simulation.run, "worker", "region", 30.0, lambda: now_s)
    lost: int | None = None
    finished: list[int] = []
    for _ in range(100):
        now_s += 5.0
        dataflow.round()
        if (number := work(simulation, claims)) is not None:
            finished.append(number)
        dataflow.round()
        made = [batch for policy in simulation.policies for batch in simulation.batches(policy)]
        listed = {number for batch in made for number in batch.shards}
        only_ingested = set(finished) - listed - dataflow._outstanding
        if lost is None and only_ingested:
            lost = min(only_ingested)
            simulation.run.delete(layout.shard(lost))
            dataflow = simulation.dataflow()
        for policy in simulation.policies:
            simulation.train(policy)
        if dataflow.done:
            break
    assert dataflow.done
    assert lost is not None
    assert finished.count(lost) == 2
    simulation.check()
