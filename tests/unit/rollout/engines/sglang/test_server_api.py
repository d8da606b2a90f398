"""Answers of an HTTP server that is no SGLang server, or a broken one."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rollout.engines.sglang import server_api
from rollout.engines.sglang.server_api import (
    ConnectionLostError,
    ServerApi,
    ServerLostError,
    ServerRefusedError,
)
from tests.support.http_servers import one_answer

REQUEST = {"sampling_params": {"max_new_tokens": 2}}
PIECE = b"[" * 2**16


@contextmanager
def server(status: int, headers: dict[str, str], pieces: Iterator[bytes]) -> Iterator[str]:
    """Run a server that sends these headers and pieces once, and closes the connection."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                for piece in pieces:
                    self.wfile.write(piece)
            except ConnectionError:
                return

        do_GET = do_POST = _answer  # the names are those of http.server

        def log_message(self, format: str, *args: object) -> None:
            return None

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listener.server_port}"
    listener.shutdown()
    listener.server_close()


async def test_a_redirection_is_refused_and_not_followed() -> None:
    with (
        one_answer(200, b"{}", "application/json") as other,
        server(307, {"Location": f"http://127.0.0.1:{other.port}/x"}, iter(())) as url,
    ):
        api = ServerApi(url, "a-secret")
        for call in (
            api.update(Path("/weights"), "a-1", flush=True),
            api.pause("in_place"),
            api.generate(REQUEST),
            api.is_ready(),
        ):
            with pytest.raises(ServerRefusedError, match=r"redirects to .*urls") as refused:
                await call
            assert refused.value.is_of_every_request
        await api.close()
    assert other.requests == []


async def test_an_answer_without_end_is_cut() -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while True:
            sent += len(PIECE)
            yield PIECE

    with server(200, {}, endless()) as url:
        api = ServerApi(url, "")
        with pytest.raises(ServerLostError, match=r"more than .* bytes at /pause_generation"):
            await api.pause("in_place")
        assert sent < 4 * server_api.ANSWER_BYTES_MAX
        with pytest.raises(ServerLostError, match="more than"):
            await api.label()
        assert not await api.is_ready()
        assert not await api.samples(60.0)
        await api.close()


async def test_an_answer_may_be_longer_the_more_tokens_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_api, "ANSWER_BYTES_MAX", 10)
    monkeypatch.setattr(server_api, "TOKEN_BYTES_MAX", 10)
    for size, fits in ((30, True), (31, False)):
        body = b"{}".ljust(size)
        with one_answer(200, body, "application/json") as answering:
            api = ServerApi(f"http://127.0.0.1:{answering.port}", "")
            if fits:
                assert await api.generate(REQUEST) == {}
            else:
                with pytest.raises(ServerLostError, match="more than 30 bytes at /generate"):
                    await api.generate(REQUEST)
            await api.close()


@pytest.mark.parametrize(
    "body", [b"[" * 200_000, b"{", b"\xff\xfe\x00", b'{"a": %s}' % (b"9" * 5000), b"[]", b""]
)
async def test_an_answer_that_is_no_json_object_is_one_of_a_lost_server(body: bytes) -> None:
    with one_answer(200, body, "application/json") as answering:
        api = ServerApi(f"http://127.0.0.1:{answering.port}", "")
        with pytest.raises(ServerLostError, match="no JSON object at /generate"):
            await api.generate(REQUEST)
        with pytest.raises(ServerLostError, match="no JSON object at /weights_checker"):
            await api.checksums()
        with pytest.raises(ServerLostError, match="does not answer"):
            await api.label()
        await api.close()


async def test_a_compressed_answer_is_not_expanded() -> None:
    body = gzip.compress(b" " * 2**24 + b"{}")
    with server(200, {"Content-Encoding": "gzip"}, iter([body])) as url:
        api = ServerApi(url, "")
        with pytest.raises(ServerLostError, match="no JSON object"):
            await api.generate(REQUEST)
        await api.close()


async def test_a_refusal_has_no_control_characters_of_the_server() -> None:
    with one_answer(400, b"\x1b]0;title\x07 no\n such\xff thing", "text/plain") as answering:
        api = ServerApi(f"http://127.0.0.1:{answering.port}", "")
        with pytest.raises(ServerRefusedError) as refused:
            await api.pause("in_place")
        assert str(refused.value).endswith("400 ?]0;title? no such\ufffd thing")
        await api.close()


async def test_the_port_of_an_own_server_that_ended_gets_no_request_and_its_answer_is_not_used() -> (
    None
):
    """Another process may have taken the port."""
    for words, num_requests in ((["", "it ended"], 1), (["it ended"], 0)):
        with one_answer(200, b"{}", "application/json") as answering:
            api = ServerApi(f"http://127.0.0.1:{answering.port}", "key", iter(words).__next__)
            with pytest.raises(ConnectionLostError, match="it ended"):
                await api.generate(REQUEST)
            await api.close()
        assert len(answering.requests) == num_requests
