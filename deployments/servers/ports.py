"""Finds a TCP port on the loopback interface that nobody listens on."""

import errno
import socket

from storage.errors import ConfigError

PORTS_TRIED_MAX = 100
HOST = "127.0.0.1"


def is_free(port: int) -> bool:
    """Whether a server could listen on the port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            probe.listen(1)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def free_port(usual: int) -> int:
    """The usual port, or the next one above it that is free. Raises ConfigError when a whole range
    is taken.
    """
    for port in range(usual, min(usual + PORTS_TRIED_MAX, 65536)):
        if is_free(port):
            return port
    raise ConfigError(
        f"all ports from {usual} to {usual + PORTS_TRIED_MAX - 1} on {HOST} are in use; free one "
        "of them"
    )
