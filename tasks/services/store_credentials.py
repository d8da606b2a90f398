"""Load the store's credentials from a Prefect `Secret` block, for machines without credentials.

ASTRAFLOW_STORE_SECRET names the block; its value is the text of a JSON object of `AWS_…` variables,
which are set in this process's environment. They are nowhere else: not in a run, a parameter or a
message. The value must be text: Prefect's page and API hide text, and show the keys of an object.
"""

import os
import re
from typing import Any

from storage.errors import ConfigError, TransientError
from storage.store.addresses import without_credentials
from tasks.services.prefect_settings import (
    REFUSED,
    SERVER_ERROR,
    TRY_LATER,
    RequestLimits,
    client_of,
    import_prefect,
    strange_answer,
    strange_answers,
)

VARIABLE = "ASTRAFLOW_STORE_SECRET"
EXAMPLE = '{"AWS_ACCESS_KEY_ID": "…", "AWS_SECRET_ACCESS_KEY": "…"}'
PYTHON = (
    f"import json; from prefect.blocks.system import Secret; Secret(value=json.dumps({EXAMPLE}))"
)

_NAME = re.compile(r"[a-z0-9-]{1,255}")
_KEY = re.compile(r"AWS_[A-Z0-9_]+")
_TOKENS = ("AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN")


def load(
    name: str | None = None, api_url: str | None = None, limits: RequestLimits | None = None
) -> None:
    """Set the environment variables that the block has; do nothing when no block is named.

    `name` is the block's, by default from the environment; `api_url` is the Prefect server's, by
    default from Prefect's settings; `limits` are those of one request, by default Prefect's. Raises
    ConfigError for a block that does not exist or has any other content and for a server that is
    not one of Prefect, TransientError when the server does not answer.
    """
    name = os.environ.get(VARIABLE) if name is None else name
    check_name(name)
    if not name:
        return
    values = _checked(name, _read(name, api_url, limits))
    if "AWS_ACCESS_KEY_ID" in values:
        for token in _TOKENS:  # a token of other keys would make these invalid
            os.environ.pop(token, None)
    os.environ.update(values)


def check_name(name: str | None) -> None:
    """Raise ConfigError for what cannot be the name of a block; empty and None name none.

    The value is not shown: it may be the secret itself, put in place of its name.
    """
    if name and not _NAME.fullmatch(name):
        raise ConfigError(
            f"{VARIABLE} is not the name of a Prefect block, which has lowercase letters, digits "
            "and dashes only; correct or unset it"
        )


def _read(name: str, api_url: str | None, limits: RequestLimits | None) -> Any:
    import_prefect()
    import httpx
    from prefect.blocks.system import Secret
    from prefect.exceptions import ObjectNotFound
    from prefect.settings import PREFECT_API_URL

    server = api_url or PREFECT_API_URL.value()
    if not server:
        raise ConfigError(
            f"{VARIABLE} names the Prefect block {name}, but no Prefect server is known; run "
            "`astraflow up`, "
            "or set PREFECT_API_URL"
        )
    try:
        with client_of(server, limits) as client:
            document = client.read_block_document_by_name(name, "secret", include_secrets=True)
    except ObjectNotFound:
        raise ConfigError(
            f"the Prefect server {without_credentials(server)} has no Secret block {name}, which "
            f"{VARIABLE} names; "
            f'make it on its page under Blocks, or in Python: {PYTHON}.save("{name}")'
        ) from None
    except httpx.DecodingError as error:
        raise ConfigError(strange_answer(server, error)) from None
    except httpx.HTTPError as error:
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in REFUSED:
            raise ConfigError(
                f"the Prefect server {without_credentials(server)} refuses to show the block "
                f"{name}, which {VARIABLE} names; "
                "set PREFECT_API_AUTH_STRING, or PREFECT_API_KEY, to what it asks for"
            ) from error
        if (
            isinstance(error, httpx.HTTPStatusError)
            and error.response.status_code < SERVER_ERROR
            and error.response.status_code not in TRY_LATER
        ):
            raise ConfigError(strange_answer(server, error)) from None
        raise TransientError(
            f"the Prefect block {name} cannot be read from {without_credentials(server)}: "
            f"{type(error).__name__}"
        ) from error
    except strange_answers() as error:
        raise ConfigError(strange_answer(server, error)) from None  # it may contain the secret
    stored = document.data.get("value")
    if isinstance(stored, dict):
        raise ConfigError(
            f"the Prefect block {name} holds an object, whose keys Prefect shows to everybody; "
            "store it as text, "
            f'{PYTHON}.save("{name}", overwrite=True), and take new keys'
        )
    return Secret(value=stored).get()


def _checked(name: str, value: Any) -> dict[str, str]:
    """Return the block's variables; ConfigError when `value` is anything else.

    Messages name keys, never values. A key of another form may be a misplaced value, and is not
    named either.
    """
    if not isinstance(value, dict) or not value:
        raise ConfigError(f"the Prefect block {name} must hold a JSON object such as {EXAMPLE}")
    for key, text in value.items():
        if not _KEY.fullmatch(key):
            shown = key if re.fullmatch(r"[A-Za-z_]{1,30}", key) else "of another form"
            raise ConfigError(
                f"the Prefect block {name} has the key {shown}; it may hold AWS_… variables only: "
                "remove it"
            )
        if not isinstance(text, str) or not text:
            raise ConfigError(
                f"the Prefect block {name} must hold text under {key}; put the value in quotes"
            )
    return dict(value)
