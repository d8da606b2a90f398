"""Prefect's settings for a client of one server."""

import os
from typing import Any

AUTH_STRING = "PREFECT_API_AUTH_STRING"
REFUSED = (401, 403)
"""What a server answers that does not know the client."""


def settings_for(api_url: str) -> dict[Any, Any]:
    """For `temporary_settings`: the server, and the auth string that the environment has now.
    Prefect reads the environment once, when it is imported, and a command may learn the auth string
    later.
    """
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL

    auth_string = (
        {PREFECT_API_AUTH_STRING: os.environ[AUTH_STRING]} if AUTH_STRING in os.environ else {}
    )
    return {PREFECT_API_URL: api_url, **auth_string}
