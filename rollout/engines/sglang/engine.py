"""The engine `sglang`: requests go to SGLang servers, which swap their weights between two tokens.

    generate ──▶ router ──▶ server: /generate ──▶ tokens, log-probabilities, versions
    load ──▶ changed tensors ──▶ pause · update · continue, on each server
    a lost server ──▶ started again, all tensors loaded ──▶ its requests are asked again

Servers are changed by tasks of the engine, never by the task of a request, which may be cancelled.
"""

import asyncio
import os
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial

from rollout.config import EngineConfig
from rollout.engines.engine import (
    NO_VERSION,
    EngineFailedError,
    Generation,
    RequestRefusedError,
    SamplingParams,
)
from rollout.engines.requests import checked_prompt
from rollout.engines.sglang.adapters import check_adapter, split
from rollout.engines.sglang.answers import aborted, read_answer, request_body
from rollout.engines.sglang.model_shapes import Shapes, check_tensors, model_shapes
from rollout.engines.sglang.server import STALLED_S, Server, Start
from rollout.engines.sglang.server_api import ServerApi, ServerLostError, ServerRefusedError
from rollout.engines.sglang.server_arguments import HEALTH_TIMEOUT_S, served_config
from rollout.engines.sglang.server_process import ServerProcess
from storage.coordination.system_threads import in_system_thread
from storage.errors import ConfigError
from storage.formats.safetensors import weights_digest
from storage.import_path import ALLOW_VARIABLE, is_allowed
from storage.records.types import Json
from storage.records.weights import HostTensor, StoredAdapter

API_KEY_VARIABLE = "ASTRAFLOW_SGLANG_API_KEY"
ABORT_S = 10.0
"""How long servers may take to finish a change of weights, and to hand over aborted requests."""
WATCH_S = 12.0
"""Pause between two looks at servers that may be stuck."""
SILENT_S = float(HEALTH_TIMEOUT_S)
"""Requests run and none has ended for so long: the server is asked whether it still samples."""
ABORTS_MAX = 3
"""How often a request that the server itself aborted is asked again."""


class SglangRolloutEngine:
    """`rollout.engines.engine.Engine` by SGLang servers. Belongs to the event loop of its first
    `load`.
    """

    def __init__(self, config: EngineConfig, model_config: Json) -> None:
        """The first `load` starts the server, or takes those of `config.sglang.urls`: a model is
        served after its `config.json` was compared with its tensors, and not before.

        Raises:
            ConfigError: the settings or the model's configuration cannot work, or are not allowed
                on this machine.
        """
        if (config.sglang.python or config.sglang.server_args) and not is_allowed("sglang"):
            raise ConfigError(
                "rollout.engine.sglang: python and server_args choose programs and code, and "
                f"{ALLOW_VARIABLE} does not allow that here; add sglang there if you trust the "
                "recipe, or leave both out"
            )
        vocab = model_config.get("vocab_size")
        if type(vocab) is not int or vocab < 1:
            raise ConfigError(
                f"config.json has vocab_size {vocab!r}; it must be a number of tokens"
            )
        self._config = config
        self._served_config = served_config(model_config)
        self._vocab = vocab
        self._id = uuid.uuid4().hex[:8]
        """Part of the server's names of versions: shows whether another client loaded weights."""
        self._servers: list[Server] = []
        """Empty before the first load."""
        self._digests: dict[int, str] = {}
        self._tensors: Mapping[str, HostTensor] = {}
        self._form: StoredAdapter | None = None
        """Of the adapter among the tensors that servers apply themselves."""
        self._version = NO_VERSION
        self._changing = asyncio.Lock()
        """Held while the weights of a server, or a server itself, change."""
        self._replacements: dict[Server, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks that outlive the call that began them."""
        self._shapes: tuple[Shapes, frozenset[str]] | None = None
        self._failure: EngineFailedError | None = None
        self._closing = False

    @property
    def version(self) -> int:
        return self._version

    def capacity(self) -> int:
        return self._config.max_concurrent * max(1, len(self._config.sglang.urls))

    def digest(self, version: int) -> str:
        return self._digests[version]

    def server_pids(self) -> list[int]:
        """Return the process ids of the servers that this engine started."""
        return [server.process.pid for server in self._servers if server.process]

    async def generate(self, tokens: Sequence[int], sampling: SamplingParams) -> Generation:
        max_tokens = self._config.max_tokens
        prompt = checked_prompt(tokens, sampling, vocab=self._vocab, max_tokens=max_tokens)
        limit = min(sampling.max_new_tokens, max_tokens - len(prompt))
        self._check_open()
        if self._version == NO_VERSION:
            raise ConfigError(
                "the engine has no weights yet; load a version before the first generate"
            )
        aborts = 0
        while True:
            server = self._route(prompt)
            if self._form and not server.adapters.newest:  # it is being started again
                await asyncio.shield(self._task(self._give_adapter(server)))
            loads = server.loads
            try:
                generation = await self._ask(server, prompt, limit, sampling)
            except ServerLostError as error:
                if not self._closing and server.loads == loads:
                    await self._replaced(server, loads, error)
                if self._closing:
                    return aborted()
                continue
            if generation.finish_reason != "abort" or self._closing:
                return generation
            aborts += 1
            if aborts > ABORTS_MAX:
                raise self._failed(
                    f"{server.api.url} aborted a request of {len(prompt)} tokens {aborts} times"
                )

    async def load(self, version: int, tensors: Mapping[str, HostTensor]) -> None:
        await asyncio.shield(self._task(self._load(version, tensors)))

    @property
    def serves_adapters(self) -> bool:
        return self._config.sglang.adapter_rank > 0

    async def load_adapter(
        self, version: int, adapter: StoredAdapter, tensors: Mapping[str, HostTensor]
    ) -> None:
        check_adapter(adapter, tensors, self._config.sglang.adapter_rank)
        await asyncio.shield(self._task(self._load(version, tensors, adapter)))

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        with suppress(TimeoutError):
            async with asyncio.timeout(ABORT_S):
                async with self._changing:  # a server that is paused does not abort its requests
                    for server in self._servers:
                        if server.running:
                            with suppress(ServerLostError, ServerRefusedError):
                                await server.api.abort()
                await asyncio.gather(*(server.idle.wait() for server in self._servers))
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for server in self._servers:
            await server.close()

    def _start_servers(self) -> list[Server]:
        sglang = self._config.sglang

        def own_server() -> tuple[ServerApi, ServerProcess | None]:
            process = ServerProcess(self._config, self._served_config)
            return ServerApi(process.url, process.api_key), process

        def server_at(url: str) -> tuple[ServerApi, ServerProcess | None]:
            return ServerApi(url, os.environ.get(API_KEY_VARIABLE, "")), None

        starts: list[Start] = [partial(server_at, url) for url in sglang.urls] or [own_server]
        return [
            Server(start, self._id, sglang.kv_cache, sglang.check_every, self._vocab)
            for start in starts
        ]

    def _check_open(self) -> None:
        if self._failure:
            raise EngineFailedError(str(self._failure)) from self._failure.__cause__
        if self._closing:
            raise EngineFailedError("the engine was closed")

    def _failed(self, message: str) -> EngineFailedError:
        self._failure = self._failure or EngineFailedError(f"the sglang engine broke: {message}")
        return self._failure

    def _task(self, coroutine: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Requests.

    def _route(self, prompt: tuple[int, ...]) -> Server:
        """Return the server of the prompt's group, unless it has far more requests than others.

        Consistent hashing with bounded loads (Mirrokni et al., arXiv 1608.01350): equal prompts
        meet in one server, which computes them once.
        """
        total = sum(server.running for server in self._servers)
        bound = 1.25 * (total + 1) / len(self._servers)
        first = hash(prompt) % len(self._servers)
        in_order = self._servers[first:] + self._servers[:first]
        return next((server for server in in_order if server.running < bound), in_order[0])

    async def _ask(
        self, server: Server, prompt: tuple[int, ...], limit: int, sampling: SamplingParams
    ) -> Generation:
        request_id = uuid.uuid4().hex
        # While the weights change, the old or the new ones may compute the keys and values of the
        # prompt: no other request may use them.
        prefix_key = server.label or request_id
        adapter = server.adapters.begin()
        body = request_body(
            request_id,
            prompt,
            limit,
            sampling,
            vocab=self._vocab,
            prefix_key=adapter.name if adapter else prefix_key,
            adapter=adapter.name if adapter else "",
        )
        server.running += 1
        server.idle.clear()
        try:
            answer = await server.api.generate(body)
        except asyncio.CancelledError:
            self._task(_abort(server.api, request_id))
            raise
        except ServerRefusedError as error:
            if error.is_of_every_request:
                raise self._failed(str(error)) from error
            server.answered()
            raise RequestRefusedError(
                f"a request of {len(prompt)} tokens for {limit} more was refused: {error}"
            ) from error
        finally:
            server.running -= 1
            server.adapters.end(adapter)
            if not server.running:
                server.idle.set()
        server.answered()
        by_adapter = adapter.version if adapter else None
        return read_answer(answer, sampling, limit, self._id, by_adapter)

    # Weights and servers.

    async def _load(
        self,
        version: int,
        tensors: Mapping[str, HostTensor],
        form: StoredAdapter | None = None,
    ) -> None:
        digest = await in_system_thread(weights_digest, tensors)
        base = split(tensors)[0] if form else tensors
        if self._shapes is None:
            shapes_given = [tensor.shape for tensor in base.values()]
            self._shapes = await in_system_thread(model_shapes, self._served_config, shapes_given)
        shapes, tied = self._shapes
        check_tensors(base, shapes, tied)
        async with self._changing:
            self._check_open()
            if not self._servers:
                self._servers = self._start_servers()
                self._task(self._watch())
            if version < self._version or digest != self._digests.get(version, digest):
                raise ValueError(
                    f"the engine holds version {self._version} and was given other weights as "
                    f"version {version}"
                )
            if version == self._version:
                return
            self._digests[version] = digest
            try:
                for server in self._servers:
                    await self._bring_to(server, version, tensors, form)
            except BaseException:
                if not any(server.holds(version) for server in self._servers):
                    del self._digests[version]
                raise
            self._tensors, self._form, self._version = tensors, form, version

    async def _replaced(self, server: Server, loads: int, error: ServerLostError) -> None:
        """Wait until a lost server has the current weights again. One task does it for all.

        `loads` is that of the server that was lost.
        """
        self._check_open()
        task = self._replacements.get(server)
        if task is None or task.done():
            task = self._replacements[server] = self._task(self._replace(server, loads, error))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():  # this request was cancelled; the replacement goes on
                raise

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
                    raise self._failed(str(failure)) from failure
            await self._bring_to(server, self._version, self._tensors, self._form)

    async def _give_adapter(self, server: Server) -> None:
        async with self._changing:
            self._check_open()
            if not server.adapters.newest:
                await self._bring_to(server, self._version, self._tensors, self._form)

    async def _bring_to(
        self,
        server: Server,
        version: int,
        tensors: Mapping[str, HostTensor],
        form: StoredAdapter | None,
    ) -> None:
        try:
            await server.bring_to(version, tensors, form)
        except EngineFailedError as error:
            self._failure = self._failure or error
            raise

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


async def _abort(api: ServerApi, request_id: str) -> None:
    with suppress(ServerLostError, ServerRefusedError):
        await api.abort(request_id)
