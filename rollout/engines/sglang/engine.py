"""The engine `sglang`: requests go to SGLang servers, which swap their weights between two tokens.

    generate ──▶ router ──▶ server: /generate ──▶ tokens, log-probabilities, versions
    load ──▶ changed tensors ──▶ pause · update · continue, on each server
         ──▶ or an adapter, which the next requests name
    a lost server ──▶ started again, all tensors loaded ──▶ its requests are asked again

Servers are changed by tasks, never by the task of a request, which may be cancelled.
"""

import asyncio
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress

from rollout.config import EngineConfig
from rollout.engines.engine import (
    NO_VERSION,
    EngineFailedError,
    Generation,
    RequestRefusedError,
    SamplingParams,
)
from rollout.engines.requests import checked_prompt
from rollout.engines.sglang.answers import aborted, read_answer, request_body
from rollout.engines.sglang.server import Server
from rollout.engines.sglang.server_api import ServerLostError, ServerRefusedError
from rollout.engines.sglang.server_group import ServerGroup, abort
from rollout.engines.sglang.tasks import OwnedTasks
from rollout.engines.sglang.weights.adapters import check_adapter, split
from storage.coordination.system_threads import in_system_thread
from storage.errors import ConfigError
from storage.formats.safetensors import weights_digest
from storage.import_path import ALLOW_VARIABLE, is_allowed
from storage.records.types import Json
from storage.records.weights import HostTensor, StoredAdapter

ABORT_S = 10.0
"""How long servers may take to finish a change of weights, and to hand over aborted requests."""
ABORT_AGAIN_S = 1.0
"""Pause between two calls that abort all requests."""
ABORTS_MAX = 3
"""How often a request that the server itself aborted is asked again."""


class SglangRolloutEngine:
    """`rollout.engines.engine.Engine` by SGLang servers. Belongs to the event loop of its first
    `load`.
    """

    def __init__(
        self, config: EngineConfig, model_config: Json, servers: ServerGroup | None = None
    ) -> None:
        """Use `servers`, or some of its own, which the first `load` starts or finds at
        `config.sglang.urls`.

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
        self._vocab = vocab
        self._id = uuid.uuid4().hex[:8]
        """Part of the names of its adapters."""
        self._servers = servers or ServerGroup(config, model_config)
        self._servers.join(self._id, model_config)
        self._digests: dict[int, str] = {}
        self._version = NO_VERSION
        self._asked: dict[str, tuple[Server, asyncio.Future[Json]]] = {}
        """Id of a request without an answer → its server, and the call."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks = OwnedTasks()
        self._closing = False

    def another(self, model_config: Json) -> "SglangRolloutEngine":
        """Return an engine of another policy that uses the same servers."""
        return SglangRolloutEngine(self._config, model_config, self._servers)

    @property
    def version(self) -> int:
        return self._version

    def capacity(self) -> int:
        return self._config.max_concurrent * max(1, len(self._config.sglang.urls))

    def digest(self, version: int) -> str:
        return self._digests[version]

    def server_pids(self) -> list[int]:
        """Return the process ids of its servers that were started here."""
        return self._servers.server_pids()

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
        while not self._closing:
            server = self._servers.route(prompt)
            if self._servers.lacks_adapter(self._id, server):
                await self._until(self._servers.complete(self._id, server))
                continue
            loads = server.loads
            try:
                generation = await self._ask(server, prompt, limit, sampling)
            except ServerLostError as error:
                if not self._closing and server.loads == loads:
                    await self._until(self._servers.replaced(server, loads, error))
                continue
            if generation.finish_reason != "abort" or self._closing:
                return generation
            aborts += 1
            if aborts > ABORTS_MAX:
                raise self._servers.failed(
                    f"{server.api.url} aborted a request of {len(prompt)} tokens {aborts} times"
                )
        return aborted()

    async def load(self, version: int, tensors: Mapping[str, HostTensor]) -> None:
        await asyncio.shield(self._tasks.start(self._load(version, tensors)))

    @property
    def serves_adapters(self) -> bool:
        return self._config.sglang.adapter_rank > 0

    async def load_adapter(
        self, version: int, adapter: StoredAdapter, tensors: Mapping[str, HostTensor]
    ) -> None:
        check_adapter(adapter, tensors, self._config.sglang.adapter_rank)
        await asyncio.shield(self._tasks.start(self._load(version, tensors, adapter)))

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        with suppress(TimeoutError):
            async with asyncio.timeout(ABORT_S):
                await self._abort_all()
        for _, call in self._asked.values():
            call.cancel()
        await self._idle.wait()
        await self._tasks.cancel()
        await self._servers.leave(self._id)

    async def _abort_all(self) -> None:
        """End all requests. A server has no request yet whose call has just begun."""
        while True:
            async with self._servers.changing():  # a paused server does not abort its requests
                asked = [abort(server.api, request) for request, (server, _) in self._asked.items()]
                await asyncio.gather(*asked)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), ABORT_AGAIN_S)
                return

    def _check_open(self) -> None:
        self._servers.check_works()
        if self._closing:
            raise EngineFailedError("the engine was closed")

    async def _until(self, change: Coroutine[object, object, None]) -> None:
        """Wait for a change of a server, at most until the engine is closed."""
        task = self._tasks.start(change)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():  # this request was cancelled; the change goes on
                raise

    async def _ask(
        self, server: Server, prompt: tuple[int, ...], limit: int, sampling: SamplingParams
    ) -> Generation:
        request_id = uuid.uuid4().hex
        adapter = server.begin(self._id)
        name = adapter.name if adapter else ""
        body = request_body(
            request_id,
            prompt,
            limit,
            sampling,
            vocab=self._vocab,
            # While the weights change, the old or the new ones may compute the keys and values of
            # the prompt: no other request may use them.
            prefix_key=name or server.label or request_id,
            adapter=name,
        )
        call = asyncio.ensure_future(server.api.generate(body))
        server.running += 1
        self._asked[request_id] = server, call
        self._idle.clear()
        try:
            answer = await call
        except asyncio.CancelledError:
            self._tasks.start(abort(server.api, request_id))
            if self._closing and not _is_cancelled():
                return aborted()
            raise
        except ServerRefusedError as error:
            if error.is_of_every_request:
                raise self._servers.failed(str(error)) from error
            server.answered()
            raise RequestRefusedError(
                f"a request of {len(prompt)} tokens for {limit} more was refused: {error}"
            ) from error
        finally:
            server.running -= 1
            server.end(self._id, adapter)
            del self._asked[request_id]
            if not self._asked:
                self._idle.set()
        server.answered()
        by_adapter = adapter.version if adapter else None
        return read_answer(answer, sampling, limit, self._servers.id, by_adapter, vocab=self._vocab)

    async def _load(
        self,
        version: int,
        tensors: Mapping[str, HostTensor],
        form: StoredAdapter | None = None,
    ) -> None:
        digest = await in_system_thread(weights_digest, tensors)
        await self._servers.check_tensors(split(tensors)[0] if form else tensors)
        async with self._servers.changing():
            self._check_open()
            if version < self._version or digest != self._digests.get(version, digest):
                raise ValueError(
                    f"the engine holds version {self._version} and was given other weights as "
                    f"version {version}"
                )
            if version == self._version:
                return
            self._digests[version] = digest
            try:
                await self._servers.load(self._id, version, tensors, form)
            except BaseException:
                if not self._servers.holds(self._id, version):
                    del self._digests[version]
                raise
            self._version = version


def _is_cancelled() -> bool:
    """Return whether somebody cancelled the task that calls this, not only what it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
