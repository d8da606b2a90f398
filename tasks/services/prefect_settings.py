"""Prefect's settings and client for one server, and the errors of both in words."""

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import Any

from storage.errors import ConfigError
from storage.store.addresses import without_credentials

AUTH_STRING = "PREFECT_API_AUTH_STRING"
REFUSED = (401, 403)
"""HTTP status codes of a server that refuses the client's credentials."""
SERVER_ERROR = 500
"""The lowest HTTP status code of a server that fails."""
UNUSABLE = (ValueError, OSError, RuntimeError)
"""Errors of Prefect when it reads its settings; RuntimeError: the user has no home folder."""
IMPORT_FAILURE = "Failed to initialize plugins"
"""Begins what Prefect prints when it is imported with settings that it cannot use."""
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
"""Variables of proxies, which may also be in lower case."""
TRY_LATER = (408, 429)
"""HTTP status codes of a server that is busy."""


@dataclass(frozen=True)
class RequestLimits:
    """How long a request waits. Example: `RequestLimits(timeout_s=30.0, retries=2)`."""

    timeout_s: float
    retries: int


COMMAND = RequestLimits(timeout_s=30.0, retries=2)
"""For commands: a person waits, and a busy local server may need a retry. Prefect's own limits,
which services keep, allow seven minutes.
"""
POLL = RequestLimits(timeout_s=5.0, retries=0)
"""For a request that is repeated every few seconds."""


def settings_for(api_url: str, limits: RequestLimits | None = None) -> dict[Any, Any]:
    """Return the settings of a client of this server, for `temporary_settings`.

    The auth string is read from the environment now: Prefect reads the environment once, when it is
    imported, and a command may set it later. Limits that the user has set take precedence.
    """
    from prefect.settings import (
        PREFECT_API_AUTH_STRING,
        PREFECT_API_REQUEST_TIMEOUT,
        PREFECT_API_URL,
        PREFECT_CLIENT_MAX_RETRIES,
    )

    settings: dict[Any, Any] = {PREFECT_API_URL: api_url}
    if AUTH_STRING in os.environ:
        settings[PREFECT_API_AUTH_STRING] = os.environ[AUTH_STRING]
    if limits is not None:
        limited = {
            PREFECT_API_REQUEST_TIMEOUT: limits.timeout_s,
            PREFECT_CLIENT_MAX_RETRIES: limits.retries,
        }
        settings |= {key: value for key, value in limited.items() if key.name not in os.environ}
    return settings


def import_prefect() -> None:
    """Import Prefect, which reads its settings then.

    Raises ConfigError when it cannot read them, here or in `client_of`. What Prefect prints about
    such an error at its import has a traceback or values of settings in it, and is dropped.
    """
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            import prefect.client.orchestration
            import prefect.settings  # noqa: F401  # the import is the purpose
    except UNUSABLE as error:
        raise _unusable_settings(error) from None
    if IMPORT_FAILURE not in (text := printed.getvalue()):
        sys.stderr.write(text)


@contextmanager
def client_of(api_url: str, limits: RequestLimits | None = None) -> Iterator[Any]:
    """Yield a client of this server. Raises ConfigError when Prefect cannot use its settings.

    Prefect's `get_client` would return the client of a flow run that is in progress in this
    process, which may be one of another server.
    """
    import_prefect()
    import httpx
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_KEY, temporary_settings

    with ExitStack() as entered:
        try:
            entered.enter_context(temporary_settings(settings_for(api_url, limits)))
            client = entered.enter_context(
                SyncPrefectClient(
                    api_url,
                    auth_string=PREFECT_API_AUTH_STRING.value(),
                    api_key=PREFECT_API_KEY.value(),
                    httpx_settings={"event_hooks": {"response": [_refuse_undecodable]}},
                )
            )
        except httpx.InvalidURL as error:
            raise _unusable_address(api_url, error) from None
        except (*UNUSABLE, ImportError) as error:  # ImportError: a proxy that needs a package
            raise _unusable_settings(error) from None
        yield client


def _refuse_undecodable(response: Any) -> None:
    """Raise httpx's DecodingError for JSON that is too deep, or has a number with too many digits:
    the json module's errors for it could also be those of a fault in this process.
    """
    import httpx

    response.read()
    try:
        response.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        return  # a page of HTML, or nothing: what needs JSON raises it again
    except (RecursionError, ValueError) as error:
        raise httpx.DecodingError(str(error), request=response.request) from error


def strange_answers() -> tuple[type[Exception], ...]:
    """Return the errors of Prefect's client for a response that is not of Prefect's API."""
    import httpx
    from prefect.exceptions import ObjectNotFound
    from pydantic import ValidationError

    return (
        *(httpx.HTTPStatusError, ObjectNotFound, httpx.TooManyRedirects, httpx.DecodingError),
        *(json.JSONDecodeError, UnicodeDecodeError, ValidationError),
        *(AttributeError, TypeError, KeyError),
    )


def strange_answer(api_url: str, error: Exception) -> str:
    """Return the message for one of `strange_answers`."""
    import httpx

    shown, what = without_credentials(api_url), type(error).__name__
    if isinstance(error, httpx.HTTPStatusError):
        what = f"{error.response.status_code} {error.response.reason_phrase}".strip()
        if error.response.status_code >= SERVER_ERROR:
            return f"the server at {shown} fails ({what}); its log shows why"
    return (
        f"{shown} does not answer like a Prefect server of this release ({what}); write the "
        "address as http://HOST:4200/api"
    )


def _unusable_address(api_url: str, error: Exception) -> ConfigError:
    """Return the error for the server's address, or for that of a proxy: then without the text,
    which has a part of it, and this may be one of a password.
    """
    import httpx

    try:
        httpx.URL(api_url)
    except httpx.InvalidURL:
        return ConfigError(
            f"PREFECT_API_URL={without_credentials(api_url)} is not the address of a Prefect "
            f"server ({error}); write it as http://HOST:4200/api"
        )
    return ConfigError(
        f"Prefect cannot use the address of a proxy; correct or unset {', '.join(PROXIES)}"
    )


def _unusable_settings(error: Exception) -> ConfigError:
    """Return the error for settings that Prefect cannot use; their values may be secrets."""
    from pydantic import ValidationError

    remedy = (
        "correct the PREFECT_… variables, prefect.toml, .env, profiles.toml, SSL_CERT_FILE or the "
        "variables of a proxy"
    )
    if isinstance(error, ValidationError):
        reason = "; ".join(
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
            for fault in error.errors(include_url=False, include_input=False)
        )
        remedy = "correct them in the PREFECT_… variables, prefect.toml, .env or profiles.toml"
    else:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, RuntimeError):
            remedy = f"set HOME to the user's home folder, or {remedy}"
    return ConfigError(f"Prefect cannot use its settings ({reason}); {remedy}")
