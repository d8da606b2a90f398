"""Writers killed by SIGKILL during commits, and concurrent writers in other processes: each object
is complete and comes from one writer.
"""

import signal
import subprocess
import sys
import time

import xxhash

from storage.store.object_store import ObjectStore
from tests.support.checkout import ROOT
from tests.support.patience import PATIENCE_S

KILLS = 12
BODY_BYTES = 300_000

WRITER = f"""
import itertools, sys
import xxhash
from storage.store.object_store import open_store
store = open_store(sys.argv[1])
for number in itertools.count():
    data = (b"%s-%d." % (sys.argv[2].encode(), number)) * 80_000
    data = data[:{BODY_BYTES}]
    store.create(f"shards/{{sys.argv[2]}}-{{number:08d}}", data + xxhash.xxh3_128_hexdigest(data).encode())
    store.put("hint", data + xxhash.xxh3_128_hexdigest(data).encode())
    print(number, flush=True)
"""

RIVAL = """
import sys
from storage.errors import ConflictError
from storage.store.object_store import open_store
store, name = open_store(sys.argv[1]), sys.argv[2]
sys.stdin.readline()
for number in range(100):
    try:
        store.create(f"orders/{number:08d}", name.encode() * 1000)
        print(number, flush=True)
    except ConflictError:
        pass
"""


def start(program: str, store: ObjectStore, name: str) -> "subprocess.Popen[str]":
    root = str(ROOT)
    return subprocess.Popen(
        [sys.executable, "-c", program, store.url, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
    )


def whole(body: bytes) -> bool:
    return (
        len(body) == BODY_BYTES + 32
        and xxhash.xxh3_128_hexdigest(body[:BODY_BYTES]).encode() == body[BODY_BYTES:]
    )


def test_readers_never_read_a_part_of_an_object_of_a_killed_writer(
    local_store: ObjectStore,
) -> None:
    committed: list[str] = []
    for kill in range(KILLS):
        with start(WRITER, local_store, f"w{kill}") as writer:
            assert writer.stdout is not None
            writer.stdout.readline()  # the kill comes while it writes
            until_s = (
                time.monotonic() + 0.0037 * kill
            )  # each kill comes at another moment of a commit
            while time.monotonic() < until_s:
                assert whole(local_store.get(local_store.list("shards")[-1]))
            writer.send_signal(signal.SIGKILL)
            numbers = ["0", *writer.stdout.read().split()]
        committed += [f"shards/w{kill}-{int(number):08d}" for number in numbers]
        assert whole(local_store.get("hint"))
    results = local_store.list("shards")
    assert set(committed) <= set(results)
    assert len(committed) <= len(results) <= len(committed) + KILLS
    for key in results:
        assert whole(local_store.get(key))


def test_work_continues_where_a_killed_writer_stopped(local_store: ObjectStore) -> None:
    with start(WRITER, local_store, "w") as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
    previous_stop = local_store.list("shards")
    local_store.create("shards/next", b"x")
    local_store.put("hint", b"y")
    assert local_store.list("shards") == sorted([*previous_stop, "shards/next"])


def test_each_object_has_one_winner_among_concurrent_processes(
    local_store: ObjectStore,
) -> None:
    names = ["a", "b", "c", "d"]
    competitors = [start(RIVAL, local_store, name) for name in names]
    wins: dict[int, list[str]] = {number: [] for number in range(100)}
    for competitor in competitors:
        assert competitor.stdin is not None
        competitor.stdin.write("go\n")
        competitor.stdin.flush()
    for name, competitor in zip(names, competitors, strict=True):
        output, _ = competitor.communicate(timeout=PATIENCE_S)
        assert competitor.returncode == 0
        for number in map(int, output.split()):
            wins[number].append(name)
    assert all(len(winners) == 1 for winners in wins.values())
    for number, (winner,) in wins.items():
        assert local_store.get(f"orders/{number:08d}") == winner.encode() * 1000
