"""Prefect's client for one server. A server that is not there, or an address that is none, is a sentence for a person."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from storage.errors import ConfigError


@contextmanager
def connected(api_url: str) -> Iterator[Any]:
    """Raises ConfigError when the server does not answer."""
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    try:
        with temporary_settings({PREFECT_API_URL: api_url}), get_client(sync_client=True) as client:
            yield client
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise ConfigError(
            f"PREFECT_API_URL={api_url} is no address of a Prefect server ({error}); write it as http://HOST:4200/api"
        ) from error
    except httpx.TransportError as error:
        raise ConfigError(
            f"the Prefect server at {api_url} does not answer ({type(error).__name__}); "
            "`astraflow up` starts a local one, PREFECT_API_URL names another"
        ) from error
