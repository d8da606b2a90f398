"""A process in a network namespace, with requests and responses as lines of JSON."""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.ocean import link
from benchmarks.ocean.link import LinkError
from storage.records.types import Json

RESPONSE_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 10.0


class NamespaceProcess:
    """A process that runs until `stop`."""

    def __init__(self, namespace: str, module: str, arguments: Sequence[str]) -> None:
        command = link.inside(namespace, [sys.executable, "-m", module, *arguments])
        self._name = f"{module} in {namespace}"
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(),
            start_new_session=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._pump, daemon=True).start()

    def send(self, **message: Any) -> None:
        assert self._process.stdin is not None
        try:
            print(json.dumps(message), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise LinkError(f"{self._name} ended; its output is above") from None

    def receive(self) -> Json:
        try:
            line = self._lines.get(timeout=RESPONSE_TIMEOUT_S)
        except queue.Empty:
            raise LinkError(
                f"{self._name} did not respond within {RESPONSE_TIMEOUT_S:.0f} s"
            ) from None
        if not line:
            raise LinkError(f"{self._name} ended; its output is above")
        response: Json = json.loads(line)
        return response

    def call(self, **message: Any) -> Json:
        self.send(**message)
        return self.receive()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _pump(self) -> None:
        assert self._process.stdout is not None
        for line in iter(self._process.stdout.readline, ""):
            self._lines.put(line)
        self._lines.put("")


@contextmanager
def running(namespace: str, module: str, *arguments: str) -> Iterator[NamespaceProcess]:
    """Start a process, wait until it is ready, and stop it at the end of the block."""
    process = NamespaceProcess(namespace, module, arguments)
    try:
        process.receive()
        yield process
    finally:
        process.stop()


def _environment() -> dict[str, str]:
    """Return the environment with keys, which the servers do not check, and without a proxy."""
    keys = {
        "AWS_ACCESS_KEY_ID": "benchmark",
        "AWS_SECRET_ACCESS_KEY": "benchmark",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    return {**os.environ, **keys, "NO_PROXY": "*", "no_proxy": "*"}
