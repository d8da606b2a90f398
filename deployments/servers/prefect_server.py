"""Run Prefect's server behind a `Guard`, in place of `prefect server start`.

It listens on the loopback interface only, requires an auth string, and begins transactions on
SQLite with BEGIN IMMEDIATE.

Prefect begins them deferred. When two transactions read first and write later, SQLite refuses the
second at once; the client gets a 503 and backs off for up to 32 s, so that launching five services
took a minute instead of a second. With BEGIN IMMEDIATE the second transaction waits. The patched
method is private to Prefect: when it is missing, the server runs unpatched, with a warning.
"""

import argparse
import inspect
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from deployments.servers.guard import Guard
from deployments.servers.listening import listen

AUTH_STRING = "PREFECT_SERVER_API_AUTH_STRING"
_PARAMETERS = ["self", "session", "with_for_update"]


def begin_immediately() -> bool:
    """Patch Prefect in this process; return False when the method to patch is not as expected."""
    from prefect.server.database import configurations

    begin_mode = getattr(configurations, "SQLITE_BEGIN_MODE", None)
    sqlite: Any = getattr(configurations, "AioSqliteConfiguration", None)
    stock = getattr(sqlite, "begin_transaction", None)
    if (
        begin_mode is None
        or stock is None
        or list(inspect.signature(stock).parameters) != _PARAMETERS
    ):
        return False

    @asynccontextmanager
    async def begin_transaction(
        self: Any, session: Any, with_for_update: bool = False
    ) -> AsyncGenerator[Any, None]:
        token = begin_mode.set("IMMEDIATE")
        try:
            async with session.begin() as transaction:
                yield transaction
        finally:
            begin_mode.reset(token)

    sqlite.begin_transaction = begin_transaction
    return True


def main(arguments: list[str]) -> None:
    """`python -m deployments.servers.prefect_server --port 4200`."""
    parser = argparse.ArgumentParser(prog="deployments.servers.prefect_server")
    parser.add_argument("--port", type=int, required=True)
    port: int = parser.parse_args(arguments).port
    auth_string = os.environ.get(AUTH_STRING)
    if not auth_string:
        sys.exit(
            f"{AUTH_STRING} is not set; without it every process that reaches this server could "
            "run commands; use `astraflow up`"
        )
    listener = listen(port)
    if not begin_immediately():
        print(
            "warning: this release of Prefect cannot be patched to BEGIN IMMEDIATE; launches on "
            "SQLite may be slow",
            file=sys.stderr,
        )
    import uvicorn
    from prefect.server.api.server import create_app
    from prefect.settings import get_current_settings

    server = get_current_settings().server
    guarded = Guard(create_app(final=True), auth_string, authenticates=True)
    settings = uvicorn.Config(
        guarded,
        timeout_keep_alive=server.api.keepalive_timeout,
        ws_ping_interval=server.api.websocket_ping_interval,
        ws_ping_timeout=server.api.websocket_ping_timeout,
        log_level=server.logging_level.lower(),
    )
    uvicorn.Server(settings).run(sockets=[listener])


if __name__ == "__main__":
    main(sys.argv[1:])
