"""Addresses of servers and stores, which are stored with runs, shown on pages and logged: none of
them holds a credential.
"""

import re
from urllib.parse import unquote, urlsplit

from storage.errors import ConfigError

VARIABLES = {
    "PREFECT_API_URL": "PREFECT_API_AUTH_STRING or PREFECT_API_KEY",
    "MLFLOW_TRACKING_URI": (
        "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, "
        "or for a Postgres database PGUSER and PGPASSWORD,"
    ),
    "ASTRAFLOW_STORE": "the AWS_… variables or a profile of ~/.aws",
}
"""Variable that holds an address → where the credentials for it belong."""

_SECRET = re.compile(
    r"passw|pwd|token|secret|credential|signature|api_?key|access_?key|^auth|^(key|sig|pass|pw)$",
    re.IGNORECASE,
)
"""Names of parameters whose values are secrets."""
_WITH_PATHS = ("file", "memory", "sqlite", "s3")
"""Schemes of places whose paths may hold an @."""
_SHORTENED = re.compile(r"([a-z][a-z0-9+.-]*:/|//)[^/]*@|[^/]*:[^/]*@", re.IGNORECASE)
"""The beginning of an address without a scheme, or with one slash after it, that has a user."""
_PARAMETERS = re.compile(r"[?&#;]")
"""What a parameter may follow."""


def holds_credentials(url: str) -> bool:
    """Whether there is a user before the host, or a parameter that is named like a secret."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return _SHORTENED.match(url) is not None
    kind = scheme.lower()
    place = (
        rest.partition("/")[0] if kind in _WITH_PATHS else rest
    )  # a password may hold a slash that nobody quoted
    user = "@" in place or (kind == "s3" and ":" in place)
    return user or any(
        _SECRET.search(unquote(one.partition("=")[0])) for one in _PARAMETERS.split(rest)[1:]
    )


def without_credentials(url: str) -> str:
    """The address as it may be shown. One without credentials stays as it is."""
    if not holds_credentials(url):
        return url
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    place = _PARAMETERS.split(rest.rpartition("@")[2])[0]
    if (
        scheme.lower() == "s3" and ":" in place.partition("/")[0]
    ):  # a key and its secret, where only a bucket belongs
        place = "…"
    return f"{scheme}{separator}{place}"


def check_server_address(variable: str, url: str) -> None:
    """Raises ConfigError when what `variable` holds cannot be the address of an HTTP server."""
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bracket that is not closed, a port that is no number
        fits = False
    if not fits or not url.isprintable() or " " in url:
        raise ConfigError(
            f"{variable}={without_credentials(url)} is no address of a server; write it as "
            "http://HOST:4200/api, or unset it"
        )


def check_no_credentials(variable: str, url: str) -> None:
    """Raises ConfigError when the address that `variable` holds has a user, a password or a token
    in it.
    """
    if holds_credentials(url):
        raise ConfigError(
            f"{variable} holds a credential beside the address {without_credentials(url)}, and "
            "addresses are stored and shown; "
            f"take it out, and set {VARIABLES[variable]} instead"
        )
