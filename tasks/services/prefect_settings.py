"""Prefect's settings for a client of one server."""

import os
from typing import Any

AUTH_STRING = "PREFECT_API_AUTH_STRING"
REFUSED = (401, 403)
"""HTTP status codes of a server that refuses the client's credentials."""


def settings_for(api_url: str) -> dict[Any, Any]:
    """Return the settings of a client of this server, for `temporary_settings`.

    The auth string is read from the environment now: Prefect reads the environment once, when it is
    imported, and a command may set it later.
    """
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL

    auth_string = (
        {PREFECT_API_AUTH_STRING: os.environ[AUTH_STRING]} if AUTH_STRING in os.environ else {}
    )
    return {PREFECT_API_URL: api_url, **auth_string}
