"""Checks of the addresses of servers and stores: none may contain a credential.

Addresses are stored with runs, shown on pages and logged.
"""

import re
from collections.abc import Callable
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
"""Environment variable of an address → where its credentials belong."""

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}://\S+")
"""An address in a text."""
_AS_PATH = re.compile(r"\b(https?|ftp|s3|gs|hf|postgresql|mysql):/(?=[^\s/])", re.IGNORECASE)
"""The start of an address that was taken for a path, which has one slash."""
_SECRET = re.compile(
    r"passw|pwd|token|secret|credential|signature|api[_-]?key|access[_-]?key|bearer|jwt|^auth|^(key|sig|sas|pass|pw)$",
    re.IGNORECASE,
)
"""Names of query parameters whose values are secrets."""
_WITH_PATHS = ("file", "memory", "sqlite", "s3")
"""Schemes whose paths may contain an @."""
_SHORTENED = re.compile(r"([a-z][a-z0-9+.-]*:/|//)[^/]*@", re.IGNORECASE)
"""The start of an address with a user, with a scheme and one slash, or with two slashes alone."""
_PARAMETERS = re.compile(r"[?&#;]")
"""Characters before a parameter."""
_NAMES = re.compile(r"([^?&#;,\s={}]{1,99})\s{0,9}=")
"""Names in a parameter's value, as in a connection string of ODBC: `Server=db;Pwd=…`."""
_NESTED_MAX = 3
"""Addresses in an address, each a parameter of the one before, that are searched."""


def holds_credentials(url: str, nested_max: int = _NESTED_MAX) -> bool:
    """Return whether the address has a user, or a parameter that is named like a secret, has such
    names in its value, or is such an address itself.

    True where more than `nested_max` addresses are in one another.
    """
    if nested_max < 0:
        return True
    scheme, separator, rest = _with_slashes(url).partition("://")
    if not separator:
        user, at, _ = url.partition("/")[0].rpartition("@")
        return (bool(at) and ":" in user) or _SHORTENED.match(url) is not None
    scheme = scheme.lower()
    # A password may contain a slash that is not escaped, so the whole rest counts where it can.
    authority = rest.partition("/")[0] if scheme in _WITH_PATHS else rest
    has_user = "@" in authority or (scheme == "s3" and ":" in authority)
    return has_user or any(
        any(map(_SECRET.search, (name, *_NAMES.findall(value))))
        or ("://" in value and holds_credentials(value, nested_max - 1))
        for name, value in map(_name_and_value, _PARAMETERS.split(rest)[1:])
    )


def _name_and_value(parameter: str) -> tuple[str, str]:
    name, _, value = parameter.partition("=")
    return unquote(name), unquote(value)


def without_credentials(url: str) -> str:
    """Return the address as it may be shown; one without credentials is unchanged."""
    if not holds_credentials(url):
        return url
    url = _with_slashes(url)
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    location = _PARAMETERS.split(rest.rpartition("@")[2])[0]
    if scheme.lower() == "s3" and ":" in location.partition("/")[0]:
        location = "…"  # an access key and its secret in the place of a bucket
    return f"{scheme}{separator}{location}"


def text_without_credentials(text: str) -> str:
    """Return a text with each address in it as it may be shown."""
    return _ADDRESS.sub(lambda address: without_credentials(address[0]), _with_slashes(text))


def _with_slashes(text: str) -> str:
    return _AS_PATH.sub(r"\1://", text)


def refusing_credentials(advice: str) -> Callable[[str], str]:
    """Return the check of a setting that raises ValueError, with the advice, for a credential."""

    def check(value: str) -> str:
        if holds_credentials(value):
            raise ValueError(
                f"contains a user, a password or a token, and recipes are stored; {advice}"
            )
        return value

    return check


check_local_path = refusing_credentials("write a path of this machine")


def check_server_address(variable: str, url: str) -> None:
    """Raise ConfigError when `url`, the value of `variable`, is not that of an HTTP server."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bracket that is not closed, a port that is not a number
        is_valid = False
    if not is_valid or not url.isprintable() or " " in url:
        raise ConfigError(
            f"{variable}={without_credentials(url)} is not the address of a server; write it as "
            "http://HOST:4200/api, or unset it"
        )


def check_no_credentials(variable: str, url: str) -> None:
    """Raise ConfigError when `url`, the value of `variable`, has a user, a password or a token."""
    if holds_credentials(url):
        raise ConfigError(
            f"{variable} contains a credential beside the address {without_credentials(url)}, and "
            "addresses are stored and shown; "
            f"remove it, and set {VARIABLES[variable]} instead"
        )
