"""Ids of nights and the times that they name."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from storage.errors import ConfigError
from tasks.recurring.due_time import due_s, night_id


def test_an_id_is_the_due_time_in_utc() -> None:
    east = timezone(timedelta(hours=5))
    due = datetime(2026, 1, 2, 2, 0, 59, tzinfo=UTC)
    assert night_id(due) == night_id(due.astimezone(east)) == "20260102-0200"
    assert due_s("20260102-0200") == datetime(2026, 1, 2, 2, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    "night", ["", "20260102", "2026-01-02", "20260102-2500", "20260230-0200", "19691231-2359", "202612-0200", "x\x1b"]
)  # fmt: skip
def test_another_form_is_refused(night: str) -> None:
    with pytest.raises(ConfigError, match="is no night; write the due time in UTC"):
        due_s(night)
