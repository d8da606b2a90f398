"""Prefect's client and a server that requires a secret: their requests and responses."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prefect.context import SyncClientContext
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_REQUEST_TIMEOUT,
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    get_current_settings,
    temporary_settings,
)

from deployments.paths import PROJECT
from deployments.registration import flow_runs, work_pools
from deployments.registration.client import connected
from deployments.registration.pools import Pool
from deployments.servers import auth
from deployments.stack import readiness
from storage.errors import ConfigError, TransientError
from tasks.services import store_credentials
from tasks.services.prefect_settings import COMMAND, POLL, client_of, settings_for
from tests.support.http_servers import one_answer

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


def test_a_client_is_one_of_the_named_server_also_within_a_flow_run_of_another(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", SECRET)
    with (
        one_answer(200, b'"3.8.8"', "application/json") as other,
        temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{other.port}/api"}),
        SyncClientContext(),
    ):
        of_the_flow_run = [*other.requests]
        with connected(server) as client:
            assert client.request("GET", "/admin/version").json() == "3.8.8"
        assert other.requests == of_the_flow_run


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


@pytest.mark.parametrize(
    "proxy",
    ["http://user:S3CR/3T@proxy:8080", "user:S3CR3T", "http://proxy:S3CR3T", "http://p\x1b[31m:1"],
)
def test_an_address_of_a_proxy_that_cannot_be_used_is_not_shown(
    proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with (
        pytest.raises(ConfigError) as caught,
        connected("http://prefect.example:4200/api"),
    ):
        pass
    assert str(caught.value) == (
        "Prefect cannot use the address of a proxy; correct or unset HTTP_PROXY, HTTPS_PROXY, "
        "ALL_PROXY, NO_PROXY"
    )


def test_a_proxy_that_needs_another_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://user:S3CR3T@proxy:1080")
    with (
        pytest.raises(
            ConfigError, match=r"^Prefect cannot use its settings \(ImportError: .*SOCKS"
        ),
        connected("http://prefect.example:4200/api"),
    ):
        pass


def test_an_address_that_is_none_is_named_as_that_of_the_server() -> None:
    with (
        pytest.raises(ConfigError, match=r"^PREFECT_API_URL=http://h:port/api is not the address"),
        client_of("http://h:port/api"),
    ):
        pass


STRANGE = {
    "a page": (200, b"<html>hello</html>", "JSONDecodeError"),
    "another list": (200, b"[1]", None),
    "another object": (200, b"{}", None),
    "null": (200, b"null", None),
    "too deep": (200, b'{"a":' * 20_000, "DecodingError"),
    "a number of 5,000 digits": (200, b"[" + b"9" * 5000 + b"]", "DecodingError"),
    "no text": (200, b"\xff\xfe\xff", None),
    "a teapot": (418, b"{}", "418 I'm a teapot"),
    "nothing there": (404, b"{}", None),
    "a redirection": (302, b"{}", "302 Found"),
}


@pytest.mark.parametrize(("status", "body", "what"), STRANGE.values(), ids=STRANGE.keys())
@pytest.mark.parametrize(
    "request_of",
    [
        lambda url: flow_runs.deployments_of(url, "astraflow"),
        lambda url: flow_runs.read(url, "00000000-0000-4000-8000-000000000000"),
        lambda url: flow_runs.start(url, "astraflow/x", {}, "x", []),
        lambda url: flow_runs.cancel_all(url, "x", processes_alive=True),
        lambda url: work_pools.create_or_merge(url, {"control": Pool()}, "python", {}, ()),
        lambda url: readiness.worker_beats(url, ["control"]),
        lambda url: store_credentials.load("keys", url, COMMAND),
    ],
    ids=["deployments", "read", "start", "cancel", "pools", "workers", "credentials"],
)
def test_a_server_that_is_not_prefect_is_named_with_the_address_to_write(
    request_of: Callable[[str], object], status: int, body: bytes, what: str | None
) -> None:
    with one_answer(status, body, "application/json") as server:
        url = f"http://127.0.0.1:{server.port}"
        with pytest.raises(ConfigError) as raised:
            request_of(url)
    if status == 404 and "no Secret block" in str(raised.value):
        return  # as a Prefect server answers for a block that does not exist
    assert str(raised.value).startswith(
        f"{url} does not answer like a Prefect server of this release ({what or ''}"
    )
    assert str(raised.value).endswith("; write the address as http://HOST:4200/api")


def test_a_server_that_fails_is_reported_with_its_status() -> None:
    with one_answer(500, b"{}", "application/json") as server:
        url = f"http://127.0.0.1:{server.port}/api"
        with pytest.raises(ConfigError) as raised:
            flow_runs.deployments_of(url, "astraflow")
        assert str(raised.value) == (
            f"the server at {url} fails (500 Internal Server Error); its log shows why"
        )
        with pytest.raises(TransientError, match="the Prefect block keys cannot be read from"):
            store_credentials.load("keys", url)


def test_commands_wait_a_short_time_and_services_as_long_as_prefect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PREFECT_API_REQUEST_TIMEOUT", "PREFECT_CLIENT_MAX_RETRIES"):
        monkeypatch.delenv(name, raising=False)
    timeout, retries = PREFECT_API_REQUEST_TIMEOUT, PREFECT_CLIENT_MAX_RETRIES
    url = "http://127.0.0.1:1/api"
    with connected(url) as client:
        assert (client._client.timeout.read, retries.value()) == (30.0, 2)
    with connected(url, POLL) as client:
        assert (client._client.timeout.read, retries.value()) == (5.0, 0)
    with client_of(url) as client:
        assert (client._client.timeout.read, retries.value()) == (60.0, 5)
    monkeypatch.setenv("PREFECT_API_REQUEST_TIMEOUT", "3")
    assert timeout not in settings_for(url, COMMAND)
    assert settings_for(url, COMMAND)[retries] == 2


BROKEN = {
    "a number": (
        {"PREFECT_CLIENT_MAX_RETRIES": "secret"},
        "max_retries: Input should be a valid integer",
    ),
    "certificates": ({"SSL_CERT_FILE": "/absent"}, "FileNotFoundError"),
    "a proxy": ({"ALL_PROXY": "odd://host"}, "ValueError: Unknown scheme for proxy"),
    "a profile": ({"PREFECT_HOME": "."}, "TOMLDecodeError: "),
    "a file": ({}, "SettingsError: Failed to load Prefect settings from prefect.toml"),
}


@pytest.mark.parametrize(("variables", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_settings_that_prefect_cannot_use_are_named_without_their_values(
    variables: dict[str, str], reason: str, tmp_path: Path
) -> None:
    if not variables:
        (tmp_path / "prefect.toml").write_text("[[[")
    (tmp_path / "profiles.toml").write_text("[[[")
    command = (
        'store_credentials.load("keys", "http://127.0.0.1:1/api")'
        if "SSL_CERT_FILE" in variables
        else 'flow_runs.cancel_all("http://127.0.0.1:1/api", "x", True)'
    )
    result = subprocess.run(
        [sys.executable, "-c", _CALL.format(command=command)],
        env={**os.environ, "PYTHONPATH": str(PROJECT), **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.startswith(f"Prefect cannot use its settings ({reason}"), result.stderr
    assert "secret" not in result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert "; correct the" in result.stdout
    assert "HOME" not in result.stdout.replace("PREFECT_HOME", "")


def test_a_user_without_a_home_folder_is_reported(tmp_path: Path) -> None:
    command = 'flow_runs.cancel_all("http://127.0.0.1:1/api", "x", True)'
    no_user = "import pwd\ndef unknown(uid): raise KeyError(uid)\npwd.getpwuid = unknown\n"
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "HOME"))
    }
    result = subprocess.run(
        [sys.executable, "-c", no_user + _CALL.format(command=command)],
        env={**inherited, "PYTHONPATH": str(PROJECT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.startswith(
        "Prefect cannot use its settings (RuntimeError: Could not determine home directory.); "
        "set HOME to the user's home folder, or correct the PREFECT_… variables"
    ), result.stderr


_CALL = """
from deployments.registration import flow_runs
from storage.errors import ConfigError
from tasks.services import store_credentials
try:
    {command}
except ConfigError as error:
    print(error)
"""


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
