"""Prefect's client for one server, with connection errors as ConfigError."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from storage.errors import ConfigError
from storage.store.addresses import without_credentials
from tasks.services.prefect_settings import REFUSED, settings_for


@contextmanager
def connected(api_url: str) -> Iterator[Any]:
    """Yield a client. Raises ConfigError when the server does not respond or refuses access."""
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.settings import temporary_settings

    shown = without_credentials(api_url)

    try:
        with temporary_settings(settings_for(api_url)), get_client(sync_client=True) as client:
            yield client
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise ConfigError(
            f"PREFECT_API_URL={shown} is not the address of a Prefect server ({error}); write it "
            "as http://HOST:4200/api"
        ) from error
    except httpx.TransportError as error:
        raise ConfigError(
            f"the Prefect server at {shown} does not respond ({type(error).__name__}); "
            "`astraflow up` starts a local one, PREFECT_API_URL names another"
        ) from error
    except httpx.HTTPStatusError as error:
        if error.response.status_code not in REFUSED:
            raise
        raise ConfigError(
            f"the Prefect server at {shown} refuses this command ({error.response.status_code}); "
            "set PREFECT_API_AUTH_STRING or PREFECT_API_KEY to the server's, or run "
            "`astraflow down` and `astraflow up` if it is the local stack's"
        ) from error
