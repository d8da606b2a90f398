"""The auth string of the local stack: a random secret that both of its servers require.

`astraflow up` creates it, and `astraflow down` deletes it.

    HOME/auth ─┬─▶ both servers, which compare it with the header of a request
               ├─▶ commands, workers and flow runs, in their environment; never in a work pool
               ├─▶ prefect.toml, for Prefect's own command
               └─▶ a ticket in each printed address of a page, for the browser

It has the form `user:password` of HTTP's basic authentication, which Prefect and MLflow both use. A
ticket is derived from it and expires after a day, so that a terminal's log does not contain the
secret.
"""

import base64
import hashlib
import hmac
import os
import secrets
import time

from deployments.paths import Home, open_regular, private_file
from storage.errors import ConfigError

USER = "astraflow"
TICKET_HOURS = 24
_HOUR_S = 3600
_MAC_BYTES = 12


def read(home: Home) -> str | None:
    """Return the home's auth string; None when there is no file.

    Raises ConfigError for a file without an auth string, and for one of another user, who can
    read it.
    """
    try:
        with open(home.auth, opener=open_regular) as file:
            owner = os.fstat(file.fileno()).st_uid
            auth_string = file.read().strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{home.auth} cannot be read ({error}); run `astraflow down`, then `astraflow up`"
        ) from None
    if owner != os.geteuid():
        raise ConfigError(
            f"{home.auth} belongs to another user; delete it, then run `astraflow up`"
        )
    user, _, password = auth_string.partition(":")
    if user != USER or not password:
        raise ConfigError(
            f"{home.auth} contains no auth string; run `astraflow down`, then `astraflow up`"
        )
    return auth_string


def read_or_empty(home: Home) -> str:
    """Return the home's auth string; the empty string where it cannot be read, since `down` must
    work without it.
    """
    try:
        return read(home) or ""
    except ConfigError:
        return ""


def create(home: Home) -> str:
    """Return the home's auth string, creating it when there is none.

    Raises ConfigError where the file exists without being an auth string.
    """
    if (existing := read(home)) is not None:
        return existing
    auth_string = f"{USER}:{secrets.token_urlsafe(32)}"
    try:
        with private_file(home.auth, "x") as file:
            file.write(f"{auth_string}\n")
    except ConfigError:  # the disk is full; what was written is no auth string
        home.auth.unlink(missing_ok=True)
        raise
    except FileExistsError:
        raise ConfigError(
            f"{home.auth} is a link to a missing file; delete it, then run `astraflow up`"
        ) from None
    return auth_string


def digest(auth_string: str) -> str:
    """Return a digest that tells two auth strings apart and reveals neither."""
    return hashlib.sha256(auth_string.encode()).hexdigest()[:16]


def basic(auth_string: str) -> str:
    """Return the value of the header Authorization."""
    return f"Basic {base64.b64encode(auth_string.encode()).decode()}"


def cookie(auth_string: str) -> tuple[str, str]:
    """Return the name and value of the cookie that gives access to MLflow's page and nothing else.

    Browsers send cookies of 127.0.0.1 to all of its ports, so the name differs between stacks.
    """
    return f"astraflow-{_mac(auth_string, 'cookie name')[:8]}", _mac(auth_string, "cookie")


def page(base_url: str, auth_string: str, target: str = "/", now_s: float | None = None) -> str:
    """Return the address of a page that logs the browser in to our server and opens `target`.

    Example: `http://127.0.0.1:4200/open#78a5c.3q2-7wAAB3RlLWt2/runs/flow-run/…`. Browsers do not
    send the part after the `#`.
    """
    last_hour = int((time.time() if now_s is None else now_s) // _HOUR_S) + TICKET_HOURS
    return f"{base_url}/open#{last_hour:x}.{_mac(auth_string, f'ticket {last_hour:x}')}{target}"


def is_valid(ticket: str, auth_string: str, now_s: float) -> bool:
    """Return whether a ticket was derived from this auth string and has not expired."""
    hour, _, mac = ticket.partition(".")
    if not hmac.compare_digest(mac.encode(), _mac(auth_string, f"ticket {hour}").encode()):
        return False
    return int(hour, 16) >= now_s // _HOUR_S  # the valid MAC proves that it is a number


def _mac(auth_string: str, purpose: str) -> str:
    code = hmac.digest(auth_string.encode(), purpose.encode(), "sha256")
    return base64.urlsafe_b64encode(code[:_MAC_BYTES]).decode()
