"""An HTTP server that gives one answer to every request, as a proxy or a strange server would."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class OneAnswer:
    """A running server. Example: `OneAnswer(41234, ["GET /api/health"])`."""

    port: int
    requests: list[str] = field(default_factory=list)
    """The first lines of all requests, without the protocol's version."""


@contextmanager
def one_answer(status: int, body: bytes, content_type: str) -> Iterator[OneAnswer]:
    """Run a server on a free port of the loopback interface."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            requests.append(f"{self.command} {self.path}")
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        # the names are those of http.server
        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_CONNECT = _answer

        def log_message(self, format: str, *args: object) -> None:
            return None

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    yield OneAnswer(listener.server_port, requests)
    listener.shutdown()
    listener.server_close()


@contextmanager
def refusing_port() -> Iterator[int]:
    """Hold a port of the loopback interface that refuses connections: bound, without a listener."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]
