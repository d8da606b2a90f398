"""The engine `sglang`: requests go to SGLang servers, which swap their weights between two tokens.

generate ──▶ router ──▶ server: /generate ──▶ tokens, log-probabilities, versions
load ──▶ changed tensors ──▶ pause · update · continue, on each server
a lost server ──▶ started again, all tensors loaded ──▶ its requests are asked again
"""

import asyncio
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from rollout.config import EngineConfig
from rollout.engines.engine import NO_VERSION, EngineFailedError, Generation, SamplingParams
from rollout.engines.requests import checked_prompt
from rollout.engines.sglang.answers import (
    has_spans,
    read_answer,
    request_body,
    version_label,
)
from rollout.engines.sglang.server_api import ServerApi, ServerLostError, ServerRefusedError
from rollout.engines.sglang.server_process import ServerProcess
from rollout.engines.sglang.weights_folder import weights_folder
from storage.coordination.system_threads import in_system_thread
from storage.errors import ConfigError
from storage.formats.safetensors import weights_digest
from storage.records.types import Json
from storage.records.weights import HostTensor

API_KEY_VARIABLE = "ASTRAFLOW_SGLANG_API_KEY"
POLL_S = 0.5
STALLED_S = 300.0
"""A server of ours that starts and neither writes to its log nor computes for so long is stuck."""
UNREACHABLE_S = 60.0
"""How long a server of somebody else may be away."""
SILENT_S = 120.0
"""Requests run and none has ended for so long: the server is asked whether it still samples."""
STARTS_MAX = 2
"""Attempts to start a server that was never ready; the first may have met a port in use."""
LOSSES_MAX = 3
"""Losses of one server in a row, without an answer in between, after which the engine fails."""
ABORTS_MAX = 3
"""How often a request that the server itself aborted is asked again."""
ABORT_S = 10.0
"""How long the servers may take to hand over what they have of aborted requests."""
PAUSE_MODE = {"keep": "in_place", "recompute": "retract"}


@dataclass(eq=False)
class _Server:
    api: ServerApi
    process: ServerProcess | None
    running: int = 0
    """Requests without an answer."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no request runs."""
    answers: int = 0
    launches: int = 1
    """Grows with each restart: a request that saw an older one need not restart it again."""
    losses: int = 0
    """Since the last answer."""
    has_spans: bool = True
    """Whether it names the version of each token; otherwise answers end before new weights."""
    began: bool = False
    """Whether it was ready once; one that never was has settings with which it cannot start."""

    def __post_init__(self) -> None:
        self.idle.set()


class SglangRolloutEngine:
    """`rollout.engines.engine.Engine` by SGLang servers. Belongs to the event loop of its first
    `load`.
    """

    def __init__(self, config: EngineConfig, model_config: Json) -> None:
        """Start the server, or take those of `config.sglang.urls`; `load` waits for them.

        Raises:
            ConfigError: the settings or the model's configuration cannot work.
        """
        vocab = model_config.get("vocab_size")
        if type(vocab) is not int or vocab < 1:
            raise ConfigError(
                f"config.json has vocab_size {vocab!r}; it must be a number of tokens"
            )
        self._config = config
        self._model_config = model_config
        self._vocab = vocab
        self._id = uuid.uuid4().hex[:8]
        """Part of the server's names of versions: shows whether another client loaded weights."""
        self._servers = self._start_servers()
        self._ready: set[_Server] = set()
        self._digests: dict[int, str] = {}
        self._tensors: Mapping[str, HostTensor] = {}
        self._version = NO_VERSION
        self._changing = asyncio.Lock()
        """Held while the weights of a server, or a server itself, change."""
        self._watch: asyncio.Task[None] | None = None
        self._failure: EngineFailedError | None = None
        self._closing = False

    @property
    def version(self) -> int:
        return self._version

    def capacity(self) -> int:
        return self._config.max_concurrent * len(self._servers)

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
            launches = server.launches
            try:
                generation = await self._ask(server, prompt, limit, sampling)
            except ServerLostError as error:
                if self._closing:
                    return aborted()
                await self._replace(server, launches, error)
                continue
            if generation.finish_reason != "abort" or self._closing:
                return generation
            aborts += 1
            if aborts > ABORTS_MAX:
                raise self._failed(
                    f"{server.api.url} aborted a request of {len(prompt)} tokens {aborts} times"
                )

    async def load(self, version: int, tensors: Mapping[str, HostTensor]) -> None:
        digest = await in_system_thread(weights_digest, tensors)
        async with self._changing:
            self._check_open()
            if version < self._version or digest != self._digests.get(version, digest):
                raise ValueError(
                    f"the engine holds version {self._version} and was given other weights as "
                    f"version {version}"
                )
            if version == self._version:
                return
            changed = self._changed(tensors)
            self._digests[version] = digest
            try:
                for server in self._servers:
                    await self._bring_to(server, version, tensors, changed)
            except BaseException:
                del self._digests[version]
                raise
            self._tensors, self._version = tensors, version
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_servers())

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        if self._watch:
            self._watch.cancel()
        for server in self._servers:
            if server.running:
                with suppress(ServerLostError, ServerRefusedError):
                    await server.api.abort()
        with suppress(TimeoutError):
            async with asyncio.timeout(ABORT_S):
                await asyncio.gather(*(server.idle.wait() for server in self._servers))
        for server in self._servers:
            if server.process:
                await in_system_thread(server.process.stop)
            await server.api.close()

    def _start_servers(self) -> list[_Server]:
        urls = self._config.sglang.urls
        if urls:
            key = os.environ.get(API_KEY_VARIABLE, "")
            return [_Server(ServerApi(url, key), None) for url in urls]
        process = ServerProcess(self._config, self._model_config)
        return [_Server(ServerApi(process.url, process.api_key), process)]

    def _check_open(self) -> None:
        if self._failure:
            raise EngineFailedError(str(self._failure)) from self._failure.__cause__
        if self._closing:
            raise EngineFailedError("the engine was closed")

    def _failed(self, message: str) -> EngineFailedError:
        self._failure = self._failure or EngineFailedError(f"the sglang engine broke: {message}")
        return self._failure

    def _has_ended(self, server: _Server) -> bool:
        return bool(server.process and server.process.ended())

    # Requests.

    def _route(self, prompt: tuple[int, ...]) -> _Server:
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
        self, server: _Server, prompt: tuple[int, ...], limit: int, sampling: SamplingParams
    ) -> Generation:
        request_id = uuid.uuid4().hex
        prefix_key = version_label(self._id, self._version)
        body = request_body(
            request_id, prompt, limit, sampling, vocab=self._vocab, prefix_key=prefix_key
        )
        server.running += 1
        server.idle.clear()
        try:
            answer = await server.api.generate(body)
        except asyncio.CancelledError:
            asyncio.get_running_loop().create_task(_abort(server.api, request_id))
            raise
        except ServerRefusedError as error:
            raise self._failed(str(error)) from error
        finally:
            server.running -= 1
            if not server.running:
                server.idle.set()
        server.answers += 1
        server.losses = 0
        return read_answer(answer, sampling, limit, self._id)

    # Weights.

    def _changed(self, tensors: Mapping[str, HostTensor]) -> dict[str, HostTensor]:
        """Return the tensors that the servers do not have; ConfigError for another model's."""
        if self._tensors:
            if lacking := sorted(self._tensors.keys() - tensors.keys()):
                raise ConfigError(f"the weights lack {', '.join(lacking[:8])}")
            if unknown := sorted(tensors.keys() - self._tensors.keys()):
                raise ConfigError(f"the weights have unknown tensors {', '.join(unknown[:8])}")
        for name, tensor in tensors.items():
            held = self._tensors.get(name)
            if held and held.shape != tensor.shape:
                raise ConfigError(
                    f"{name} has shape {list(tensor.shape)} instead of {list(held.shape)}"
                )
        return {
            name: tensor
            for name, tensor in tensors.items()
            if self._tensors.get(name) is not tensor
        }

    async def _bring_to(
        self,
        server: _Server,
        version: int,
        tensors: Mapping[str, HostTensor],
        changed: Mapping[str, HostTensor],
    ) -> None:
        """Load a version into one server, also if it is lost meanwhile."""
        while True:
            try:
                if server not in self._ready:
                    await self._wait_until_ready(server)
                    self._ready.add(server)
                    changed = tensors
                await self._update(server, version, changed)
                if not server.began:
                    server.has_spans = await self._names_versions(server)
                    server.began = True
                return
            except ServerLostError as error:
                await self._restart(server, error)

    async def _names_versions(self, server: _Server) -> bool:
        """Find out by a request of one token."""
        probe = SamplingParams(max_new_tokens=1)
        body = request_body(uuid.uuid4().hex, (0,), 1, probe, vocab=self._vocab, prefix_key="probe")
        return has_spans(await server.api.generate(body))

    async def _update(
        self, server: _Server, version: int, changed: Mapping[str, HostTensor]
    ) -> None:
        kv_cache = self._config.sglang.kv_cache if server.has_spans else "drain"
        folder = weights_folder(changed)
        path = await in_system_thread(folder.__enter__)
        try:
            if pause := PAUSE_MODE.get(kv_cache):
                await server.api.pause(pause)
            label = version_label(self._id, version)
            try:
                await server.api.update(path, label, flush=kv_cache != "keep")
            except ServerRefusedError as error:
                raise ConfigError(str(error)) from error
            finally:
                if pause:
                    await server.api.resume()
        finally:
            await in_system_thread(folder.__exit__, None, None, None)

    # Servers.

    async def _wait_until_ready(self, server: _Server) -> None:
        """Wait as long as the server makes progress; ConfigError for one that never started."""
        loop = asyncio.get_running_loop()
        progress, since = None, loop.time()
        while not await server.api.is_ready():
            self._check_open()
            if server.process:
                if words := server.process.ended():
                    raise ServerLostError(words)
                now = await in_system_thread(server.process.progress)
                if now != progress:
                    progress, since = now, loop.time()
            limit_s = STALLED_S if server.process else UNREACHABLE_S
            if loop.time() - since > limit_s:
                raise ServerLostError(
                    f"the SGLang server at {server.api.url} did not get ready: no progress for "
                    f"{limit_s:.0f} s"
                )
            await asyncio.sleep(POLL_S)

    async def _replace(self, server: _Server, launches: int, error: ServerLostError) -> None:
        """Have a lost server again, with the current weights."""
        async with self._changing:
            self._check_open()
            if server.launches == launches:
                await self._restart(server, error)
            if server not in self._ready:
                await self._bring_to(server, self._version, self._tensors, self._tensors)

    async def _restart(self, server: _Server, error: ServerLostError) -> None:
        server.losses += 1
        server.launches += 1
        self._ready.discard(server)
        words = (server.process.ended() if server.process else "") or str(error)
        if not server.began and server.losses > STARTS_MAX - 1:
            raise ConfigError(f"rollout.engine.sglang: {words}") from error
        if server.losses > LOSSES_MAX:
            raise self._failed(words) from error
        if server.process:
            await in_system_thread(server.process.stop)
            await server.api.close()
            server.process = ServerProcess(self._config, self._model_config)
            server.api = ServerApi(server.process.url, server.process.api_key)

    async def _watch_servers(self) -> None:
        """Kill a server of ours that has requests and samples nothing; their calls then fail."""
        loop = asyncio.get_running_loop()
        seen: dict[_Server, tuple[int, float]] = {}
        while True:
            await asyncio.sleep(SILENT_S / 10)
            for server in self._servers:
                answers, since = seen.get(server, (-1, 0.0))
                if not server.running or server.answers != answers or self._changing.locked():
                    seen[server] = (server.answers, loop.time())
                elif loop.time() - since > SILENT_S and server.process:
                    if not await server.api.samples(SILENT_S) and not self._changing.locked():
                        await in_system_thread(server.process.stop)
                    seen[server] = (server.answers, loop.time())


def aborted() -> Generation:
    """Return the answer to a request of which nothing is known any more."""
    return Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), (), "abort")


async def _abort(api: ServerApi, request_id: str) -> None:
    with suppress(ServerLostError, ServerRefusedError):
        await api.abort(request_id)
