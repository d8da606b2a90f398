"""What a leader makes its calls on beside its own engine: ranks in child processes, other nodes."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import psutil

from storage.machine import gpu_locks
from storage.records.types import Json
from trainer.engines.ranks.environment import rank_environment
from trainer.engines.ranks.rendezvous import Rendezvous, answer_child

STALLED_S = 120.0
"""After rank 0 has ended its part of a call, time in which another may use no CPU time."""
CLOSE_S = 5.0
"""Time for the end of a connection to another node, which may wait for a machine that is gone."""
STANDARD_ERROR = 2


@dataclass(eq=False)
class Child:
    """A rank in a process of this machine, or all ranks of another node, and the way to it."""

    name: str
    """`rank 1 of 4`, `node 1 of 2`."""
    channel: socket.socket
    process: subprocess.Popen[bytes] | None = None
    """None for another node."""
    thread: threading.Thread | None = None
    """That passes the calls of another node on."""
    reply: Json | None = None
    """Of the current call; None: it is not ended."""
    is_lost: bool = False

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    def ended(self) -> str:
        """Wait for its end; return what is known of it."""
        if self.process is None:
            return "is gone"
        status = self.process.wait()
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def close(self) -> None:
        """Close the connection, and wait for the end of its process, which was killed."""
        self.channel.close()
        if self.thread is not None:
            # At the end of the process, Python must not end it in the middle of torch's code.
            self.thread.join(CLOSE_S)
        if self.process is not None:
            self.process.wait()
            if self.process.stdin:
                self.process.stdin.close()


def start_rank(rank: int, num_ranks: int, gpu: str, rendezvous: Rendezvous | None) -> Child:
    """Start the process of a rank, which sees one GPU; none is given to ranks on a CPU.

    With a rendezvous, the process asks this one for what it reads and writes there.
    """
    pairs = [socket.socketpair() for _ in range(1 if rendezvous is None else 2)]
    theirs = [its.fileno() for _, its in pairs]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "trainer.engines.ranks.rank", *map(str, theirs)],
        stdin=subprocess.PIPE,
        stdout=STANDARD_ERROR,
        pass_fds=[*theirs, *gpu_locks.descriptors()],
        env=rank_environment(os.environ, gpu),
        start_new_session=True,
    )
    for _, its in pairs:
        its.close()
    if rendezvous is not None:
        threading.Thread(target=answer_child, args=[pairs[1][0], rendezvous], daemon=True).start()
    return Child(f"rank {rank} of {num_ranks}", pairs[0][0], process)


def stand_still(children: Iterable[Child], seen: dict[int, tuple[float, float]]) -> bool:
    """Return whether a child of this machine has used no CPU time for STALLED_S.

    `seen` has the CPU seconds of each process that were seen last, and when they were first seen.
    """
    now_s = time.monotonic()
    for pid in (child.process.pid for child in children if child.process is not None):
        with suppress(psutil.Error):
            used_s = round(sum(psutil.Process(pid).cpu_times()[:2]), 1)
            if pid not in seen or seen[pid][0] != used_s:
                seen[pid] = used_s, now_s
            if now_s - seen[pid][1] > STALLED_S:
                return True
    return False
