import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.config import EngineConfig, SglangConfig
from rollout.engines.engine import EngineFailedError
from rollout.engines.sglang.engine import SglangRolloutEngine
from rollout.engines.sglang.server_arguments import HOST
from rollout.engines.sglang.server_process import EXIT_SETTINGS, LAUNCH, ServerProcess
from storage.errors import ConfigError
from storage.machine import gpu_locks, ports
from tests.support.http_servers import one_answer
from tests.support.models.chain_model import CONFIG, counting
from tests.support.patience import until


def test_an_interpreter_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    config = EngineConfig(name="sglang", sglang=SglangConfig(python=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match=r"rollout\.engine\.sglang\.python '.*none' cannot be"):
        ServerProcess(config, CONFIG)


@pytest.mark.parametrize(
    ("status", "error"), [(2, ConfigError), (78, ConfigError), (1, EngineFailedError)]
)
async def test_a_server_that_cannot_start_is_refused_with_its_last_words(
    tmp_path: Path, status: int, error: type[Exception]
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho ModuleNotFoundError: sglang >&2\nexit {status}\n")
    python.chmod(0o755)
    engine = SglangRolloutEngine(
        EngineConfig(name="sglang", sglang=SglangConfig(python=str(python))), CONFIG
    )
    with pytest.raises(
        error, match=rf"ended with status {status}; .*ModuleNotFoundError: sglang"
    ) as raised:
        await engine.load(0, counting(1))
    assert type(raised.value) is error
    await engine.close()


def test_the_launcher_ends_with_the_status_of_wrong_settings_where_sglang_is_missing() -> None:
    order = json.dumps({"args": [], "api_key": "k", "without_kernels": False})
    # A session of its own: at the end of its input the launcher kills its process group.
    launcher = subprocess.Popen(
        [sys.executable, str(LAUNCH)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert launcher.stdin
    assert launcher.stderr
    launcher.stdin.write(order + "\n")
    launcher.stdin.flush()
    assert "No module named 'sglang'" in launcher.stderr.read()
    assert launcher.wait() == EXIT_SETTINGS
    launcher.stdin.close()
    launcher.stderr.close()


def test_a_server_gets_a_port_that_no_outgoing_connection_takes(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    process = ServerProcess(
        EngineConfig(name="sglang", sglang=SglangConfig(python=str(python))), CONFIG
    )
    process.stop()
    assert int(process.url.removeprefix(f"http://{HOST}:")) in range(20_000, 30_100)


def test_files_and_sockets_of_a_server_are_for_its_own_user_only(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/launch_server.py").write_text("open('socket', 'w').close()\nexit(0)\n")
    launcher = subprocess.Popen(
        [sys.executable, str(LAUNCH)],
        stdin=subprocess.PIPE,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        umask=0,
        start_new_session=True,
    )
    assert launcher.stdin
    launcher.stdin.write(b'{"args": [], "api_key": "k", "without_kernels": false}\n')
    launcher.stdin.flush()
    assert launcher.wait() == 0
    launcher.stdin.close()
    assert stat.S_IMODE((tmp_path / "socket").stat().st_mode) == 0o600


def test_stopping_a_server_kills_it_and_deletes_its_folder(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\npwd > {tmp_path}/folder\nexec sleep 3600\n")
    python.chmod(0o755)
    server = ServerProcess(
        EngineConfig(name="sglang", sglang=SglangConfig(python=str(python))), CONFIG
    )
    until(lambda: (tmp_path / "folder").exists() and (tmp_path / "folder").read_text() != "")
    assert server.ended() == ""
    server.stop()
    server.stop()
    assert server.ended().startswith("the SGLang server ended with status -9")
    assert not Path((tmp_path / "folder").read_text().strip()).exists()


def test_a_server_sees_its_gpus_and_holds_them_until_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_locks, "FOLDER", tmp_path / "gpus")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    python = tmp_path / "python"
    seen = tmp_path / "seen"
    python.write_text(f'#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES" > {seen}\nexec sleep 3600\n')
    python.chmod(0o755)
    config = EngineConfig(
        name="sglang", device="cuda", devices=(1,), sglang=SglangConfig(python=str(python))
    )
    with gpu_locks.held_gpus("a worker", [1]):
        server = ServerProcess(config, CONFIG)
    until(lambda: seen.exists() and seen.read_text() == "6\n")
    (path,) = (tmp_path / "gpus").glob("6.*")
    with path.open() as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        server.stop()
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("status", [200, 401])
async def test_a_stranger_that_has_the_port_of_an_own_server_gets_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 3600\n")
    python.chmod(0o755)
    config = EngineConfig(name="sglang", sglang=SglangConfig(python=str(python)))
    engine = SglangRolloutEngine(config, CONFIG)
    with one_answer(status, b'{"weight_version": "default"}', "application/json") as stranger:
        # The port is drawn at random; here the stranger has taken it between draw and bind.
        monkeypatch.setattr(ports, "unusual_port", lambda: stranger.port)
        with pytest.raises(EngineFailedError, match=f"another process listens .*:{stranger.port}"):
            await engine.load(0, counting(1))
    assert stranger.requests == []
    await engine.close()


def test_a_server_listens_from_its_bind_until_it_ends(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"""#!{sys.executable}
import json, socket, sys, time
args = json.loads(sys.stdin.readline())["args"]
server = socket.create_server(("{HOST}", int(args[args.index("--port") + 1])))
time.sleep(3600)
""")
    python.chmod(0o755)
    config = EngineConfig(name="sglang", sglang=SglangConfig(python=str(python)))
    server = ServerProcess(config, CONFIG)
    until(server.listens)
    assert server.displaced() == ""
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: server.ended() != "")
    assert not server.listens()
    server.stop()
