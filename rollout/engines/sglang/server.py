"""One SGLang server with the weights it holds: started, loaded, compared, restarted when lost."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rollout.engines.engine import EngineFailedError, SamplingParams
from rollout.engines.sglang.answers import has_spans, request_body, version_label
from rollout.engines.sglang.server_api import (
    CONTROL_TIMEOUT_S,
    ConnectionLostError,
    ServerApi,
    ServerLostError,
    ServerRefusedError,
)
from rollout.engines.sglang.server_process import ServerProcess
from rollout.engines.sglang.weights.adapters import Running, Served, adapter_folder
from rollout.engines.sglang.weights.folder import weights_folder
from rollout.engines.sglang.weights.wanted import PolicyAdapter, Wanted
from storage.coordination.system_threads import in_system_thread
from storage.errors import ConfigError
from storage.plain_names import quoted
from storage.records.weights import HostTensor

log = logging.getLogger(__name__)

POLL_S = 0.5
STALLED_S = 300.0
"""A server of ours that starts and neither writes to its log nor computes for so long is stuck."""
UNREACHABLE_S = 60.0
"""How long a server of somebody else may be away."""
STARTS_MAX = 2
"""Attempts to start a server that was never ready; the first may have met a port in use."""
CUTS_MAX = 3
"""Connections that a server which still works may cut in a row, before it counts as lost."""
LOSSES_MAX = 3
"""Losses of one server in a row, without an answer in between, after which the engine fails."""
COMPARED_BYTES = 2**30
"""About so many bytes of tensors are compared at once, except after all tensors were loaded."""
PAUSE_MODE = {"keep": "in_place", "recompute": "retract"}

Start = Callable[[], tuple[ServerApi, ServerProcess | None]]


@dataclass(eq=False)
class Server:
    """One server. Its weights are changed by one task at a time, which the group owns."""

    start: Start
    group_id: str
    """Part of its names of versions: shows whether another client loaded weights."""
    kv_cache: str
    check_every: int
    """Every so many versions, some tensors are compared; 0: none ever."""
    vocab: int
    running: int = 0
    """Requests without an answer."""
    answers: int = 0
    loads: int = 0
    """Times that it got all tensors. A request that saw an older number is simply asked again."""
    losses: int = 0
    """Since the last answer."""
    cuts: int = 0
    """Cut connections, since the last answer."""
    label: str = ""
    """Its name of the version it holds; empty while that is unknown."""
    held: Mapping[str, HostTensor] = field(default_factory=dict)
    """The tensors it holds; empty while that is unknown."""
    began: bool = False
    """Whether it was ready once; one that never was has settings with which it cannot start."""
    names_versions: bool = True
    """Whether it names the version of each token; otherwise answers end before new weights."""
    unchecked: int = 0
    """Versions since tensors were compared."""
    compared: int = 0
    """Number of the tensor with which the next comparison starts."""
    adapters: dict[str, Running] = field(default_factory=dict)
    """Id of an engine → the adapters that it has of it; none where it gets merged weights."""

    def __post_init__(self) -> None:
        self.api, self.process = self.start()

    async def bring_to(self, wanted: Wanted) -> None:
        """Load what it does not hold of `wanted`, also if the server is lost meanwhile.

        Raises:
            ConfigError: it refuses its settings or the tensors.
            EngineFailedError: it cannot start or is lost again and again, another client loads
                weights into it, or it does not hold the tensors that it was given.
        """
        version, tensors = wanted.version, wanted.tensors
        label = version_label(self.group_id, version)
        while True:
            try:
                await self._check_held()
                whole = not self.held
                if self.label == label:
                    self.held = tensors  # equal bits; the memory of older ones is used again
                else:
                    await self._update(label, tensors)
                    await self._compare(tensors, whole)
                if not self.began:
                    self.names_versions = await self._probe()
                    self.began = True
                await self._give_adapters(wanted.adapters)
                return
            except ServerLostError as error:
                await self.restart(error)

    def begin(self, engine: str) -> Served | None:
        """Count a request of an engine; return its newest adapter, None while there is none."""
        return self.adapters[engine].begin() if engine in self.adapters else None

    def end(self, engine: str, served: Served | None) -> None:
        """Count the end of a request, with what `begin` returned."""
        if engine in self.adapters:
            self.adapters[engine].end(served)

    def newest(self, engine: str) -> Served | None:
        """Return the adapter that the next request of an engine names."""
        running = self.adapters.get(engine)
        return running.newest if running else None

    async def forget(self, engine: str) -> None:
        """Unload the adapters of an engine without requests, which needs none any more."""
        running = self.adapters.pop(engine, Running())
        running.newest = None
        await self._unload_unused(running)

    async def restart(self, error: ServerLostError) -> None:
        """Start a lost server again, without weights; one of somebody else is waited for.

        One that only cut a connection goes on; it gets all tensors again, too.
        """
        self.label, self.held = "", {}
        for running in self.adapters.values():
            running.newest = None
        words = (self.process.ended() if self.process else "") or str(error)
        log.warning("an SGLang server was lost: %s", words)
        if self._is_cut(error) and await self._is_ready():
            return
        self.losses += 1
        if self.process and self.process.refused():
            raise ConfigError(f"rollout.engine.sglang: {words}") from error
        if self.losses > (LOSSES_MAX if self.began else STARTS_MAX - 1):
            raise EngineFailedError(f"the sglang engine broke: {words}") from error
        self._forget_adapters()
        if self.process:
            await in_system_thread(self.process.stop)
            lost = self.api
            self.api, self.process = self.start()
            await lost.close()

    async def still_works(self, error: ServerLostError) -> bool:
        """Return whether only a connection was lost: the server has the weights it was given."""
        try:
            return (
                self._is_cut(error)
                and await self._is_ours()
                and await self.api.label() == self.label
            )
        except ServerLostError:
            return False

    def _is_cut(self, error: ServerLostError) -> bool:
        """Return whether the loss may be that of a connection, and count it."""
        self.cuts += isinstance(error, ConnectionLostError)
        return isinstance(error, ConnectionLostError) and self.cuts <= CUTS_MAX

    def answered(self) -> None:
        """Count an answer: the server works."""
        self.answers += 1
        self.losses = self.cuts = 0

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
        if not await self._is_ours():
            raise ServerLostError(f"the SGLang server at {self.api.url} does not listen any more")
        label = await self.api.label()
        if label == self.label:
            return
        if "-" in label:
            raise EngineFailedError(
                f"the SGLang server at {self.api.url} has weights {quoted(label)}, which another "
                "client loaded; a server serves one worker"
            )
        self.label, self.held = "", {}
        self._forget_adapters()

    def _forget_adapters(self) -> None:
        """Begin without adapters, as a server does, but with names that none had."""
        self.adapters = {
            engine: Running(loaded=running.loaded) for engine, running in self.adapters.items()
        }

    async def _update(self, label: str, tensors: Mapping[str, HostTensor]) -> None:
        held = self.held
        changed = {name: tensor for name, tensor in tensors.items() if held.get(name) is not tensor}
        kv_cache = self.kv_cache if self.names_versions else "drain"
        pause = PAUSE_MODE.get(kv_cache)
        self.label, self.held = "", {}  # unknown, until the update has succeeded
        try:
            await self._give(changed, pause, flush=kv_cache != "keep", label=label)
        except ServerRefusedError as error:
            raise ConfigError(str(error)) from error
        self.label, self.held = label, tensors
        self.loads += not held

    async def _give(
        self,
        tensors: Mapping[str, HostTensor],
        pause: str | None,
        *,
        flush: bool,
        label: str | None = None,
    ) -> None:
        """Let the server load tensors, as version `label` or as more of the one it holds."""
        folder = weights_folder(tensors)
        path = await in_system_thread(folder.__enter__)
        try:
            if pause:
                await self.api.pause(pause)
            await self.api.update(path, label or self.label, flush=flush)
        finally:
            if pause:
                await self.api.resume()
            await in_system_thread(folder.__exit__, None, None, None)

    async def _give_adapters(self, adapters: Mapping[str, PolicyAdapter]) -> None:
        """Let the next requests of each engine name its adapter in `adapters`."""
        for engine, running in self.adapters.items():
            if engine not in adapters:
                running.newest = None
                await self._unload_unused(running)
        for engine, adapter in adapters.items():
            running = self.adapters.setdefault(engine, Running())
            if running.newest is None or running.newest.version != adapter.version:
                await self._give_adapter(engine, running, adapter)

    async def _give_adapter(self, engine: str, running: Running, adapter: PolicyAdapter) -> None:
        """Load an adapter, which the next request names, and unload those that no request names."""
        name = ""
        if adapter.form:
            running.loaded += 1
            name = f"{version_label(engine, adapter.version)}.{running.loaded}"
            folder = adapter_folder(adapter.form, adapter.tensors)
            path = await in_system_thread(folder.__enter__)
            try:
                await self.api.load_adapter(name, path)
            except ServerRefusedError as error:
                raise ConfigError(str(error)) from error
            finally:
                await in_system_thread(folder.__exit__, None, None, None)
        running.add(Served(name, adapter.version))
        await self._unload_unused(running)

    async def _unload_unused(self, running: Running) -> None:
        for unused in running.remove_unused():
            if not unused.name:
                continue
            try:
                await self.api.unload_adapter(unused.name)
            except ServerRefusedError as error:
                log.warning("an adapter stays in an SGLang server: %s", error)

    async def _compare(self, tensors: Mapping[str, HostTensor], whole: bool) -> None:
        """Load tensors that it holds again: that must not change a bit of its parameters.

        All of them with `whole`, else about COMPARED_BYTES of them each time that it is due, in
        turn. Its parameters cannot be compared with the tensors themselves: a server joins some of
        them into one, and divides each over its devices.
        """
        self.unchecked += 1
        if not self.check_every or not (whole or self.unchecked >= self.check_every):
            return
        self.unchecked = 0
        names, self.compared = in_turn(tensors, 0 if whole else self.compared, whole)
        try:
            before = await self.api.checksums()
            await self._give({name: tensors[name] for name in names}, "in_place", flush=False)
            after = await self.api.checksums()
        except ServerRefusedError as error:
            self.check_every = 0
            log.warning("the weights of an SGLang server are not compared: %s", error)
            return
        changed = sorted(name for name in before | after if before.get(name) != after.get(name))
        if changed:
            raise EngineFailedError(
                f"the SGLang server at {self.api.url} did not hold the weights {self.label} that "
                f"it was given: {len(changed)} of its parameters changed when they were loaded "
                f"again, {quoted(changed[0])} among them. Do not use what it sampled since the "
                "last comparison; if it changes weights while it loads them (quantization), set "
                "rollout.engine.sglang.check_every: 0"
            )

    async def _probe(self) -> bool:
        """Find out by a request of one token whether the server names versions of tokens.

        It is the first token of the server, which may compile its kernels now: for a server of ours
        there is no limit of time; the engine ends it when it stops computing.
        """
        probe = SamplingParams(max_new_tokens=1)
        body = request_body("probe", (0,), 1, probe, vocab=self.vocab, prefix_key="probe")
        try:
            async with asyncio.timeout(None if self.process else CONTROL_TIMEOUT_S):
                return has_spans(await self.api.generate(body))
        except TimeoutError as error:
            raise ServerLostError(
                f"the SGLang server at {self.api.url} samples no token in {CONTROL_TIMEOUT_S:.0f} s"
            ) from error

    async def _is_ours(self) -> bool:
        """Return whether a server of ours has its port, and not another user's process."""
        return self.process is None or await in_system_thread(self.process.listens)

    async def _is_ready(self) -> bool:
        """Return whether the server answers. Only it gets the key, and only its answer counts."""
        return await self._is_ours() and await self.api.is_ready() and await self._is_ours()

    async def _wait_until_ready(self) -> None:
        """Wait as long as the server makes progress; ServerLostError when it does not."""
        loop = asyncio.get_running_loop()
        progress, since_s = None, loop.time()
        while not await self._is_ready():
            if self.process:
                if words := (
                    self.process.ended() or await in_system_thread(self.process.displaced)
                ):
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


def in_turn(
    tensors: Mapping[str, HostTensor], start: int, whole: bool
) -> tuple[tuple[str, ...], int]:
    """Return the names of the tensors from number `start` on, and the number after the last.

    All of them with `whole`; otherwise until they have COMPARED_BYTES together, at least one, and
    no further than the last tensor, after which number 0 follows.
    """
    names = list(tensors)
    chosen: list[str] = []
    num_bytes = 0
    for name in names[start % len(names) :]:
        if chosen and not whole and num_bytes + tensors[name].bits.nbytes > COMPARED_BYTES:
            break
        chosen.append(name)
        num_bytes += tensors[name].bits.nbytes
    return tuple(chosen), (start % len(names) + len(chosen)) % len(names)
