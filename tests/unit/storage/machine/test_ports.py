import socket

import pytest

from storage.errors import ConfigError
from storage.machine import ports


def test_a_port_with_a_listener_is_skipped_for_the_next_one() -> None:
    with socket.socket() as listener:
        listener.bind((ports.HOST, ports.unusual_port()))
        listener.listen(1)
        taken = listener.getsockname()[1]
        assert not ports.is_free(taken)
        assert ports.free_port(taken) > taken
    assert ports.is_free(taken)


def test_a_range_without_a_free_port_gives_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A range of one port: a hundred adjacent ones may be in use by others, or not."""
    monkeypatch.setattr(ports, "PORTS_TRIED_MAX", 1)
    with socket.socket() as listener:
        listener.bind((ports.HOST, 0))
        listener.listen(1)
        taken = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"from {taken} to {taken}"):
            ports.free_port(taken)


def test_an_unusual_port_is_free_and_no_port_of_outgoing_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A range of one port: which one is taken must be known."""
    with socket.socket() as listener:
        listener.bind((ports.HOST, ports.unusual_port()))
        listener.listen(1)
        taken = listener.getsockname()[1]
        assert taken in range(20_000, 30_000 + ports.PORTS_TRIED_MAX)
        monkeypatch.setattr(ports, "UNUSUAL", range(taken, taken + 1))
        assert taken < ports.unusual_port() < taken + ports.PORTS_TRIED_MAX


def test_unusual_ports_differ() -> None:
    assert len({ports.unusual_port() for _ in range(20)}) > 10
