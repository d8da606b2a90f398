import importlib
import socket
import sys
from pathlib import Path

import pytest

from deployments.paths import Home
from deployments.servers import auth
from deployments.servers.listening import listen
from storage.machine.ports import HOST, is_free, unusual_port


def test_a_server_has_its_port_from_the_start_and_a_second_one_ends_with_the_reason() -> None:
    port = unusual_port()
    with listen(port) as listener:
        assert listener.getsockname() == (HOST, port)
        with socket.create_connection((HOST, port)):  # it waits until the server accepts it
            assert not is_free(port)
        with pytest.raises(SystemExit, match=f"cannot listen on port {port} of 127.0.0.1: Address"):
            listen(port)


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
    port = unusual_port()
    with listen(port), pytest.raises(SystemExit, match=f"port {port}"):
        module.main(["--port", str(port), *options])
