"""The auth string of the local stack: a random secret, which both of its servers ask for. `up`
makes it, and `down` deletes it.

    HOME/auth ─┬─▶ both servers, which compare it with what a request carries
               ├─▶ commands, workers and flow runs, in their environment; never in a work pool
               ├─▶ prefect.toml, for Prefect's own command
               └─▶ a ticket in each printed address of a page, for the browser

It has the form `user:password` of HTTP's basic authentication, which Prefect and MLflow both use. A
ticket is derived from it and ends after a day, so that the log of a terminal does not hold the
secret.
"""

import base64
import hashlib
import hmac
import os
import secrets
import time

from deployments.paths import Home, open_private
from storage.errors import ConfigError

USER = "astraflow"
TICKET_HOURS = 24
_HOUR_S = 3600
_MAC_BYTES = 12


def read(home: Home) -> str | None:
    """The home's auth string; None when none was made yet. ConfigError for a file that holds
    something else, or that another user made: that user knows what it holds.
    """
    try:
        with home.auth.open() as file:
            owner = os.fstat(file.fileno()).st_uid
            found = file.read().strip()
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
    user, _, password = found.partition(":")
    if user != USER or not password:
        raise ConfigError(
            f"{home.auth} holds no auth string; run `astraflow down`, then `astraflow up`"
        )
    return found


def known(home: Home) -> str:
    """The home's auth string; empty where there is none that can be read, since `down` must work
    all the same.
    """
    try:
        return read(home) or ""
    except ConfigError:
        return ""


def create(home: Home) -> str:
    """The home's auth string, which is made when there is none. ConfigError where something else is
    in its place.
    """
    if (found := read(home)) is not None:
        return found
    made = f"{USER}:{secrets.token_urlsafe(32)}"
    try:
        with os.fdopen(open_private(home.auth, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
            file.write(f"{made}\n")
    except FileExistsError:
        raise ConfigError(
            f"{home.auth} is a link that leads nowhere; delete it, then run `astraflow up`"
        ) from None
    return made


def digest(auth_string: str) -> str:
    """Tells two auth strings apart and reveals neither."""
    return hashlib.sha256(auth_string.encode()).hexdigest()[:16]


def basic(auth_string: str) -> str:
    """The value of the header Authorization."""
    return f"Basic {base64.b64encode(auth_string.encode()).decode()}"


def cookie(auth_string: str) -> tuple[str, str]:
    """Name and value of the cookie that opens MLflow's page, and nothing else. Browsers send
    cookies of 127.0.0.1 to all of its ports, so that two stacks need different names.
    """
    return f"astraflow-{_mac(auth_string, 'cookie name')[:8]}", _mac(auth_string, "cookie")


def page(base_url: str, auth_string: str, target: str = "/", now_s: float | None = None) -> str:
    """The address of a page of a server of ours that logs the browser in and goes on to `target`.

    Example: `http://127.0.0.1:4200/open#78a5c.3q2-7wAAB3RlLWt2/runs/flow-run/…`. Browsers do not
    send what follows the `#`.
    """
    last_hour = int((time.time() if now_s is None else now_s) // _HOUR_S) + TICKET_HOURS
    return f"{base_url}/open#{last_hour:x}.{_mac(auth_string, f'ticket {last_hour:x}')}{target}"


def is_valid(ticket: str, auth_string: str, now_s: float) -> bool:
    """Whether a ticket was made from this auth string and has not ended."""
    hour, _, mac = ticket.partition(".")
    if not hmac.compare_digest(mac.encode(), _mac(auth_string, f"ticket {hour}").encode()):
        return False
    return int(hour, 16) >= now_s // _HOUR_S  # a number: only `page` makes the code above


def _mac(auth_string: str, purpose: str) -> str:
    code = hmac.digest(auth_string.encode(), purpose.encode(), "sha256")
    return base64.urlsafe_b64encode(code[:_MAC_BYTES]).decode()
