import importlib
import socket
import sys
from pathlib import Path

import pytest

from deployments.paths import Home
from deployments.servers import auth, ports
from storage.errors import ConfigError
from tests.support.ports import unused_port


def test_a_port_with_a_listener_is_skipped_for_the_next_one() -> None:
    with socket.socket() as listener:
        listener.bind((ports.HOST, unused_port()))
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


def test_a_server_has_its_port_from_the_start_and_a_second_one_ends_with_the_reason() -> None:
    port = unused_port()
    with ports.listen(port) as listener:
        assert listener.getsockname() == (ports.HOST, port)
        with socket.create_connection((ports.HOST, port)):  # it waits until the server accepts it
            assert not ports.is_free(port)
        with pytest.raises(SystemExit, match=f"cannot listen on port {port} of 127.0.0.1: Address"):
            ports.listen(port)


@pytest.mark.parametrize(
    ("server", "options"), [("prefect_server", []), ("mlflow_server", ["--folder", "unused"])]
)
def test_servers_listen_before_their_slow_imports(
    server: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program could take the port while a server starts."""
    module = importlib.import_module(f"deployments.servers.{server}")
    made = Home(tmp_path / "home")
    made.create()
    auth.create(made)
    monkeypatch.setenv("ASTRAFLOW_HOME", str(made.root))
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "astraflow:0123456789")
    for slow in ("uvicorn", "prefect.server.database"):
        monkeypatch.setitem(sys.modules, slow, None)  # an import of it is an error
    port = unused_port()
    with ports.listen(port), pytest.raises(SystemExit, match=f"port {port}"):
        module.main(["--port", str(port), *options])
