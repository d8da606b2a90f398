"""Errors of Prefect's client, by what becomes of the request."""

import httpx
from prefect.exceptions import PrefectHTTPStatusError

UNANSWERED = (httpx.TransportError, PrefectHTTPStatusError, TimeoutError)
"""The request was not done; it may succeed later."""
BAD_CONTENT = (400, 413, 422)
"""HTTP status codes of a request that will never succeed."""


def is_bad_content(error: Exception) -> bool:
    """Return whether the server refuses what the request contains."""
    return isinstance(error, PrefectHTTPStatusError) and error.response.status_code in BAD_CONTENT
