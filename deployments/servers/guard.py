"""ASGI middleware that guards the stack's Prefect and MLflow applications.

    request ─▶ Host of this machine? ─▶ Origin of this server, or none? ─▶ authenticated? ─▶ app
                      └─ no: 403               └─ no: 403                        └─ no: 401

The schema of Prefect's API is not served (404).

A page of another site cannot reach the server, neither under the site's own host name (DNS
rebinding: the Host is foreign) nor from its own address (the Origin is foreign). Prefect's
application authenticates requests itself; MLflow's does not, so the guard does. `/open` logs a
browser in: the page reads the ticket after the `#` of its address, sends it in a header, and opens
the target. The guard neither reads nor buffers the body of a request.
"""

import base64
import hashlib
import hmac
import re
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from deployments.servers import auth

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]

HOSTS = ("127.0.0.1", "localhost")
OPEN = "/open"
HEALTH = "/health"
NOT_SERVED = frozenset(
    prefix + path
    for prefix in ("", "/api")
    for path in ("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc")
)
"""FastAPI's pages about a server's API, of Prefect's application and of the one below /api. Each
request of a schema takes seconds of CPU time, for the first without the auth string, and the others
load scripts of other hosts. Prefect's own pages and clients request none of them.
"""
COOKIE_DAYS = 90
_PORT = re.compile(r"[0-9]{1,5}")
POLICY_VIOLATION = 1008

FOREIGN_HOST = "This server answers at 127.0.0.1 and localhost only.\n"
FOREIGN_ORIGIN = "This server refuses requests from pages of other addresses.\n"
UNAUTHORIZED = (
    "This server requires the stack's auth string. "
    "`astraflow up` prints an address that logs a browser in.\n"
)
NO_SUCH_PAGE = "This server does not serve the schema of its API.\n"
EXPIRED = (
    "This address has expired, or belongs to another stack. `astraflow up` prints a new one.\n"
)

SCRIPT = """
const [, ticket, target] = /^#([^/]*)(.*)$/.exec(location.hash) ?? [null, "", ""];
history.replaceState(null, "", "/open");
const home = new URL("/", location.origin);
const pageOf = (path) => {
  try {
    const wanted = new URL(path || "/", home);
    return wanted.origin === home.origin ? wanted : home;
  } catch {
    return home;
  }
};
const request = {method: "POST", headers: {Authorization: `Ticket ${ticket}`}};
fetch("/open", request).then(async (response) => {
  const text = await response.text();
  if (response.ok) {
    if (text) localStorage.setItem("prefect-password", text);
    location.replace(pageOf(target));
  } else {
    document.body.textContent = text;
  }
}).catch((error) => {
  document.body.textContent = `This page could not log in (${error.message}). `
    + "Is the server running, and may this site store data in the browser?";
});
"""
"""The login page's script. Prefect's pages read the auth string, in base64, from the browser's
storage for this address."""

PAGE = (
    f'<!doctype html><meta charset="utf-8"><title>AstraFlow</title><body><script>{SCRIPT}</script>'
)
_SCRIPT_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
_PAGE_POLICY = (
    f"default-src 'none'; script-src 'sha256-{_SCRIPT_HASH}'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = (
    (b"content-type", b"text/html; charset=utf-8"),
    (b"content-security-policy", _PAGE_POLICY.encode()),
)
POLICY = (
    b"content-security-policy",
    b"frame-ancestors 'self'; connect-src 'self' data: blob: "
    b"http://127.0.0.1:* http://localhost:* ws://127.0.0.1:* ws://localhost:*",
)
"""For the applications' pages: they send nothing to other hosts, such as telemetry, and no other
page embeds them."""
SAFE_HEADERS = (
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)


class Guard:
    """The middleware of one server."""

    def __init__(
        self,
        app: App,
        auth_string: str,
        authenticates: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Wrap an application.

        `authenticates`: the application checks the auth string itself, and its pages read it from
        the browser's storage. Otherwise the guard checks the header or the cookie.
        """
        self._app = app
        self._auth_string = auth_string
        self._authenticates = authenticates
        self._clock = clock
        self._basic = auth.basic(auth_string).encode()
        self._cookie = "=".join(auth.cookie(auth_string)).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        host, origin, authorization, cookies = _read(scope["headers"])
        if not _is_local(host):
            await _refuse(scope, send, 403, FOREIGN_HOST)
        elif origin is not None and not _is_own(origin, host):
            await _refuse(scope, send, 403, FOREIGN_ORIGIN)
        elif _is_not_served(scope["path"]):
            await _refuse(scope, send, 404, NO_SUCH_PAGE)
        elif scope["type"] == "http" and scope["path"] == OPEN:
            await self._open(scope, send, authorization)
        elif (
            self._authenticates
            or scope["path"] == HEALTH
            or self._is_authenticated(authorization, cookies)
        ):
            await self._app(scope, receive, _with_policy(send))
        else:
            await _refuse(scope, send, 401, UNAUTHORIZED)

    def _is_authenticated(self, authorization: bytes, cookies: bytes) -> bool:
        if hmac.compare_digest(authorization, self._basic):
            return True
        return any(hmac.compare_digest(part.strip(), self._cookie) for part in cookies.split(b";"))

    async def _open(self, scope: Scope, send: Send, authorization: bytes) -> None:
        if scope["method"] != "POST":
            await _respond(send, 200, PAGE, PAGE_HEADERS)
            return
        scheme, _, ticket = authorization.decode("latin-1").partition(" ")
        if scheme != "Ticket" or not auth.is_valid(ticket, self._auth_string, self._clock()):
            await _respond(send, 401, EXPIRED)
            return
        name, value = auth.cookie(self._auth_string)
        attributes = f"Path=/; Max-Age={COOKIE_DAYS * 86_400}; HttpOnly; SameSite=Strict"
        entry = self._basic.removeprefix(b"Basic ").decode() if self._authenticates else ""
        set_cookie = (b"set-cookie", f"{name}={value}; {attributes}".encode())
        await _respond(send, 200, entry, (set_cookie,))


def _read(headers: Headers) -> tuple[bytes, bytes | None, bytes, bytes]:
    """Return Host, Origin, Authorization and cookies of a request; no Host where it has two."""
    host, origin, authorization, cookies = b"", None, b"", b""
    num_hosts = 0
    for name, value in headers:
        if name == b"host":
            host, num_hosts = value, num_hosts + 1
        elif name == b"origin":
            origin = value
        elif name == b"authorization":
            authorization = value
        elif name == b"cookie":
            cookies = value
    return host if num_hosts == 1 else b"", origin, authorization, cookies


def _is_not_served(path: str) -> bool:
    """Return whether a router would find a page of NOT_SERVED: it ignores a newline at the end, and
    slashes after the prefix of another application.
    """
    return "/" + "/".join(filter(None, path.strip().split("/"))) in NOT_SERVED


def _is_local(host: bytes) -> bool:
    """Return whether a Host is one of HOSTS, with or without a port, and nothing else.

    Applications build a request's URL from it: `localhost:4200/health?` would change the path.
    """
    name, colon, port = host.decode("latin-1").partition(":")
    return name.lower() in HOSTS and (not colon or _PORT.fullmatch(port) is not None)


def _is_own(origin: bytes, host: bytes) -> bool:
    """Return whether a page of this server sent the request: one of HOSTS and the same port."""
    own_port = host.decode("latin-1").partition(":")[2] or "80"
    try:
        parts = urlsplit(origin.decode("latin-1"))
        return (
            parts.scheme == "http" and parts.hostname in HOSTS and str(parts.port or 80) == own_port
        )
    except ValueError:
        return False


def _with_policy(send: Send) -> Send:
    async def send_with_policy(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), POLICY]
        await send(message)

    return send_with_policy


async def _refuse(scope: Scope, send: Send, status: int, message: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": message.strip()})
    else:
        await _respond(send, status, message)


async def _respond(send: Send, status: int, body: str, headers: Headers = ()) -> None:
    content = body.encode()
    content_type = (
        ()
        if any(name == b"content-type" for name, _ in headers)
        else ((b"content-type", b"text/plain; charset=utf-8"),)
    )
    length = (b"content-length", str(len(content)).encode())
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [*content_type, length, *SAFE_HEADERS, *headers],
        }
    )
    await send({"type": "http.response.body", "body": content})
