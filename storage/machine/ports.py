"""Find a free TCP port on the loopback interface, and the processes that listen on one."""

import errno
import random
import socket
from collections.abc import Iterable

import psutil

from storage.errors import ConfigError

PORTS_TRIED_MAX = 100
HOST = "127.0.0.1"
UNUSUAL = range(20_000, 30_000)
"""Ports that no common server uses, below those that systems give to outgoing connections: one of
these could take a port before its server listens."""
CONNECT_TIMEOUT_S = 10.0


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


def unusual_port() -> int:
    """Return a free port, another one at each call, for a server that no person needs to find."""
    return free_port(random.SystemRandom().choice(UNUSUAL))


def is_open(port: int) -> bool:
    """Return whether a process, of whatever user, accepts connections on the port."""
    try:
        socket.create_connection((HOST, port), CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def listens(processes: Iterable[psutil.Process], port: int) -> bool:
    """Return whether one of the processes listens on a TCP port, which another process may have
    taken first.
    """
    for process in processes:
        try:
            if any(
                connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
                for connection in process.net_connections("tcp")
            ):
                return True
        except psutil.AccessDenied:
            if not psutil.LINUX:
                return True  # this system does not list connections: assume that it listens
            # Linux lists those of this user's running processes: it has ended.
        except psutil.NoSuchProcess:
            continue
    return False
