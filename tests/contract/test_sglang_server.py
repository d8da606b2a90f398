"""SGLang servers that a worker starts itself. Needs a real SGLang: `make test-engines`."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import psutil
import pytest

from rollout.config import EngineConfig, SglangConfig
from rollout.engines.engine import EngineFailedError, SamplingParams
from rollout.engines.sglang.engine import SglangRolloutEngine
from rollout.engines.sglang.server_api import ServerApi
from rollout.engines.sglang.weights.folder import weights_folder
from tests.support.models.chain_model import CONFIG, VOCAB, counting
from tests.support.patience import PATIENCE_S
from tests.support.sglang_servers import SGLANG_PYTHON, Servers

pytestmark = pytest.mark.skipif(
    not SGLANG_PYTHON, reason="needs an environment with sglang; `make test-engines` makes one"
)
SETTINGS = EngineConfig(
    name="sglang",
    max_concurrent=8,
    max_tokens=4096,
    sglang=SglangConfig(python=SGLANG_PYTHON, memory_share=0.5),
)
START = f"""
import json, sys, time
from rollout.config import EngineConfig
from rollout.engines.sglang.server_arguments import served_config
from rollout.engines.sglang.server_process import ServerProcess
server = ServerProcess(EngineConfig(**json.loads({SETTINGS.model_dump_json()!r})), served_config({CONFIG!r}))
print(server.pid, flush=True)
time.sleep(3600)
"""


@pytest.fixture
async def engine() -> AsyncIterator[SglangRolloutEngine]:
    made = SglangRolloutEngine(SETTINGS, CONFIG)
    yield made
    await made.close()


async def test_a_killed_server_is_started_again_with_the_newest_weights(
    engine: SglangRolloutEngine,
) -> None:
    await engine.load(0, counting(1))
    await engine.load(1, counting(2))
    first = engine.server_pids()
    requests = [
        asyncio.ensure_future(engine.generate([start], SamplingParams(max_new_tokens=2000)))
        for start in range(4)
    ]
    await asyncio.sleep(0.2)
    for pid in first:
        os.kill(pid, signal.SIGKILL)
    for start, answer in enumerate(await asyncio.gather(*requests)):
        assert answer.tokens.tolist() == [(start + 2 * i) % VOCAB for i in range(1, 2001)]
        assert [(span.version, span.start, span.end) for span in answer.spans] == [(1, 0, 2000)]
    assert not set(first) & set(engine.server_pids())
    listening = {
        connection.laddr.ip
        for pid in engine.server_pids()
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}
    await engine.load(2, counting(3))
    assert (await engine.generate([0], SamplingParams(max_new_tokens=1))).tokens.tolist() == [3]


def test_a_server_and_its_processes_end_with_a_killed_worker() -> None:
    worker = subprocess.Popen([sys.executable, "-c", START], stdout=subprocess.PIPE, text=True)
    assert worker.stdout
    server = psutil.Process(int(worker.stdout.readline()))
    while not server.children(recursive=True):  # it has imported SGLang
        assert server.is_running()
    family = [server, *server.children(recursive=True)]
    worker.kill()
    worker.wait()
    worker.stdout.close()
    gone, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert (len(gone), alive) == (len(family), [])


async def test_weights_that_another_process_changed_in_a_server_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers = Servers()
    process = servers.serving(CONFIG)
    monkeypatch.setenv("ASTRAFLOW_SGLANG_API_KEY", process.api_key)
    sglang = SglangConfig(urls=(process.url,), check_every=1)
    engine = SglangRolloutEngine(SETTINGS.model_copy(update={"sglang": sglang}), CONFIG)
    intruder = ServerApi(process.url, process.api_key)
    try:
        first, second = counting(1), counting(2)
        await engine.load(0, first)
        await engine.load(1, second)
        assert (await engine.generate([0], SamplingParams(max_new_tokens=1))).tokens.tolist() == [2]
        with weights_folder({"lm_head.weight": first["lm_head.weight"]}) as folder:
            await intruder.update(folder, await intruder.label(), flush=False)
        changed = {**second, "model.norm.weight": counting(2)["model.norm.weight"]}
        with pytest.raises(
            EngineFailedError, match=r"1 of its parameters changed .* lm_head.weight"
        ):
            await engine.load(2, changed)
    finally:
        await intruder.close()
        await engine.close()
        servers.stop()
