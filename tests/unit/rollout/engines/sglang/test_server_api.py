"""Answers of an HTTP server that is no SGLang server, or a broken one."""

import gzip
import json
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rollout.engines.sglang import server_api
from rollout.engines.sglang.server_api import (
    ConnectionLostError,
    ServerApi,
    ServerLostError,
    ServerRefusedError,
)
from storage.formats.json_objects import parse
from storage.records.types import Json
from tests.support.http_servers import one_answer
from tests.support.patience import PATIENCE_S

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
        assert sent < 2**26
        with pytest.raises(ServerLostError, match="more than"):
            await api.label()
        assert not await api.is_ready()
        assert not await api.samples(PATIENCE_S)
        await api.close()


async def test_an_answer_may_be_longer_the_more_tokens_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_api, "ANSWER_BYTES_MAX", 10)
    monkeypatch.setattr(server_api, "TOKEN_BYTES_MAX", 10)
    monkeypatch.setattr(server_api, "MASK_BYTES_MAX", 100)
    monkeypatch.setattr(server_api, "VALUE_BYTES", 10)
    masked = {**REQUEST, "return_sampling_mask": True}
    for request, limit in ((REQUEST, 30), (masked, 230)):
        await check_limit(request, limit)


async def check_limit(request: Json, limit: int) -> None:
    for size, fits in ((limit, True), (limit + 1, False)):
        body = b"{}".ljust(size)
        with one_answer(200, body, "application/json") as answering:
            api = ServerApi(f"http://127.0.0.1:{answering.port}", "")
            if fits:
                assert await api.generate(request) == {}
            else:
                with pytest.raises(ServerLostError, match=f"more than {limit} bytes at /generate"):
                    await api.generate(request)
            await api.close()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("part", [b"[]", b"{}", b'{"a":1}', b'[[""]]'])
async def test_an_answer_of_very_many_lists_is_not_parsed(part: bytes, masked: bool) -> None:
    """Each takes a hundred times the memory of its text, and its parsing stops the event loop."""
    request = {**REQUEST, "return_sampling_mask": True} if masked else REQUEST
    text = b'{"meta_info":[' + (part + b",") * (2**20 // (len(part) + 1) - 10) + b"0]}"
    with one_answer(200, text, "application/json") as answering:
        api = ServerApi(f"http://127.0.0.1:{answering.port}", "")
        tracemalloc.start()
        with pytest.raises(ServerLostError, match=r"no JSON object at /generate: an answer has"):
            await api.generate(request)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        await api.close()
    assert peak < 8 * len(text)


async def test_a_long_answer_with_masks_is_parsed_outside_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[int] = []

    def noted(*args: Any) -> Json:
        threads.append(threading.get_ident())
        return parse(*args)

    monkeypatch.setattr(server_api, "parse", noted)
    masked = {"sampling_params": {"max_new_tokens": 64}, "return_sampling_mask": True}
    for length, is_outside in ((10, False), (4096, True)):
        answer = {"output_ids": [1] * 64, "meta_info": {"masks": [[150_000] * length] * 64}}
        body = json.dumps(answer, separators=(",", ":")).encode()
        with one_answer(200, body, "application/json") as answering:
            api = ServerApi(f"http://127.0.0.1:{answering.port}", "")
            assert await api.generate(masked) == answer
            await api.close()
        assert (threads.pop() != threading.get_ident()) == is_outside


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
