"""Random seeds that follow from where a request stands in the run, so that a replayed order asks
the engine for the same.
"""

import hashlib


def derived_seed(*path: int) -> int:
    """A seed in 0 … 2⁶³−1 from a path of numbers, stable over processes and releases. Example:
    `derived_seed(7, 0, 3)`.
    """
    digest = hashlib.blake2b(",".join(map(str, path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
