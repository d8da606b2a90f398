"""A stand-in for an SGLang server, for faults that a real one shows rarely.

It continues a prompt by counting: token t is followed by t + 1. `tests/contract` runs the engine on
real servers (`make test-engines`).
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from storage.formats.safetensors import from_safetensors, weights_digest
from storage.records.types import Json

Reply = tuple[int, Json]


@dataclass(eq=False)
class Peer:
    """A running server."""

    url: str = ""
    label: str = "default"
    """Its `weight_version`."""
    names_versions: bool = True
    """Whether answers have the version of each token; servers before 0.5.21 give one for all."""
    calls: list[tuple[str, Json]] = field(default_factory=list)
    """Path and body of each call that changes or asks something, in order."""
    keys: list[str | None] = field(default_factory=list)
    """The header `Authorization` of each call."""
    tensors: list[list[str]] = field(default_factory=list)
    """Names of the tensors of each update."""
    held: dict[str, str] = field(default_factory=dict)
    """Name of a parameter → digest of what was loaded last."""
    adapters: dict[str, Json] = field(default_factory=dict)
    """Name of an adapter that it has → its configuration, and the names of its tensors."""
    replies: dict[str, list[Callable[[Json], Reply | None]]] = field(default_factory=dict)
    """Path → what the next calls get instead of the usual reply; None closes the connection."""

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def answer(self, path: str, body: Json) -> Reply | None:
        self.calls.append((path, body))
        if path == "/update_weights_from_disk":
            loaded: dict[str, str] = {}
            for file in Path(body["model_path"]).glob("*.safetensors"):
                for name, tensor in from_safetensors(file.read_bytes()).items():
                    loaded[name] = weights_digest({name: tensor})
            self.tensors.append(sorted(loaded))
        if waiting := self.replies.get(path):
            return waiting.pop(0)(body)
        if path == "/update_weights_from_disk":
            self.label = body["weight_version"]
            self.held |= loaded
        if path == "/load_lora_adapter":
            if body["lora_name"] in self.adapters:
                return 400, {"success": False, "error_message": "it is loaded already"}
            folder = Path(body["lora_path"])
            self.adapters[body["lora_name"]] = {
                **json.loads((folder / "adapter_config.json").read_text()),
                "tensors": sorted(
                    name
                    for file in folder.glob("*.safetensors")
                    for name in from_safetensors(file.read_bytes())
                ),
            }
        if path == "/unload_lora_adapter" and not self.adapters.pop(body["lora_name"], None):
            return 400, {"success": False, "error_message": "there is none of this name"}
        if path == "/weights_checker":
            return 200, {"success": True, "ranks": [{"checksums": dict(self.held)}]}
        if path == "/generate":
            reply = counted(body, self.label)
            if not self.names_versions:
                del reply["meta_info"]["weight_versions"]
            return 200, reply
        return 200, {"success": True}


def counted(body: Json, label: str, finish: str = "length") -> Json:
    """Return the answer of a server whose weights are `label`."""
    last, length = body["input_ids"][-1], body["sampling_params"]["max_new_tokens"]
    tokens = [last + 1 + i for i in range(length)]
    return {
        "output_ids": tokens,
        "meta_info": {
            "finish_reason": {"type": finish},
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            "weight_version": label,
            "weight_versions": [{"version": label, "start": 0, "end": length}],
        },
    }


@contextmanager
def sglang_peer() -> Iterator[Peer]:
    """Run the stand-in on a free port of the loopback interface."""
    peer = Peer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply((200, {"weight_version": peer.label}))

        def do_POST(self) -> None:
            peer.keys.append(self.headers.get("Authorization"))
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
            self._reply(peer.answer(self.path, body))

        def _reply(self, reply: Reply | None) -> None:
            if reply is None:
                self.close_connection = True
                self.connection.close()
                return
            status, content = reply
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            return None

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    peer.url = f"http://127.0.0.1:{listener.server_port}"
    yield peer
    listener.shutdown()
    listener.server_close()
