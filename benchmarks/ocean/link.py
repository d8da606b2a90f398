"""An emulated ocean: two network namespaces joined by a slow link. Requires Linux and root.

    astra-far 10.99.0.1 ──────── half the round trip each way ──────── 10.99.0.2 astra-home

With netem in the kernel, the link is a veth pair with `tc … netem` at both ends. This path is
untested: the machine that it was written on has no netem. Without netem, a script makes the same
namespaces: `SCRIPT up ONEWAY_MS GBPS QUEUE_MB` and `SCRIPT down`.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

FAR, HOME = "astra-far", "astra-home"
ADDRESSES = {FAR: "10.99.0.1", HOME: "10.99.0.2"}
_DEVICES = {FAR: "astraA", HOME: "astraB"}
QUEUE_MB = 64
MTU = 9000
COMMAND_TIMEOUT_S = 60.0


class LinkError(Exception):
    """The link cannot be emulated here; the message has the reason and a remedy."""


@contextmanager
def emulated(rtt_ms: float, gbps: float, script: Path) -> Iterator[None]:
    """Create the two namespaces, and remove them at the end of the block."""
    if os.geteuid() != 0:
        raise LinkError("network namespaces need root; run this as root")
    _refuse_existing()
    if _try_netem(rtt_ms / 2, gbps):
        down: Callable[[], object] = _remove
    elif script.is_file():
        down = _up_by_script(script, rtt_ms / 2, gbps)
    else:
        raise LinkError(
            f"this kernel has no netem, and {script} is not a file; name a script that makes the "
            "namespaces with --wan"
        )
    try:
        yield
    finally:
        down()


def inside(namespace: str, command: Sequence[str]) -> list[str]:
    """Return the command line that executes `command` in a namespace."""
    return ["ip", "netns", "exec", namespace, *command]


def bytes_arrived() -> int:
    """Return the total bytes that the far side received over the link."""
    output = _run(["ip", "-n", FAR, "-s", "-j", "link", "show", "dev", _DEVICES[FAR]])
    return int(json.loads(output)[0]["stats64"]["rx"]["bytes"])


def _refuse_existing() -> None:
    existing = {
        line.split()[0] for line in _run(["ip", "netns", "list"]).splitlines() if line.strip()
    }
    if clashes := sorted(existing & {FAR, HOME}):
        raise LinkError(
            f"the namespace {clashes[0]} exists already: another benchmark runs, or one was "
            f"killed; `ip netns del {FAR}; ip netns del {HOME}` removes its namespaces"
        )


def _try_netem(oneway_ms: float, gbps: float) -> bool:
    """Create the link with netem; False, with nothing left behind, if the kernel has no netem."""
    in_flight = int(gbps * 1e9 / 8 * oneway_ms / 1e3 + QUEUE_MB * 2**20)
    shape = [
        "netem",
        "delay",
        f"{oneway_ms}ms",
        "rate",
        f"{gbps}gbit",
        "limit",
        str(max(1000, in_flight // 1500)),
    ]
    try:
        for namespace in (FAR, HOME):
            _run(["ip", "netns", "add", namespace])
            _run(["ip", "-n", namespace, "link", "set", "lo", "up"])
        ends = [
            "name",
            _DEVICES[FAR],
            "netns",
            FAR,
            "type",
            "veth",
            "peer",
            "name",
            _DEVICES[HOME],
            "netns",
            HOME,
        ]
        _run(["ip", "link", "add", *ends])
        for namespace, device in _DEVICES.items():
            _run(["ip", "-n", namespace, "link", "set", device, "mtu", str(MTU), "up"])
            _run(
                ["ip", "-n", namespace, "addr", "add", f"{ADDRESSES[namespace]}/24", "dev", device]
            )
            _run(["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shape])
    except LinkError:
        _remove()
        return False
    return True


def _up_by_script(script: Path, oneway_ms: float, gbps: float) -> Callable[[], object]:
    """Create the link by the script; return a function that removes it."""
    down = partial(_run, [str(script), "down"])
    try:
        _run([str(script), "up", f"{oneway_ms:g}", f"{gbps:g}", str(QUEUE_MB)])
    except LinkError:
        down()
        raise
    return down


def _remove() -> None:
    for namespace in (FAR, HOME):
        subprocess.run(
            ["ip", "netns", "del", namespace],
            capture_output=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )


def _run(command: list[str]) -> str:
    try:
        completed = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LinkError(f"{' '.join(command)} cannot be run: {error}") from error
    if completed.returncode:
        output = completed.stderr.strip() or completed.stdout.strip()
        raise LinkError(f"{' '.join(command)} failed: {output}")
    return completed.stdout
