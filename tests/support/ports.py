"""Free ports for servers that start in other processes."""

import random

from deployments.servers.ports import free_port

FIRST, LAST = 20_000, 30_000
"""Below the ports that the system gives to outgoing connections, which could take a port before its
server listens."""


def unused_port() -> int:
    """A port on which nothing listens; tests that run at the same time get different ones."""
    return free_port(random.SystemRandom().randrange(FIRST, LAST))
