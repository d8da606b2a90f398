"""Ids of nights: their due time in UTC, to the minute."""

from datetime import UTC, datetime

from storage.errors import ConfigError
from storage.plain_names import quoted

FORM = "%Y%m%d-%H%M"


def night_id(due: datetime) -> str:
    """Return the id of the night that is due at this time. Example: `20260102-0200`."""
    return due.astimezone(UTC).strftime(FORM)


def due_s(night: str) -> float:
    """Return the Unix time at which a night is due; ConfigError for another form."""
    try:
        parsed = datetime.strptime(night, FORM).replace(tzinfo=UTC)
    except ValueError:
        parsed = None
    if parsed is None or night_id(parsed) != night or parsed.timestamp() < 0:
        raise ConfigError(
            f"{quoted(night)} is no night; write the due time in UTC as YYYYMMDD-HHMM, such as "
            "20260102-0200"
        )
    return parsed.timestamp()
