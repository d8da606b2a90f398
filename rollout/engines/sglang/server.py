"""One SGLang server with the weights it holds: started, loaded, restarted when it is lost."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rollout.engines.engine import EngineFailedError, SamplingParams
from rollout.engines.sglang.answers import has_spans, request_body, version_label
from rollout.engines.sglang.server_api import (
    CONTROL_TIMEOUT_S,
    ServerApi,
    ServerLostError,
    ServerRefusedError,
)
from rollout.engines.sglang.server_process import ServerProcess
from rollout.engines.sglang.weights_folder import weights_folder
from storage.coordination.system_threads import in_system_thread
from storage.errors import ConfigError
from storage.records.weights import HostTensor

POLL_S = 0.5
STALLED_S = 300.0
"""A server of ours that starts and neither writes to its log nor computes for so long is stuck."""
UNREACHABLE_S = 60.0
"""How long a server of somebody else may be away."""
STARTS_MAX = 2
"""Attempts to start a server that was never ready; the first may have met a port in use."""
LOSSES_MAX = 3
"""Losses of one server in a row, without an answer in between, after which the engine fails."""
PAUSE_MODE = {"keep": "in_place", "recompute": "retract"}

Start = Callable[[], tuple[ServerApi, ServerProcess | None]]


@dataclass(eq=False)
class Server:
    """One server. Its weights are changed by one task at a time, which the engine owns."""

    start: Start
    engine_id: str
    kv_cache: str
    vocab: int
    running: int = 0
    """Requests without an answer."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no request runs."""
    answers: int = 0
    loads: int = 0
    """Times that it got all tensors. A request that saw an older number is simply asked again."""
    losses: int = 0
    """Since the last answer."""
    label: str = ""
    """Its name of the version it holds; empty while that is unknown."""
    held: Mapping[str, HostTensor] = field(default_factory=dict)
    """The tensors it holds; empty while that is unknown."""
    began: bool = False
    """Whether it was ready once; one that never was has settings with which it cannot start."""
    names_versions: bool = True
    """Whether it names the version of each token; otherwise answers end before new weights."""

    def __post_init__(self) -> None:
        self.idle.set()
        self.api, self.process = self.start()

    async def bring_to(self, version: int, tensors: Mapping[str, HostTensor]) -> None:
        """Load a version, also if the server is lost meanwhile.

        Raises:
            ConfigError: it cannot start, or refuses the tensors.
            EngineFailedError: it is lost again and again, or another client loads weights into it.
        """
        while True:
            try:
                await self._check_held()
                await self._update(version, tensors)
                if not self.began:
                    self.names_versions = await self._probe()
                    self.began = True
                return
            except ServerLostError as error:
                await self.restart(error)

    async def restart(self, error: ServerLostError) -> None:
        """Start a lost server again, without weights; one of somebody else is waited for."""
        self.losses += 1
        self.label, self.held = "", {}
        words = (self.process.ended() if self.process else "") or str(error)
        if not self.began and self.losses >= STARTS_MAX:
            raise ConfigError(f"rollout.engine.sglang: {words}") from error
        if self.losses > LOSSES_MAX:
            raise EngineFailedError(f"the sglang engine broke: {words}") from error
        if self.process:
            await in_system_thread(self.process.stop)
            lost = self.api
            self.api, self.process = self.start()
            await lost.close()

    async def close(self) -> None:
        if self.process:
            await in_system_thread(self.process.stop)
        await self.api.close()

    async def _check_held(self) -> None:
        """Compare what the server says it holds with what it was given.

        Another process may have its address after a restart, with other weights.
        """
        if not self.label:
            await self._wait_until_ready()
            await self.api.resume()  # a client that was killed may have paused it
            return
        label = await self.api.label()
        if label == self.label:
            return
        if "-" in label:
            raise EngineFailedError(
                f"the SGLang server at {self.api.url} has weights {label!r}, which another client "
                "loaded; a server serves one worker"
            )
        self.label, self.held = "", {}

    async def _update(self, version: int, tensors: Mapping[str, HostTensor]) -> None:
        held = self.held
        changed = {name: tensor for name, tensor in tensors.items() if held.get(name) is not tensor}
        kv_cache = self.kv_cache if self.names_versions else "drain"
        pause = PAUSE_MODE.get(kv_cache)
        label = version_label(self.engine_id, version)
        self.label, self.held = "", {}  # unknown, until the update has succeeded
        folder = weights_folder(changed)
        path = await in_system_thread(folder.__enter__)
        try:
            if pause:
                await self.api.pause(pause)
            await self.api.update(path, label, flush=kv_cache != "keep")
        except ServerRefusedError as error:
            raise ConfigError(str(error)) from error
        finally:
            if pause:
                await self.api.resume()
            await in_system_thread(folder.__exit__, None, None, None)
        self.label, self.held = label, tensors
        self.loads += not held

    async def _probe(self) -> bool:
        """Find out by a request of one token whether the server names versions of tokens."""
        probe = SamplingParams(max_new_tokens=1)
        body = request_body("probe", (0,), 1, probe, vocab=self.vocab, prefix_key="probe")
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                return has_spans(await self.api.generate(body))
        except TimeoutError as error:
            raise ServerLostError(
                f"the SGLang server at {self.api.url} samples no token in {CONTROL_TIMEOUT_S:.0f} s"
            ) from error

    async def _wait_until_ready(self) -> None:
        """Wait as long as the server makes progress; ServerLostError when it does not."""
        loop = asyncio.get_running_loop()
        progress, since_s = None, loop.time()
        while not await self.api.is_ready():
            if self.process:
                if words := self.process.ended():
                    raise ServerLostError(words)
                now = await in_system_thread(self.process.progress)
                if now != progress:
                    progress, since_s = now, loop.time()
            limit_s = STALLED_S if self.process else UNREACHABLE_S
            if loop.time() - since_s > limit_s:
                raise ServerLostError(
                    f"the SGLang server at {self.api.url} is not ready, and made no progress for "
                    f"{limit_s:.0f} s"
                )
            await asyncio.sleep(POLL_S)
