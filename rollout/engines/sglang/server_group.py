"""Servers with equal weights, and the engines that use them: one engine, or one for each policy.

    engine solver ───▶ adapter of version 7 ─┐
    engine verifier ─▶ adapter of version 4 ─┴─▶ Wanted ─▶ each server
    a lost server ──▶ started once for all, its weights and all adapters loaded

Engines join before the first load. The servers are started by it, and end after the last engine
has left.
"""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial

from rollout.config import EngineConfig
from rollout.engines.engine import EngineFailedError
from rollout.engines.sglang.answers import version_label
from rollout.engines.sglang.server import STALLED_S, Server, Start
from rollout.engines.sglang.server_api import ServerApi, ServerLostError, ServerRefusedError
from rollout.engines.sglang.server_arguments import HEALTH_TIMEOUT_S, served_config
from rollout.engines.sglang.server_process import ServerProcess
from rollout.engines.sglang.tasks import OwnedTasks
from rollout.engines.sglang.weights.shapes import Shapes, check_tensors, model_shapes
from rollout.engines.sglang.weights.wanted import Wanted
from storage.coordination.system_threads import in_system_thread
from storage.errors import ConfigError
from storage.records.types import Json
from storage.records.weights import HostTensor, StoredAdapter

API_KEY_VARIABLE = "ASTRAFLOW_SGLANG_API_KEY"
UNLOAD_S = 10.0
"""How long servers may take to unload the adapters of an engine that leaves."""
WATCH_S = 12.0
"""Pause between two looks at servers that may be stuck."""
SILENT_S = float(HEALTH_TIMEOUT_S)
"""Requests run and none has ended for so long: the server is asked whether it still samples."""


class ServerGroup:
    """Servers of one model. Belongs to the event loop of the first load."""

    def __init__(self, config: EngineConfig, model_config: Json) -> None:
        """The first load starts the server, or takes those of `config.sglang.urls`: a model is
        served after its `config.json` was compared with its tensors, and not before.

        Raises:
            ConfigError: the model's configuration cannot be served.
        """
        self.id = uuid.uuid4().hex[:8]
        self._config = config
        self._model_config = served_config(model_config)
        self._vocab: int = model_config["vocab_size"]
        self._servers: list[Server] = []
        """Empty before the first load."""
        self._engines: set[str] = set()
        self._wanted = Wanted(-1, {})
        self._changing = asyncio.Lock()
        """Held while the weights of a server, or a server itself, change."""
        self._replacements: dict[Server, asyncio.Task[None]] = {}
        self._tasks = OwnedTasks()
        self._shapes: tuple[Shapes, frozenset[str]] | None = None
        self._failure: EngineFailedError | None = None

    def join(self, engine: str, model_config: Json) -> None:
        """Let an engine use the servers; ConfigError for a policy of another model."""
        if served_config(model_config) != self._model_config:
            raise ConfigError(
                "rollout.engine.sglang.shared: the base models of the policies have different "
                "config.json; give them the same model, or leave shared out"
            )
        self._engines.add(engine)

    async def leave(self, engine: str) -> None:
        """Unload the adapters of an engine whose requests have ended, or end the servers with the
        last engine.
        """
        self._engines.discard(engine)
        if not self._engines:
            await self._tasks.cancel()
            for server in self._servers:
                await server.close()
            return
        self._wanted = self._wanted.of(self._engines)
        with suppress(TimeoutError, ServerLostError):
            async with asyncio.timeout(UNLOAD_S), self._changing:
                for server in self._servers:
                    await server.forget(engine)

    def server_pids(self) -> list[int]:
        """Return the process ids of the servers that were started here."""
        return [server.process.pid for server in self._servers if server.process]

    def check_works(self) -> None:
        """Raise EngineFailedError where the servers broke."""
        if self._failure:
            raise EngineFailedError(str(self._failure)) from self._failure.__cause__

    def failed(self, message: str) -> EngineFailedError:
        """Return the error that all calls of all engines raise from now on."""
        self._failure = self._failure or EngineFailedError(f"the sglang engine broke: {message}")
        return self._failure

    def route(self, prompt: tuple[int, ...]) -> Server:
        """Return the server of the prompt's group, unless it has far more requests than others.

        Consistent hashing with bounded loads (Mirrokni et al., arXiv 1608.01350): equal prompts
        meet in one server, which computes them once.
        """
        total = sum(server.running for server in self._servers)
        bound = 1.25 * (total + 1) / len(self._servers)
        first = hash(prompt) % len(self._servers)
        in_order = self._servers[first:] + self._servers[:first]
        return next((server for server in in_order if server.running < bound), in_order[0])

    def lacks_adapter(self, engine: str, server: Server) -> bool:
        """Return whether a server, which is being started again, lacks an adapter of an engine."""
        return engine in self._wanted.adapters and server.newest(engine) is None

    async def complete(self, engine: str, server: Server) -> None:
        """Wait until a server that is being started again has the adapter of an engine."""
        async with self._changing:
            self.check_works()
            if self.lacks_adapter(engine, server):
                await self._bring_to(server, self._wanted)

    async def check_tensors(self, tensors: Mapping[str, HostTensor]) -> None:
        """Raise ConfigError for weights that are not those of the model."""
        if self._shapes is None:
            given = [tensor.shape for tensor in tensors.values()]
            self._shapes = await in_system_thread(model_shapes, self._model_config, given)
        check_tensors(tensors, *self._shapes)

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """Hold the lock of changes: no server is paused by another task."""
        async with self._changing:
            yield

    async def load(
        self,
        engine: str,
        version: int,
        tensors: Mapping[str, HostTensor],
        form: StoredAdapter | None,
    ) -> None:
        """Let the next requests of an engine be sampled by a version. The caller is in `changing`.

        Raises:
            ConfigError: a server refuses the tensors, or they are not the base model of the others.
            EngineFailedError: the servers broke.
        """
        self.check_works()
        with_next = (
            self._wanted.of_several_policies
            if self._config.sglang.shared
            else self._wanted.of_one_policy
        )
        wanted = await in_system_thread(with_next, engine, version, tensors, form)
        if not self._servers:
            self._servers = self._start_servers()
            self._tasks.start(self._watch())
        for server in self._servers:
            await self._bring_to(server, wanted)
        self._wanted = wanted.of(self._engines)

    def holds(self, engine: str, version: int) -> bool:
        """Return whether a server samples the next request of an engine by this version."""
        label = "" if self._config.sglang.shared else version_label(self.id, version)
        return any(
            newest.version == version
            if (newest := server.newest(engine))
            else bool(label) and server.label == label
            for server in self._servers
        )

    async def replaced(self, server: Server, loads: int, error: ServerLostError) -> None:
        """Wait until a lost server has the current weights again. One task does it for all.

        `loads` is that of the server that was lost.
        """
        self.check_works()
        task = self._replacements.get(server)
        if task is None or task.done():
            replacement = self._replace(server, loads, error)
            task = self._replacements[server] = self._tasks.start(replacement)
        await asyncio.shield(task)

    async def _replace(self, server: Server, loads: int, error: ServerLostError) -> None:
        async with self._changing:
            if server.label and server.loads != loads:  # a `load` replaced it meanwhile
                return
            if server.label and await server.still_works(error):
                return
            if server.label:
                try:
                    await server.restart(error)
                except (ConfigError, EngineFailedError) as failure:
                    raise self.failed(str(failure)) from failure
            await self._bring_to(server, self._wanted)

    async def _bring_to(self, server: Server, wanted: Wanted) -> None:
        try:
            await server.bring_to(wanted)
        except EngineFailedError as error:
            self._failure = self._failure or error
            raise

    def _start_servers(self) -> list[Server]:
        sglang = self._config.sglang
        num_policies = len(self._engines)

        def own_server() -> tuple[ServerApi, ServerProcess | None]:
            process = ServerProcess(self._config, self._model_config, num_policies)
            return ServerApi(process.url, process.api_key, process.ended), process

        def server_at(url: str) -> tuple[ServerApi, ServerProcess | None]:
            return ServerApi(url, os.environ.get(API_KEY_VARIABLE, "")), None

        starts: list[Start] = [partial(server_at, url) for url in sglang.urls] or [own_server]
        return [
            Server(start, self.id, sglang.kv_cache, sglang.check_every, self._vocab)
            for start in starts
        ]

    async def _watch(self) -> None:
        """End servers of ours that are stuck; the calls that wait for them then fail."""
        loop = asyncio.get_running_loop()
        seen: dict[Server, tuple[object, float]] = {}
        while True:
            await asyncio.sleep(WATCH_S)
            for server in self._servers:
                if server.process is None:
                    continue
                changing = self._changing.locked()
                mark: object = server.answers
                if changing:
                    mark = await in_system_thread(server.process.progress)
                elif not server.running:
                    mark = object()  # nothing is expected of it
                last, since_s = seen.get(server, (None, 0.0))
                if mark != last:
                    seen[server] = (mark, loop.time())
                elif loop.time() - since_s > (STALLED_S if changing else SILENT_S):
                    if changing or not await server.api.samples(SILENT_S):
                        await in_system_thread(server.process.stop)
                    del seen[server]


async def abort(api: ServerApi, request_id: str) -> None:
    """End one request, if its server can be reached."""
    with suppress(ServerLostError, ServerRefusedError):
        await api.abort(request_id)
