"""Listen on a server's port from the first moment of its process."""

import socket
import sys

from storage.machine.ports import HOST

BACKLOG = 2048
"""Connections that wait until a starting server accepts them."""


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
            f"cannot listen on port {port} of {HOST}: {error.strerror}; `astraflow up`, "
            "run again, takes another one"
        )
    return listener
