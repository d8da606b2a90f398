"""Fixtures of the tests that play contests."""

from collections.abc import Iterator

import pytest

from tests.support.runs.contestants import SkilledEngine


@pytest.fixture
def no_requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No engine has recorded a request, and none fails."""
    SkilledEngine.forget()
    monkeypatch.setattr(SkilledEngine, "fails_on", "")
    yield
    SkilledEngine.forget()
