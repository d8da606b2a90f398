import socket

import pytest

from deployments.servers import ports
from storage.errors import ConfigError


def test_a_port_with_a_listener_is_skipped_for_the_next_one() -> None:
    with socket.socket() as listener:
        listener.bind((ports.HOST, 0))
        listener.listen(1)
        taken = listener.getsockname()[1]
        assert not ports.is_free(taken)
        assert ports.free_port(taken) > taken
    assert ports.is_free(taken)


def test_a_range_without_a_free_port_gives_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ports, "PORTS_TRIED_MAX", 1)
    with socket.socket() as listener:
        listener.bind((ports.HOST, 0))
        listener.listen(1)
        taken = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"from {taken} to {taken}"):
            ports.free_port(taken)
