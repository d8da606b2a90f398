"""Runs Prefect's server in place of `prefect server start`, with one thing mended: transactions on SQLite begin
immediately.

Prefect begins them deferred. Two that read first and write later then collide, SQLite refuses the second at once, the
client gets a 503 and backs off for up to 32 s: launching a handful of services took a minute instead of a second. With
BEGIN IMMEDIATE the second waits its turn. The place to mend is private to Prefect: when it is gone, the stock server
runs, with a warning.
"""

import inspect
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

_PARAMETERS = ["self", "session", "with_for_update"]


def begin_immediately() -> bool:
    """Mends Prefect in this process; False when Prefect no longer looks the way this needs."""
    from prefect.server.database import configurations

    begin_mode = getattr(configurations, "SQLITE_BEGIN_MODE", None)
    sqlite: Any = getattr(configurations, "AioSqliteConfiguration", None)
    stock = getattr(sqlite, "begin_transaction", None)
    if begin_mode is None or stock is None or list(inspect.signature(stock).parameters) != _PARAMETERS:
        return False

    @asynccontextmanager
    async def begin_transaction(self: Any, session: Any, with_for_update: bool = False) -> AsyncGenerator[Any, None]:
        token = begin_mode.set("IMMEDIATE")
        try:
            async with session.begin() as transaction:
                yield transaction
        finally:
            begin_mode.reset(token)

    sqlite.begin_transaction = begin_transaction
    return True


def main(arguments: list[str]) -> None:
    """`python -m deployments.prefect_server --host 127.0.0.1 --port 4200`: the arguments of `prefect server start`."""
    if not begin_immediately():
        print("warning: this Prefect cannot BEGIN IMMEDIATE; expect slow launches on SQLite", file=sys.stderr)
    from prefect.cli import app

    sys.argv = ["prefect", "server", "start", *arguments]
    app()


if __name__ == "__main__":
    main(sys.argv[1:])
