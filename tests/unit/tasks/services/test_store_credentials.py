"""Credentials from a Prefect block, against a server that serves only blocks."""

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from uuid import uuid4

import pytest

from storage.errors import ConfigError, TransientError
from tasks.services import store_credentials

SECRET = "wJalrXUtnFEMI/K7MDENG"


@dataclass
class Blocks:
    """The part of Prefect's API that reads a `Secret` block."""

    url: str
    values: dict[str, Any] = field(default_factory=dict)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Blocks]:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            place, _, name = self.path.partition("?")[0].rpartition("/")
            result = (
                place == "/api/block_types/slug/secret/block_documents/name"
                and name in served.values
            )
            body = json.dumps(
                _document(served.values[name]) if result else {"detail": "Block document not found"}
            ).encode()
            self.send_response(200 if result else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: Any) -> None:
            pass

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(
        "AWS_ACCESS_KEY_ID", "of the machine"
    )  # restored at the end, with any variable that a test sets
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
        monkeypatch.setenv(name, "of the machine")
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        served = Blocks(f"http://127.0.0.1:{server.server_port}/api")
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        yield served
        server.shutdown()


def _document(value: Any) -> dict[str, Any]:
    ids = {name: str(uuid4()) for name in ("id", "block_schema_id", "block_type_id")}
    return {
        **ids,
        "name": "store",
        "data": {"value": value},
        "is_anonymous": False,
        "block_document_references": {},
    }


def refusal(blocks: Blocks, value: Any) -> str:
    blocks.values["store"] = value
    with pytest.raises(ConfigError) as raised:
        store_credentials.load("store", blocks.url)
    assert (
        raised.value.__cause__ is None
    )  # a parser's error contains the text that it could not parse
    assert SECRET not in str(raised.value)
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == "of the machine"
    return str(raised.value)


def test_variables_of_the_block_override_those_of_the_process(blocks: Blocks) -> None:
    blocks.values["store"] = json.dumps(
        {"AWS_ACCESS_KEY_ID": "mine", "AWS_SECRET_ACCESS_KEY": SECRET}
    )
    store_credentials.load("store", blocks.url)
    assert (os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]) == (
        "mine",
        SECRET,
    )
    assert os.environ["AWS_ENDPOINT_URL"] == "of the machine"
    assert "AWS_SESSION_TOKEN" not in os.environ  # it belongs to the keys that were replaced


def test_a_block_of_text_is_read_as_json(blocks: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks.values["store"] = json.dumps({"AWS_SECRET_ACCESS_KEY": SECRET})
    monkeypatch.setenv("ASTRAFLOW_STORE_SECRET", "store")
    store_credentials.load(api_url=blocks.url)
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == SECRET
    assert os.environ["AWS_SESSION_TOKEN"] == "of the machine"


def test_without_a_name_prefect_is_not_queried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASTRAFLOW_STORE_SECRET", raising=False)
    store_credentials.load(api_url="http://127.0.0.1:9/api")
    monkeypatch.setenv("ASTRAFLOW_STORE_SECRET", "")
    store_credentials.load(api_url="http://127.0.0.1:9/api")


def test_other_than_aws_variables_are_refused_without_showing_their_values(blocks: Blocks) -> None:
    assert refusal(blocks, json.dumps({"AWS_PROFILE": "eu", "PATH": SECRET})) == (
        "the Prefect block store has the key PATH; it may hold AWS_… variables only: remove it"
    )
    assert "has the key of another form" in refusal(
        blocks, json.dumps({SECRET: "AWS_SECRET_ACCESS_KEY"})
    )
    odd = json.dumps({"AWS_SECRET_ACCESS_KEY": SECRET, "AWS_MAX_ATTEMPTS": 3})
    assert "must hold text under AWS_MAX_ATTEMPTS" in refusal(blocks, odd)


def test_a_json_object_is_refused_because_prefect_shows_its_values(blocks: Blocks) -> None:
    error = refusal(blocks, {"AWS_SECRET_ACCESS_KEY": SECRET})
    assert "holds an object, whose keys Prefect shows to everybody; store it as text" in error


@pytest.mark.parametrize(
    "value", [SECRET, f'{{"AWS_SECRET_ACCESS_KEY": "{SECRET}"', [SECRET], "{}", ""]
)
def test_a_block_without_an_object_is_refused(blocks: Blocks, value: Any) -> None:
    assert refusal(blocks, value).startswith(
        "the Prefect block store must hold a JSON object such as"
    )


def test_an_error_for_a_missing_block_shows_how_to_make_it(blocks: Blocks) -> None:
    with pytest.raises(
        ConfigError, match=rf"{blocks.url} has no Secret block other, .*\.save\(\"other\"\)$"
    ):
        store_credentials.load("other", blocks.url)


@pytest.mark.parametrize(
    "name", [SECRET, "../../variables", "a/b", "Keys", "a b", "a\n", "k\x1b[31m", "é", "a" * 256]
)
def test_what_cannot_be_the_name_of_a_block_is_refused_and_not_shown(
    name: str, blocks: Blocks
) -> None:
    with pytest.raises(ConfigError) as raised:
        store_credentials.load(name, blocks.url)
    assert str(raised.value) == (
        "ASTRAFLOW_STORE_SECRET is not the name of a Prefect block, which has lowercase letters, "
        "digits and dashes only; correct or unset it"
    )


def test_without_a_server_reading_the_block_fails() -> None:
    with pytest.raises(
        ConfigError,
        match="but no Prefect server is known; run `astraflow up`, or set PREFECT_API_URL",
    ):
        store_credentials.load("store")


def test_an_unresponsive_server_raises_a_transient_error() -> None:
    with pytest.raises(
        TransientError,
        match=r"the Prefect block store cannot be read from http://127.0.0.1:9/api: ConnectError",
    ):
        store_credentials.load("store", "http://127.0.0.1:9/api")
