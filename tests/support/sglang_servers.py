"""Real SGLang servers for the contract suite, one for each model, shared by its tests."""

import json
import os
import time

import httpx

from rollout.config import EngineConfig, SglangConfig
from rollout.engines.sglang.server_arguments import served_config
from rollout.engines.sglang.server_process import ServerProcess
from storage.records.types import Json

SGLANG_PYTHON = os.environ.get("ASTRAFLOW_TEST_SGLANG_PYTHON", "")
"""Interpreter of an environment with sglang; `make test-engines` sets it."""
CONFIG = EngineConfig(
    name="sglang",
    max_concurrent=64,
    max_tokens=8192,
    sglang=SglangConfig(python=SGLANG_PYTHON, memory_share=0.5),
)


class Servers:
    """Servers by model."""

    def __init__(self) -> None:
        self._by_model: dict[str, ServerProcess] = {}

    def serving(self, model_config: Json) -> ServerProcess:
        """Return a server of the model that is ready, started if there is none."""
        key = json.dumps(model_config, sort_keys=True, default=str)
        if key not in self._by_model:
            self._by_model[key] = ServerProcess(CONFIG, served_config(model_config))
        server = self._by_model[key]
        while not self._is_ready(server):
            assert server.ended() == ""
            time.sleep(0.5)
        return server

    def _is_ready(self, server: ServerProcess) -> bool:
        headers = {"Authorization": f"Bearer {server.api_key}"}
        try:
            return httpx.get(f"{server.url}/model_info", headers=headers).status_code == 200
        except httpx.HTTPError:
            return False

    def stop(self) -> None:
        for server in self._by_model.values():
            server.stop()
