"""Prefect's own database classes, mended: the one place that leans on something private to Prefect."""

import pytest
from prefect.server.database import configurations

from deployments import prefect_server


class _Session:
    """Stands for a SQLAlchemy session; remembers how its transaction was to begin."""

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


def test_a_prefect_that_looks_different_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def other(self: object, session: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(configurations.AioSqliteConfiguration, "begin_transaction", other)
    assert not prefect_server.begin_immediately()
    assert configurations.AioSqliteConfiguration.begin_transaction is other
