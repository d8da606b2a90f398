"""Prefect's client and a server that requires a secret: their requests and responses."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    get_current_settings,
    temporary_settings,
)

from deployments.registration.client import connected
from deployments.servers import auth
from storage.errors import ConfigError
from tasks.services import store_credentials
from tasks.services.prefect_settings import settings_for

SECRET = "astraflow:0123456789"


class Handler(BaseHTTPRequestHandler):
    def _answer(self) -> None:
        known = self.headers.get("Authorization") == auth.basic(SECRET)
        body = b'"3.8.8"' if known else b'{"exception_message": "Unauthorized"}'
        self.send_response(200 if known else 401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = _answer  # the names are those of http.server

    def log_message(self, format: str, *args: object) -> None:
        return None


@pytest.fixture
def server() -> Iterator[str]:
    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listener.server_port}/api"
    listener.shutdown()
    listener.server_close()


def test_a_client_sends_the_current_secret_of_the_environment(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", SECRET)
    with connected(server) as client:
        assert client.request("GET", "/admin/version").json() == "3.8.8"


def test_a_refusal_by_the_server_is_reported_with_the_variables_to_set(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "astraflow:wrong")
    refusal = r"refuses this command \(401\); set PREFECT_API_AUTH_STRING or PREFECT_API_KEY"
    with pytest.raises(ConfigError, match=refusal), connected(server) as client:
        client.read_work_pools()


def test_a_refused_block_is_reported_with_the_variables_to_set(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "astraflow:wrong")
    with pytest.raises(
        ConfigError,
        match=r"refuses to show the block keys, .*set PREFECT_API_AUTH_STRING, or PREFECT_API_KEY",
    ):
        store_credentials.load("keys", server)


def test_without_the_variable_the_prefect_setting_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_AUTH_STRING", raising=False)
    with (
        temporary_settings({PREFECT_API_AUTH_STRING: SECRET}),
        temporary_settings(settings_for("http://h/api")),
    ):
        result = get_current_settings().api
        assert (result.url, result.auth_string and result.auth_string.get_secret_value()) == (
            "http://h/api",
            SECRET,
        )
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "")
    assert settings_for("http://h/api") == {
        PREFECT_API_URL: "http://h/api",
        PREFECT_API_AUTH_STRING: "",
    }
