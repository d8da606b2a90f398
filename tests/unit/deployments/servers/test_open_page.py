"""The login page: its own script, run by node against the guard behind a real HTTP server.

node stands in for the browser: it has the same URL, fetch and Promise. What a page has besides, an
address, a history, a storage and a body, is written down below and reports what the script did with
it.
"""

import base64
import hashlib
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from deployments.servers import auth
from deployments.servers.guard import Guard
from tests.unit.deployments.servers.test_guard import Application, ask

NODE = shutil.which("node")
SECRET = "astraflow:0123456789"
PASSWORD = base64.b64encode(SECRET.encode()).decode()
BROWSER = """
const [, address, script, broken] = process.argv;
const at = new URL(address);
const did = {requests: [], stored: {}, shown: null, went: null, address: at.href, order: []};
const location = {
  origin: at.origin, hash: at.hash,
  replace: (next) => { did.went = new URL(next, at).href; did.order.push("went"); },
};
const history = {replaceState: (state, title, url) => { did.address = new URL(url, at).href; did.order.push("renamed"); }};
const localStorage = {setItem: (name, value) => {
  if (broken === "storage") throw new Error("The operation is insecure.");
  did.stored[name] = value;
}};
const document = {body: {set textContent(words) { did.shown = words; }}};
const send = globalThis.fetch;
const fetch = (url, options) => {
  did.order.push("asked");
  const {origin, pathname, search, hash} = new URL(url, did.address);
  did.requests.push({url: origin + pathname + search + hash, ...options});
  return send(new URL(url, did.address), {...options, headers: {...options.headers, Origin: at.origin}});
};
process.on("exit", () => console.log(JSON.stringify(did)));
new Function("location", "history", "localStorage", "document", "fetch", script)(
  location, history, localStorage, document, fetch);
"""


class _Served(uvicorn.Server):
    """A server in a thread, which does not change the signal handlers of the process."""

    def install_signal_handlers(self) -> None: ...


@pytest.fixture(scope="module")
def clock() -> list[float]:
    """The server's clock; a test can change it."""
    return [time.time()]


@pytest.fixture(scope="module")
def prefect(clock: list[float]) -> Iterator[str]:
    """The address of the guard of an application that reads the secret from the browser's storage."""
    guard = Guard(Application(), SECRET, authenticates=True, clock=lambda: clock[0])
    server = _Served(
        uvicorn.Config(guard, host="127.0.0.1", port=0, log_level="critical", lifespan="off")
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def opened(address: str, broken: str = "") -> dict[str, Any]:
    """The effects of the page's script in a browser that opened this address."""
    if NODE is None:
        pytest.skip("node is not installed")
    page = ask(Guard(Application(), SECRET, authenticates=True), "/open")
    script = re.fullmatch(r".*<script>(.*)</script>", page.text, re.DOTALL)
    assert script is not None
    command = [NODE, "-e", BROWSER, "--", address, script[1], broken]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert ended.returncode == 0, ended.stderr
    output: dict[str, Any] = json.loads(ended.stdout)
    return output


def test_the_page_exchanges_its_ticket_and_redirects_without_it(prefect: str) -> None:
    address = auth.page(prefect, SECRET, "/runs/flow-run/1?tab=logs#end")
    ticket = address.partition("#")[2].partition("/")[0]
    did = opened(address)
    assert did["requests"] == [
        {
            "url": f"{prefect}/open",
            "method": "POST",
            "headers": {"Authorization": f"Ticket {ticket}"},
        }
    ]
    assert did["order"] == ["renamed", "asked", "went"], (
        "the address loses its ticket before anything else happens"
    )
    assert did["address"] == f"{prefect}/open"
    assert did["went"] == f"{prefect}/runs/flow-run/1?tab=logs#end"
    assert did["stored"] == {"prefect-password": PASSWORD}
    assert did["shown"] is None


def test_a_ticket_can_be_used_repeatedly_for_one_day(prefect: str, clock: list[float]) -> None:
    address = auth.page(prefect, SECRET)
    began = clock[0]
    try:
        for hours in (0, 0, 23):
            clock[0] = began + hours * 3600
            assert opened(address)["went"] == f"{prefect}/"
        clock[0] = began + 26 * 3600
        did = opened(address)
    finally:
        clock[0] = began
    assert (did["went"], did["stored"], did["address"]) == (None, {}, f"{prefect}/open")
    assert (
        did["shown"]
        == "This address has expired, or belongs to another stack. `astraflow up` prints a new one.\n"
    )


ELSEWHERE = (
    *(
        "//evil.example/x",
        "/\\evil.example",
        "/\\/evil.example",
        "///evil.example",
        "/\t/evil.example",
        "//evil.example:80",
    ),
    *(
        "//user@evil.example",
        "//127.0.0.1:1/",
        "//localhost:1",
        "//[",
        "//:x",
        "//%00",
        "/\\[",
        "//127.0.0.1.evil.example",
    ),
)


@pytest.mark.parametrize("target", ELSEWHERE)
def test_the_page_never_redirects_to_another_origin(prefect: str, target: str) -> None:
    did = opened(auth.page(prefect, SECRET, target))
    assert (did["went"], did["address"], did["shown"]) == (f"{prefect}/", f"{prefect}/open", None)


@pytest.mark.parametrize(
    ("target", "went"),
    [
        ("", "/"),
        ("/javascript:alert(1)", "/javascript:alert(1)"),
        ("/..//evil.example", "//evil.example"),
        ("/@evil.example", "/@evil.example"),
        ("/<script>alert(1)</script>", "/%3Cscript%3Ealert(1)%3C/script%3E"),
    ],
)
def test_any_text_after_the_ticket_is_a_path_of_this_server(
    prefect: str, target: str, went: str
) -> None:
    assert opened(auth.page(prefect, SECRET, target))["went"] in (
        f"{prefect}{went}",
        f"{prefect}{target}",
    )


NO_TICKETS = (
    "",
    "#",
    "#/",
    "#x",
    "#<img src=x onerror=alert(1)>/",
    "#é/\u202e",
    "#a%0d%0aX:y/",
    "#" + "x" * 5000,
)


@pytest.mark.parametrize("fragment", NO_TICKETS, ids=range(len(NO_TICKETS)))
def test_without_a_valid_ticket_nothing_is_stored_and_the_servers_message_is_shown(
    prefect: str, fragment: str
) -> None:
    did = opened(f"{prefect}/open{fragment}")
    assert (
        did["shown"]
        == "This address has expired, or belongs to another stack. `astraflow up` prints a new one.\n"
    )
    assert (did["went"], did["stored"], did["address"]) == (None, {}, f"{prefect}/open")


def test_an_unreachable_server_and_blocked_storage_are_reported(prefect: str) -> None:
    away = opened(auth.page("http://127.0.0.1:1", SECRET))
    assert away["shown"].startswith("This page could not log in (")
    assert "Is the server running" in away["shown"]
    shut = opened(auth.page(prefect, SECRET), broken="storage")
    assert shut["shown"].startswith(
        "This page could not log in (The operation is insecure.). Is the server running, and may"
    )
    assert (shut["went"], shut["stored"]) == (None, {})


def test_the_pages_policy_allows_only_its_own_script() -> None:
    page = ask(Guard(Application(), SECRET, authenticates=True), "/open")
    scripts = re.findall(r"<script>(.*?)</script>", page.text, re.DOTALL)
    assert len(scripts) == 1
    assert page.text.count("<script") == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    policy = dict(
        part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";")
    )
    assert policy == {
        "default-src": "'none'",
        "script-src": f"'sha256-{digest}'",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert page.headers["referrer-policy"] == "no-referrer"
    assert page.headers["x-frame-options"] == "DENY"
    assert "innerHTML" not in page.text
