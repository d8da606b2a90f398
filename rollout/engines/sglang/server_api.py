"""The HTTP interface of one SGLang server (0.5.21): the calls that the engine needs.

Tokens in, tokens out: no text crosses it. A server that cannot be reached or that broke raises
`ServerLostError`; one that works and refuses a call raises `ServerRefusedError`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from storage.errors import AstraFlowError
from storage.records.types import Json

CONNECT_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 300.0
"""Of calls that only set a flag, which a server does between two steps of the model. Answers and
new weights take as long as they take.
"""
KEEPALIVE_S = 2.0
"""Idle connections are closed after this time: earlier than by the server, after 5 s."""
MESSAGE_CHARACTERS_MAX = 300


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
        """Whether it refuses every such call: another key is wanted, or it has no such path."""
        return self.status in (401, 403, 404, 405)


class ServerApi:
    """Calls of one server. Belongs to the event loop of its first call."""

    def __init__(self, url: str, api_key: str) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = url
        self._client = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=256, keepalive_expiry=KEEPALIVE_S
            ),
            trust_env=False,  # the key must not reach a proxy
        )

    async def generate(self, request: Mapping[str, Any]) -> Json:
        """Return the answer to one request; cancelling the call does not end it in the server."""
        return await self._json("/generate", request)

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
        """Return a digest of each parameter on each device, as the server has them in memory."""
        answer = await self._json("/weights_checker", {"action": "checksum"})
        try:
            return {
                f"{name} on device {rank}": str(digest)
                for rank, parameters in enumerate(answer["ranks"])
                for name, digest in parameters["checksums"].items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise ServerRefusedError(
                f"the SGLang server at {self.url} gave no digests at /weights_checker"
            ) from error

    async def label(self) -> str:
        """Return its name of the weights it holds; `default` after a start."""
        try:
            response = await self._client.get("/model_info", timeout=CONTROL_TIMEOUT_S)
            return str(response.json()["weight_version"])
        except (httpx.HTTPError, OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            raise ServerLostError(
                f"the SGLang server at {self.url} does not answer: {type(error).__name__} {error}"
            ) from error

    async def is_ready(self) -> bool:
        """Return whether the server answers at all."""
        try:
            response = await self._client.get("/model_info", timeout=CONNECT_TIMEOUT_S)
        except (httpx.HTTPError, OSError):
            return False
        if response.status_code in (401, 403):
            raise ServerRefusedError(
                f"the SGLang server at {self.url} rejects the API key (ASTRAFLOW_SGLANG_API_KEY)",
                response.status_code,
            )
        return response.status_code == 200

    async def samples(self, timeout_s: float) -> bool:
        """Return whether the server generates tokens: its own check generates one."""
        try:
            response = await self._client.get("/health_generate", timeout=timeout_s)
        except (httpx.HTTPError, OSError):
            return False
        return response.status_code == 200

    async def close(self) -> None:
        await self._client.aclose()

    async def _json(self, path: str, body: Mapping[str, Any]) -> Json:
        response = await self._post(path, body, None)
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ServerLostError(f"the SGLang server at {self.url} gave no JSON object at {path}")
        return answer

    async def _post(
        self, path: str, body: Mapping[str, Any], timeout_s: float | None
    ) -> httpx.Response:
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        try:
            response = await self._client.post(path, json=body, timeout=timeout)
        except (httpx.HTTPError, OSError, RuntimeError) as error:  # RuntimeError: it was closed
            raise ConnectionLostError(
                f"the SGLang server at {self.url} does not answer: "
                f"{type(error).__name__} {error}".rstrip()
            ) from error
        if response.status_code >= 500:
            raise ServerLostError(
                f"the SGLang server at {self.url} failed at {path}: {_reason(response)}"
            )
        if response.status_code >= 400:
            raise ServerRefusedError(
                f"the SGLang server at {self.url} refused {path}: {_reason(response)}",
                response.status_code,
            )
        return response


def _reason(response: httpx.Response) -> str:
    text = " ".join(response.text.split())
    return f"{response.status_code} {text[:MESSAGE_CHARACTERS_MAX]}"
