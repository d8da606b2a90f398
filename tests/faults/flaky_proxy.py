"""A proxy in front of an HTTP server that injects faults: one per request, taken from a list, then
none.

"drop"      the connection breaks before the server sees the request
"refuse"    503 without asking the server
"compete"   409 without asking the server: another conditional write is under way
"deny"      412 without naming the condition that failed, as some servers do
"lose"      the server does its work, the answer is lost
"truncate"  half of the answer arrives
"away"      this request and all that come within `unreachable_s` break: the store is gone for a while
"none"      no fault
"""

import math
import socket
import threading
import time
from collections.abc import Iterable
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any
from urllib.parse import urlsplit

CHUNK_BYTES = 2**14
ANSWERS = {
    "refuse": b"503 Slow Down",
    "compete": b"409 Conflict",
    "deny": b"412 Precondition Failed",
}


class FlakyProxy(ThreadingTCPServer):
    """Listen on a free local port during the `with` block; clients connect to `address`."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Exchange)
        split = urlsplit(upstream)
        self.upstream = (split.hostname, split.port)
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self._faults: list[str] = []
        self.requests = 0
        self.unreachable_s = 0.0
        self.bytes_per_s = math.inf
        """How fast one connection carries an answer."""
        self._unreachable_until_s = -math.inf
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )

    def fail(self, faults: Iterable[str]) -> None:
        """Inject these faults into the next requests, in this order."""
        with self._lock:
            self._faults = list(faults)
            self.requests = 0

    def next_fault(self) -> str:
        with self._lock:
            self.requests += 1
            fault = self._faults.pop(0) if self._faults else "none"
            if fault == "away":
                self._unreachable_until_s = time.monotonic() + self.unreachable_s
            return "drop" if time.monotonic() < self._unreachable_until_s else fault

    def __enter__(self) -> "FlakyProxy":
        self._thread.start()
        return self

    def __exit__(self, *args: Any) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Exchange(StreamRequestHandler):
    """Handle one request and its response; the connection is then closed."""

    server: FlakyProxy

    def handle(self) -> None:
        request = self._request()
        if request is None:
            return
        fault = self.server.next_fault()
        if fault in ANSWERS:
            self.wfile.write(
                b"HTTP/1.1 "
                + ANSWERS[fault]
                + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            )
        elif fault != "drop":
            with socket.create_connection(self.server.upstream) as upstream:
                upstream.sendall(request)
                answer = b"".join(iter(lambda: upstream.recv(65536), b""))
            kept = {"lose": 0, "truncate": len(answer) // 2}.get(fault, len(answer))
            self._answer(answer[:kept])

    def _answer(self, answer: bytes) -> None:
        for start in range(0, len(answer), CHUNK_BYTES):
            chunk = answer[start : start + CHUNK_BYTES]
            self.wfile.write(chunk)
            time.sleep(len(chunk) / self.server.bytes_per_s)

    def _request(self) -> bytes | None:
        lines = [self.rfile.readline()]
        if not lines[0]:
            return None
        while lines[-1] not in (b"\r\n", b""):
            lines.append(self.rfile.readline())
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(b":") for line in lines[1:])
        }
        if headers.get(b"expect", b"").lower() == b"100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self.rfile.read(int(headers.get(b"content-length", 0)))
        kept = [
            line for line in lines[:-1] if not line.lower().startswith((b"connection:", b"expect:"))
        ]
        return b"".join([*kept, b"Connection: close\r\n\r\n", body])
