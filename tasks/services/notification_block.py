"""The name of a notification block of Prefect: `slack-webhook/on-call`."""

import re

from storage.errors import ConfigError

_NAME = re.compile(r"[a-z0-9-]{1,255}/[a-z0-9-]{1,255}")


def check_name(variable: str, name: str | None) -> None:
    """Raise ConfigError for what cannot be the name of a notification block; empty and None name
    none.

    The value is not shown: it may be the address of a webhook, which is a secret.
    """
    if name and not _NAME.fullmatch(name):
        raise ConfigError(
            f"{variable} does not name a notification block; write TYPE/NAME with lowercase "
            "letters, digits and dashes only, such as slack-webhook/on-call, and put the address "
            "of a webhook into the block"
        )
