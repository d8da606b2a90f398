"""The guard in front of an application that records the requests that reach it."""

import asyncio
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from deployments.servers import auth
from deployments.servers.guard import Guard, Receive, Scope, Send

SECRET = "astraflow:0123456789"
BASIC = auth.basic(SECRET)
COOKIE = "=".join(auth.cookie(SECRET))
NOW_S = 1_700_000_000.0
TICKET = auth.page("", SECRET, "", NOW_S).partition("#")[2]


@dataclass
class Application:
    """Answers every request with `reached`, and accepts every websocket."""

    reached: list[str] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.reached.append(scope.get("path", scope["type"]))
        if scope["type"] == "http":
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]}
            )
            await send({"type": "http.response.body", "body": b"reached"})
        elif scope["type"] == "websocket":
            await send({"type": "websocket.accept"})


@pytest.fixture
def application() -> Application:
    return Application()


@pytest.fixture
def mlflow(application: Application) -> Guard:
    """The guard of an application without authentication."""
    return Guard(application, SECRET, authenticates=False, clock=lambda: NOW_S)


@pytest.fixture
def prefect(application: Application) -> Guard:
    """The guard of an application with its own authentication."""
    return Guard(application, SECRET, authenticates=True, clock=lambda: NOW_S)


def ask(
    guard: Guard, path: str = "/", method: str = "GET", host: str = "127.0.0.1:5000", **headers: str
) -> httpx.Response:
    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(app=guard)  # type: ignore[arg-type]  # ASGI, spelled otherwise
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1:5000"
        ) as client:
            return await client.request(method, path, headers={"host": host, **headers})

    return asyncio.run(asked())


def test_a_request_without_the_secret_does_not_reach_mlflow(
    mlflow: Guard, application: Application
) -> None:
    for headers in (
        {},
        {"authorization": "Basic d3Jvbmc6"},
        {"authorization": BASIC[:-1]},
        {"cookie": COOKIE[:-1]},
    ):
        answer = ask(mlflow, "/api/2.0/mlflow/experiments/search", "POST", **headers)
        assert answer.status_code == 401
        assert "`astraflow up` prints an address" in answer.text
    assert application.reached == []


@pytest.mark.parametrize(
    "headers", [{"authorization": BASIC}, {"cookie": COOKIE}, {"cookie": f"a=b; {COOKIE}; c=d"}]
)
def test_the_secret_or_the_cookie_gives_access_to_mlflow(
    mlflow: Guard, headers: dict[str, str]
) -> None:
    answer = ask(mlflow, "/api/2.0/mlflow/experiments/search", "POST", **headers)
    assert (answer.status_code, answer.text) == (200, "reached")


def test_the_health_check_needs_no_secret(mlflow: Guard) -> None:
    assert ask(mlflow, "/health").text == "reached"
    assert ask(mlflow, "/health/").status_code == 401


@pytest.mark.parametrize(
    "path",
    [
        *("/openapi.json", "/open%61pi.json", "/docs", "/docs/oauth2-redirect", "/redoc?x=1"),
        *("/api/openapi.json", "/api/docs", "/api/docs/oauth2-redirect", "/api/redoc"),
        *("/openapi.json%0A", "/api//openapi.json", "/api//docs%0A", "/docs/"),
    ],
)
def test_the_schema_of_the_api_is_served_to_nobody(
    prefect: Guard, application: Application, path: str
) -> None:
    """Prefect builds it anew for each request, before its own check."""
    assert ask(prefect, path).status_code == 404
    assert ask(prefect, path, authorization=BASIC).status_code == 404
    assert application.reached == []


def test_prefects_own_check_handles_requests_without_the_secret(prefect: Guard) -> None:
    assert ask(prefect, "/api/flows/filter", "POST").text == "reached"


@pytest.mark.parametrize(
    "host",
    [
        *(
            "evil.example",
            "evil.example:5000",
            "127.0.0.1.evil.example",
            "10.0.0.1:5000",
            "",
            "localhost.:1",
            "[::1]:5000",
        ),
        *(
            "localhost:5000/health?",
            "localhost:5000#",
            "localhost:5000@evil.example",
            "localhost:",
            "127.0.0.1:x",
        ),
    ],
)
def test_a_foreign_host_is_refused_even_with_the_secret(
    mlflow: Guard, prefect: Guard, application: Application, host: str
) -> None:
    for guard in (mlflow, prefect):
        for path in ("/", "/open", "/health"):
            assert ask(guard, path, host=host, authorization=BASIC).status_code == 403
    assert application.reached == []


@pytest.mark.parametrize(
    "host", ["127.0.0.1:5000", "localhost:5000", "LOCALHOST:5000", "localhost"]
)
def test_both_names_of_this_machine_are_accepted_as_host(mlflow: Guard, host: str) -> None:
    assert ask(mlflow, host=host, authorization=BASIC).text == "reached"


FOREIGN = [
    "http://evil.example",
    "http://evil.example:5000",
    "http://127.0.0.1:8000",
    "http://localhost",
    "https://127.0.0.1:5000",
    "http://127.0.0.1.evil.example:5000",
    "http://127.0.0.1:5000.evil.example",
    "null",
    "",
]


@pytest.mark.parametrize("origin", FOREIGN)
def test_a_page_of_another_origin_is_refused_even_with_the_secret(
    mlflow: Guard, prefect: Guard, application: Application, origin: str
) -> None:
    for guard in (mlflow, prefect):
        for path, method in (
            ("/", "POST"),
            ("/", "OPTIONS"),
            ("/open", "POST"),
            ("/health", "GET"),
        ):
            assert ask(guard, path, method, origin=origin, authorization=BASIC).status_code == 403
    assert application.reached == []


@pytest.mark.parametrize("origin", ["http://127.0.0.1:5000", "http://localhost:5000"])
def test_pages_of_the_same_origin_are_accepted(mlflow: Guard, origin: str) -> None:
    assert ask(mlflow, "/", "POST", origin=origin, cookie=COOKIE).text == "reached"


def test_a_request_with_two_hosts_is_refused(mlflow: Guard, application: Application) -> None:
    scope = {
        **{"type": "http", "method": "GET", "path": "/"},
        "headers": [
            (b"host", b"evil.example"),
            (b"host", b"127.0.0.1:5000"),
            (b"authorization", BASIC.encode()),
        ],
    }
    assert _sent(mlflow, scope)[0]["status"] == 403
    assert application.reached == []


def test_a_websocket_from_another_origin_is_closed_and_one_of_the_same_origin_is_passed_on(
    prefect: Guard, application: Application
) -> None:
    scope = {
        "type": "websocket",
        "path": "/api/events/out",
        "headers": [(b"host", b"127.0.0.1:4200")],
    }
    foreign = {**scope, "headers": [*scope["headers"], (b"origin", b"http://evil.example")]}
    assert [message["type"] for message in _sent(prefect, foreign)] == ["websocket.close"]
    assert application.reached == []
    own = {**scope, "headers": [*scope["headers"], (b"origin", b"http://127.0.0.1:4200")]}
    assert [message["type"] for message in _sent(prefect, own)] == ["websocket.accept"]


def test_a_websocket_without_the_secret_does_not_reach_mlflow(
    mlflow: Guard, application: Application
) -> None:
    scope = {"type": "websocket", "path": "/", "headers": [(b"host", b"127.0.0.1:4200")]}
    assert [message["type"] for message in _sent(mlflow, scope)] == ["websocket.close"]
    assert application.reached == []


def test_the_startup_event_is_passed_to_the_application(
    mlflow: Guard, application: Application
) -> None:
    _sent(mlflow, {"type": "lifespan"})
    assert application.reached == ["lifespan"]


def test_the_login_page_contains_no_secret_and_runs_only_its_own_script(
    prefect: Guard, application: Application
) -> None:
    page = ask(prefect, "/open")
    assert page.status_code == 200
    assert page.headers["content-security-policy"].startswith(
        "default-src 'none'; script-src 'sha256-"
    )
    assert page.headers["cache-control"] == "no-store"
    assert "0123456789" not in page.text
    assert application.reached == []


def test_a_ticket_gives_the_secret_to_prefects_page_and_only_a_cookie_to_mlflows(
    prefect: Guard, mlflow: Guard
) -> None:
    told = ask(prefect, "/open", "POST", authorization=f"Ticket {TICKET}")
    assert (told.status_code, told.text) == (200, BASIC.removeprefix("Basic "))
    kept = ask(mlflow, "/open", "POST", authorization=f"Ticket {TICKET}")
    assert (kept.status_code, kept.text) == (200, "")
    for answer in (told, kept):
        assert (
            answer.headers["set-cookie"]
            == f"{COOKIE}; Path=/; Max-Age=7776000; HttpOnly; SameSite=Strict"
        )


@pytest.mark.parametrize(
    "authorization",
    ["", "Ticket", "Ticket x", f"Ticket {TICKET}x", f"Bearer {TICKET}", f"Ticket {TICKET} "],
)
def test_without_a_valid_ticket_the_response_explains_how_to_get_one(
    prefect: Guard, authorization: str
) -> None:
    refused = ask(prefect, "/open", "POST", authorization=authorization)
    assert refused.status_code == 401
    assert (
        refused.text
        == "This address has expired, or belongs to another stack. `astraflow up` prints a new one.\n"
    )
    assert "set-cookie" not in refused.headers


def test_an_expired_ticket_is_refused(application: Application) -> None:
    later = Guard(application, SECRET, authenticates=True, clock=lambda: NOW_S + 26 * 3600)
    assert ask(later, "/open", "POST", authorization=f"Ticket {TICKET}").status_code == 401


def test_application_pages_may_not_send_to_other_hosts_and_keep_their_headers(
    mlflow: Guard,
) -> None:
    answer = ask(mlflow, authorization=BASIC)
    assert answer.headers["x-own"] == "1"
    assert (
        "connect-src 'self' data: blob: http://127.0.0.1:*"
        in answer.headers["content-security-policy"]
    )
    assert "frame-ancestors 'self'" in answer.headers["content-security-policy"]


def _sent(guard: Guard, scope: MutableMapping[str, Any]) -> list[MutableMapping[str, Any]]:
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("the guard reads no bodies")

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    asyncio.run(guard(scope, receive, send))
    return sent
