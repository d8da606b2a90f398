"""Prefect's client for one server, with its errors as ConfigError."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from storage.errors import ConfigError
from storage.store.addresses import without_credentials
from tasks.services.prefect_settings import (
    COMMAND,
    REFUSED,
    SERVER_ERROR,
    TRY_LATER,
    RequestLimits,
    client_of,
    import_prefect,
    strange_answer,
    strange_answers,
)


class UnavailableError(ConfigError):
    """The server does not respond, is busy or fails; it may respond later."""


@contextmanager
def connected(api_url: str, limits: RequestLimits = COMMAND) -> Iterator[Any]:
    """Yield a client.

    Raises ConfigError when the server does not respond (UnavailableError), refuses access or is not
    one of Prefect, and when Prefect cannot use its settings.
    """
    import_prefect()
    import httpx

    shown = without_credentials(api_url)

    try:
        with client_of(api_url, limits) as client:
            yield client
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise ConfigError(
            f"PREFECT_API_URL={shown} is not the address of a Prefect server ({error}); write it "
            "as http://HOST:4200/api"
        ) from error
    except httpx.TransportError as error:
        raise UnavailableError(
            f"the Prefect server at {shown} does not respond ({type(error).__name__}); "
            "`astraflow up` starts a local one, PREFECT_API_URL names another"
        ) from error
    except strange_answers() as error:
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in REFUSED:
            raise ConfigError(
                f"the Prefect server at {shown} refuses this command "
                f"({error.response.status_code}); "
                "set PREFECT_API_AUTH_STRING or PREFECT_API_KEY to the server's, or run "
                "`astraflow down` and `astraflow up` if it is the local stack's"
            ) from error
        status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 0
        kind = UnavailableError if status in TRY_LATER or status >= SERVER_ERROR else ConfigError
        raise kind(strange_answer(api_url, error)) from error
