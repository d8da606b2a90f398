"""The HTTP interface of one SGLang server (0.5.21): the calls that the engine needs.

Tokens in, tokens out: no text crosses it. A server that cannot be reached or that broke raises
`ServerLostError`; one that works and refuses a call raises `ServerRefusedError`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from storage.coordination.system_threads import in_system_thread
from storage.errors import AstraFlowError, CorruptError
from storage.formats.json_objects import parse
from storage.plain_names import quoted
from storage.records.types import Json

CONNECT_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 300.0
"""Of calls that only set a flag, which a server does between two steps of the model. Answers and
new weights take as long as they take.
"""
KEEPALIVE_S = 2.0
"""Idle connections are closed after this time: earlier than by the server, after 5 s."""
ANSWER_BYTES_MAX = 2**20
"""Of an answer, without what it has for each token."""
DIGESTS_BYTES_MAX = 2**24
"""Of an answer with a digest of each parameter."""
TOKEN_BYTES_MAX = 2**9
"""Of each token of an answer: its id, log-probability and text."""
MASK_BYTES_MAX = 2**16
"""Of each token, with top_p or top_k: the ids of up to 4,096 other tokens."""
VALUE_BYTES = 16
"""An answer has at most one JSON value for so many of the bytes that it may have."""
PARSED_AT_ONCE_BYTES = 2**18
"""Longer answers are parsed outside of the event loop."""
MESSAGE_CHARACTERS_MAX = 300


class _Answer(NamedTuple):
    """An HTTP answer, read to its end."""

    status: int
    content: bytes
    location: str
    """To which it redirects; the engine follows no redirection, which would get its key."""

    async def json(self, bytes_max: int, mask_bytes_max: int = 0) -> Json:
        """Return its content, a JSON object; CorruptError when it is none, or has more values, or
        more lists and objects beside those of masks, than such an answer has.

        Python's lock is held while it is parsed, and lists take far longer than numbers.
        """
        lists_max = bytes_max // VALUE_BYTES
        if mask_bytes_max and sum(map(self.content.count, (b"[", b"{"))) > lists_max:
            raise CorruptError("an answer has too many lists")
        values_max = (bytes_max + mask_bytes_max) // VALUE_BYTES
        if len(self.content) <= PARSED_AT_ONCE_BYTES:
            return parse(self.content, "an answer", values_max)
        return await in_system_thread(parse, self.content, "an answer", values_max)


class ServerLostError(AstraFlowError):
    """The server does not answer, or ended while it answered."""


class ConnectionLostError(ServerLostError):
    """The connection of a call ended before its answer; the server may still work."""


class ServerRefusedError(AstraFlowError):
    """The server works and refuses the call; the message has its reason."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        """Of its HTTP answer; 0: the answer itself could not be used."""

    @property
    def is_of_every_request(self) -> bool:
        """Whether it refuses every such call: another key is wanted, it has no such path, or it is
        at another address.
        """
        return self.status in (401, 403, 404, 405) or 300 <= self.status < 400


class ServerApi:
    """Calls of one server. Belongs to the event loop of its first call."""

    def __init__(self, url: str, api_key: str, ended: Callable[[], str] = lambda: "") -> None:
        """`ended` returns why a server of ours ended: another user's process may have its port
        then, which must not get the key, and whose answers are not used.
        """
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.url, self._ended = url, ended
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={**headers, "Accept-Encoding": "identity"},
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=256, keepalive_expiry=KEEPALIVE_S
            ),
            trust_env=False,  # the key must not reach a proxy
        )

    async def generate(self, request: Mapping[str, Any]) -> Json:
        """Return the answer to one request; cancelling the call does not end it in the server."""
        num_tokens = int(request["sampling_params"]["max_new_tokens"])
        has_masks = "return_sampling_mask" in request
        return await self._json(
            "/generate",
            request,
            ANSWER_BYTES_MAX + num_tokens * TOKEN_BYTES_MAX,
            num_tokens * MASK_BYTES_MAX if has_masks else 0,
        )

    async def abort(self, request_id: str) -> None:
        """End one request: its call of `generate` returns what it has."""
        await self._post("/abort_request", {"rid": request_id}, CONTROL_TIMEOUT_S)

    async def pause(self, mode: str) -> None:
        """Stop between two tokens. `in_place` keeps the KV cache of running requests; `retract`
        gives it up, to be computed again.
        """
        await self._post("/pause_generation", {"mode": mode}, CONTROL_TIMEOUT_S)

    async def resume(self) -> None:
        await self._post("/continue_generation", {}, CONTROL_TIMEOUT_S)

    async def update(self, folder: Path, label: str, *, flush: bool) -> None:
        """Load the tensors of a folder, which may be some of the model's, as version `label`.

        At once while the server is paused; otherwise when no request runs any more.
        """
        body = {
            "model_path": str(folder),
            "load_format": "safetensors",
            "weight_version": label,
            "flush_cache": flush,
        }
        await self._post("/update_weights_from_disk", body, None)

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load the adapter in a folder; running requests go on."""
        body = {"lora_name": name, "lora_path": str(folder)}
        await self._post("/load_lora_adapter", body, None)

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter; waits for the requests that name it."""
        await self._post("/unload_lora_adapter", {"lora_name": name}, CONTROL_TIMEOUT_S)

    async def checksums(self) -> dict[str, str]:
        """Return a digest of each parameter on each device, as the server has them in memory.

        ServerRefusedError where a digest, or all of a device, are missing.
        """
        body = {"action": "checksum"}
        answer = await self._json("/weights_checker", body, DIGESTS_BYTES_MAX)
        try:
            ranks = [rank["checksums"] for rank in answer["ranks"]]
            digests = {
                f"{name} on device {rank}": digest
                for rank, checksums in enumerate(ranks)
                for name, digest in checksums.items()
            }
            if ranks and all(ranks) and all(digests.values()):
                return {name: str(digest) for name, digest in digests.items()}
        except (KeyError, TypeError, AttributeError):
            pass
        raise ServerRefusedError(
            f"the SGLang server at {self.url} gave no digests at /weights_checker"
        )

    async def label(self) -> str:
        """Return its name of the weights it holds; `default` after a start."""
        try:
            answer = await self._read("GET", "/model_info", CONTROL_TIMEOUT_S)
            return str((await answer.json(ANSWER_BYTES_MAX))["weight_version"])
        except (
            httpx.HTTPError,
            OSError,
            RuntimeError,
            ValueError,
            KeyError,
            CorruptError,
        ) as error:
            raise ServerLostError(
                f"the SGLang server at {self.url} does not answer: {type(error).__name__} {error}"
            ) from error

    async def is_ready(self) -> bool:
        """Return whether the server answers at all.

        ServerRefusedError when it rejects the key or is at another address.
        """
        try:
            answer = await self._read("GET", "/model_info", CONNECT_TIMEOUT_S)
        except (httpx.HTTPError, OSError, ValueError):
            return False
        if answer.status in (401, 403):
            raise ServerRefusedError(
                f"the SGLang server at {self.url} rejects the API key (ASTRAFLOW_SGLANG_API_KEY)",
                answer.status,
            )
        self._check_address(answer)
        return answer.status == 200

    async def samples(self, timeout_s: float) -> bool:
        """Return whether the server generates tokens: its own check generates one."""
        try:
            answer = await self._read("GET", "/health_generate", timeout_s)
        except (httpx.HTTPError, OSError, ValueError):
            return False
        return answer.status == 200

    async def close(self) -> None:
        await self._client.aclose()

    async def _json(
        self, path: str, body: Mapping[str, Any], bytes_max: int, mask_bytes_max: int = 0
    ) -> Json:
        answer = await self._post(path, body, None, bytes_max + mask_bytes_max)
        try:
            return await answer.json(bytes_max, mask_bytes_max)
        except CorruptError as error:
            raise ServerLostError(
                f"the SGLang server at {self.url} gave no JSON object at {path}: {error}"
            ) from error

    async def _post(
        self,
        path: str,
        body: Mapping[str, Any],
        timeout_s: float | None,
        bytes_max: int = ANSWER_BYTES_MAX,
    ) -> _Answer:
        try:
            answer = await self._read("POST", path, timeout_s, body, bytes_max)
        except (httpx.HTTPError, OSError, RuntimeError) as error:  # RuntimeError: it was closed
            raise ConnectionLostError(
                f"the SGLang server at {self.url} does not answer: "
                f"{type(error).__name__} {error}".rstrip()
            ) from error
        except ValueError as error:
            raise ServerLostError(f"the SGLang server at {self.url} {error} at {path}") from None
        if answer.status >= 500:
            raise ServerLostError(
                f"the SGLang server at {self.url} failed at {path}: {_reason(answer)}"
            )
        if answer.status >= 400:
            raise ServerRefusedError(
                f"the SGLang server at {self.url} refused {path}: {_reason(answer)}",
                answer.status,
            )
        self._check_address(answer)
        return answer

    async def _read(
        self,
        method: str,
        path: str,
        timeout_s: float | None,
        body: Mapping[str, Any] | None = None,
        bytes_max: int = ANSWER_BYTES_MAX,
    ) -> _Answer:
        """Return the answer; ValueError when it is longer than `bytes_max`."""
        self._check_runs()
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        content = bytearray()
        async with self._client.stream(method, path, json=body, timeout=timeout) as response:
            async for piece in response.aiter_raw():
                content += piece
                if len(content) > bytes_max:
                    raise ValueError(f"gave an answer of more than {bytes_max:,} bytes")
        self._check_runs()
        location = response.headers.get("location", "")
        return _Answer(response.status_code, bytes(content), location)

    def _check_runs(self) -> None:
        if words := self._ended():
            raise ConnectionError(words)

    def _check_address(self, answer: _Answer) -> None:
        if 300 <= answer.status < 400:
            raise ServerRefusedError(
                f"the SGLang server at {self.url} redirects to {quoted(answer.location)}; set "
                "rollout.engine.sglang.urls to the server's own address",
                answer.status,
            )


def _reason(answer: _Answer) -> str:
    text = " ".join(answer.content.decode(errors="replace").split())[:MESSAGE_CHARACTERS_MAX]
    printable = "".join(each if each.isprintable() else "?" for each in text)
    return f"{answer.status} {printable}"
