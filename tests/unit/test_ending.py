import threading

from rollout.ending import Ending
from storage import runs
from storage.objects import ObjectStore, open_store
from storage.records import Stop


async def test_the_end_is_near_when_the_worker_is_told_to_leave(memory_store: ObjectStore) -> None:
    stop = threading.Event()
    ending = Ending(memory_store, stop)
    assert not await ending.within(0.0)
    stop.set()
    assert await ending.within(0.0)
    assert not ending.run_over


async def test_the_end_is_near_when_the_run_is_over(memory_store: ObjectStore) -> None:
    runs.request_stop(memory_store, Stop("completed", "all steps done", 0.0))
    ending = Ending(memory_store, threading.Event())
    assert await ending.within(0.0)
    assert ending.run_over


async def test_a_stop_that_cannot_be_read_is_no_end() -> None:
    store = open_store("memory://unreadable-stop")
    store.put("stop.json", b"{")
    assert not await Ending(store, threading.Event()).within(0.0)
