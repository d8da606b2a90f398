"""Find a free TCP port on the loopback interface, and listen on it."""

import errno
import socket
import sys

from storage.errors import ConfigError

PORTS_TRIED_MAX = 100
HOST = "127.0.0.1"
BACKLOG = 2048
"""Connections that wait until a starting server accepts them."""


def is_free(port: int) -> bool:
    """Return whether a server could listen on the port now."""
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
    """Return the usual port if it is free, else the next free one above it.

    Raises ConfigError when PORTS_TRIED_MAX ports are in use.
    """
    for port in range(usual, min(usual + PORTS_TRIED_MAX, 65536)):
        if is_free(port):
            return port
    raise ConfigError(
        f"all ports from {usual} to {usual + PORTS_TRIED_MAX - 1} on {HOST} are in use; free one "
        "of them"
    )


def listen(port: int) -> socket.socket:
    """Return a socket that listens on the port; end this process when the port is in use.

    A server listens before its slow imports: another program could take the port meanwhile.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        sys.exit(
            f"cannot listen on port {port} of {HOST}: {error.strerror}; `astraflow up` takes "
            "another port"
        )
    return listener
