"""Prefect's own application behind the guard, and its patched database classes, the only use of
Prefect's private names.
"""

import socket
from typing import Any

import httpx
import pytest
import uvicorn
from prefect.server.api.server import create_app
from prefect.server.database import configurations
from prefect.settings import PREFECT_SERVER_API_AUTH_STRING, PREFECT_UI_ENABLED, temporary_settings

from deployments.servers import auth, prefect_server
from deployments.servers.guard import Guard
from deployments.servers.listening import listen
from storage.machine.ports import unusual_port

SECRET = "astraflow:0123456789"
RUN_A_COMMAND = "/api/deployments/4f7e3c8e-0000-4000-8000-000000000000/create_flow_run"


class _Session:
    """Stands for a SQLAlchemy session; records how its transaction was started."""

    def __init__(self) -> None:
        self.mode: str | None = None

    def begin(self) -> "_Session":
        return self

    async def __aenter__(self) -> str:
        self.mode = configurations.SQLITE_BEGIN_MODE.get()
        return "transaction"

    async def __aexit__(self, *raised: object) -> None:
        return None


@pytest.fixture
def _stock_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = configurations.AioSqliteConfiguration.begin_transaction
    monkeypatch.setattr(configurations.AioSqliteConfiguration, "begin_transaction", stock)


@pytest.mark.usefixtures("_stock_afterwards")
async def test_every_transaction_on_sqlite_begins_immediately() -> None:
    assert prefect_server.begin_immediately()
    database = configurations.AioSqliteConfiguration(connection_url="sqlite+aiosqlite:///:memory:")
    session = _Session()
    async with database.begin_transaction(session) as transaction:  # type: ignore[arg-type]  # a stand-in
        assert transaction == "transaction"
    assert session.mode == "IMMEDIATE"
    assert configurations.SQLITE_BEGIN_MODE.get() is None


def test_an_unknown_prefect_version_is_not_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    async def other(self: object, session: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(configurations.AioSqliteConfiguration, "begin_transaction", other)
    assert not prefect_server.begin_immediately()
    assert configurations.AioSqliteConfiguration.begin_transaction is other


@pytest.mark.usefixtures("_stock_afterwards")
def test_the_server_listens_on_the_loopback_interface_behind_the_guard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """uvicorn's loop is replaced, which would serve without end; `tests/e2e/test_stack.py` has the real
    server.
    """
    ran: list[tuple[Any, tuple[str, int]]] = []

    def run(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        (listener,) = sockets
        with listener, socket.create_connection(listener.getsockname()):
            ran.append((server.config.app, listener.getsockname()))

    monkeypatch.setattr(uvicorn.Server, "run", run)
    monkeypatch.setenv("PREFECT_SERVER_API_HOST", "0.0.0.0")
    monkeypatch.setenv(prefect_server.AUTH_STRING, SECRET)
    port = unusual_port()
    with temporary_settings({PREFECT_UI_ENABLED: False}):
        prefect_server.main(["--port", str(port)])
    ((app, address),) = ran
    assert isinstance(app, Guard)
    assert address == ("127.0.0.1", port)


@pytest.mark.parametrize("auth_string", [None, ""])
def test_the_server_does_not_start_without_a_secret(
    auth_string: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = unusual_port()
    monkeypatch.delenv(prefect_server.AUTH_STRING, raising=False)
    if auth_string is not None:
        monkeypatch.setenv(prefect_server.AUTH_STRING, auth_string)
    with (
        pytest.raises(
            SystemExit, match="every process that reaches this server could run commands"
        ),
        listen(port),
    ):  # a second listener would end it with another reason
        prefect_server.main(["--port", str(port)])


async def test_prefect_accepts_only_requests_with_the_secret() -> None:
    with temporary_settings({PREFECT_SERVER_API_AUTH_STRING: SECRET, PREFECT_UI_ENABLED: False}):
        guarded = Guard(create_app(ignore_cache=True), SECRET, authenticates=True)
        transport = httpx.ASGITransport(app=guarded)  # type: ignore[arg-type]  # ASGI, spelled otherwise
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1:4200"
        ) as client:
            known, foreign = (
                {"authorization": auth.basic(SECRET)},
                {"origin": "http://evil.example"},
            )
            command = {"job_variables": {"command": "touch /tmp/evil"}}
            assert (await client.post(RUN_A_COMMAND, json=command)).status_code == 401
            assert (
                await client.post(RUN_A_COMMAND, json=command, headers=foreign)
            ).status_code == 403
            assert (
                await client.post(RUN_A_COMMAND, json=command, headers={**known, **foreign})
            ).status_code == 403
            read = await client.post("/api/block_documents/filter", json={"include_secrets": True})
            assert read.status_code == 401
            assert (await client.get("/api/admin/version")).status_code == 401
            assert (await client.get("/api/admin/version", headers=known)).status_code == 200
            assert (await client.get("/api/health")).json() is True
            assert (await client.get("/ui-settings")).json()["auth"] == "BASIC"
