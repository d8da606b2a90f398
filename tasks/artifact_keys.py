"""Keys of Prefect's artifacts, which may have lowercase letters, digits and dashes only."""

import hashlib
import re

DIGEST_DIGITS = 8


def artifact_key(kind: str, name: str) -> str:
    """Return the key of the artifact of this kind and name; different names have different keys.

    Examples: `progress-solver`; `progress-solver-b-0ec236dd` for `solver_b`.
    """
    plain = re.sub(r"[^a-z0-9]", "-", name.lower())
    if plain == name:
        return f"{kind}-{name}"
    digest = hashlib.sha256(name.encode()).hexdigest()[:DIGEST_DIGITS]
    return f"{kind}-{plain}-{digest}"
