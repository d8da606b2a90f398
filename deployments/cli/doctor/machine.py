"""The checks of `astraflow doctor`: this machine, the environment, the store and the servers.

Nothing is changed.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Literal
from urllib.parse import urlsplit

import psutil

from deployments.paths import Home
from deployments.servers import auth
from deployments.stack import environment, plan, state
from deployments.stack.processes import is_alive
from deployments.stack.state import MLFLOW, SERVER
from deployments.stack.up_down import reachable
from deployments.watchdog import restarts
from storage.errors import AstraFlowError, ConfigError
from storage.machine.cpus import num_cpus
from storage.machine.ports import is_free
from storage.store import addresses
from trainer import cpu_bf16

PYTHONS = ((3, 11), (3, 13))
"""Oldest and newest supported version."""
CORES_MIN = 2
MEMORY_MIN_GIB = 6.0
DISK_MIN_GIB = 3.0
GPU_TIMEOUT_S = 10.0
FAILING_ENDS = 3
"""A process of the stack that ended so many times in a row, soon after its start, keeps failing."""


@dataclass(frozen=True)
class Check:
    """The result of one check. Example: `Check("disk", "ok", "78 GiB free in /home/you")`."""

    name: str
    verdict: Literal["ok", "warn", "fail"]
    finding: str
    fix: str = ""


def examine(home: Home) -> list[Check]:
    """Return the results of all checks."""
    return [
        _python(),
        *_packages(),
        _cores(),
        _memory(),
        _disk(home),
        *_ports(home),
        *_processes(home),
        _private(home),
        *_addresses(),
        _bf16(),
        _store(home),
        _prefect(home),
        _gpu(),
        _bubblewrap(),
    ]


def _python() -> Check:
    oldest, newest = PYTHONS
    version = f"{sys.version.split()[0]} at {sys.executable}"
    if oldest <= sys.version_info[:2] <= newest:
        return Check("python", "ok", version)
    return Check(
        "python", "fail", version, f"use Python {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
    )


def _packages() -> Iterator[Check]:
    """Compare the installed packages with pyproject.toml; one result when all fit."""
    from packaging.requirements import Requirement

    num_wrong = 0
    declared = [Requirement(line) for line in metadata.requires("astraflow") or []]
    requirements = [
        requirement
        for requirement in declared
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    ]
    for requirement in requirements:
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            num_wrong += 1
            yield Check(requirement.name, "fail", "not installed", f'pip install "{requirement}"')
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            num_wrong += 1
            problem = f"{version}, but {requirement.specifier} is required"
            yield Check(requirement.name, "fail", problem, f'pip install "{requirement}"')
    if not num_wrong:
        yield Check("packages", "ok", f"all {len(requirements)} requirements are met")


def _cores() -> Check:
    count = num_cpus()
    if count >= CORES_MIN:
        return Check("cores", "ok", str(count))
    return Check(
        "cores",
        "warn",
        str(count),
        f"the embedded recipes are made for {CORES_MIN} cores; they take longer here",
    )


def _memory() -> Check:
    available = psutil.virtual_memory().available / 2**30
    if available >= MEMORY_MIN_GIB:
        return Check("memory", "ok", f"{available:.1f} GiB available")
    return Check(
        "memory",
        "warn",
        f"{available:.1f} GiB available",
        f"the embedded recipes use up to {MEMORY_MIN_GIB:.0f} GiB",
    )


def _disk(home: Home) -> Check:
    folder = next(parent for parent in (home.root, *home.root.parents) if parent.exists())
    free = shutil.disk_usage(folder).free / 2**30
    if not os.access(folder, os.W_OK):
        return Check(
            "disk", "fail", f"{folder} cannot be written", "set ASTRAFLOW_HOME to a writable folder"
        )
    if free >= DISK_MIN_GIB:
        return Check("disk", "ok", f"{free:.0f} GiB free in {folder}")
    return Check(
        "disk",
        "warn",
        f"{free:.1f} GiB free in {folder}",
        "free some space, or move ASTRAFLOW_HOME",
    )


def _ports(home: Home) -> Iterator[Check]:
    stack = state.load(home)
    used = (
        [
            urlsplit(url).port
            for url, process in (
                (stack.prefect_url, stack.process(SERVER)),
                (stack.mlflow_url, stack.process(MLFLOW)),
            )
            if process is not None
        ]
        if stack is not None
        else []
    )
    for name, port in (("Prefect", plan.PREFECT_PORT), ("MLflow", plan.MLFLOW_PORT)):
        if is_free(port):
            yield Check(f"port {port}", "ok", "free")
        elif port in used:
            yield Check(f"port {port}", "ok", "used by the running stack")
        else:
            yield Check(
                f"port {port}",
                "warn",
                "in use by another program",
                f"none: {name} uses the next free port",
            )


def _processes(home: Home) -> Iterator[Check]:
    """Report the processes of the stack that have ended, and those that the watchdog has started
    again; nothing where no stack is recorded.
    """
    stack = state.load(home)
    if stack is None or not stack.processes:
        return
    try:
        state.refuse_foreign(home, stack)
    except ConfigError as error:
        yield Check("stack", "fail", str(error), "see docs/deploying.md, One machine for each home")
        return
    counts = restarts.load(home)
    ends = ", ".join(f"{name} {each.ends} times" for name, each in sorted(counts.items()))
    again = f"; the watchdog has started again: {ends}" if ends else ""
    if ended := [process.name for process in stack.processes if not is_alive(process)]:
        yield Check("stack", "warn", f"ended: {', '.join(ended)}{again}", "astraflow up")
    elif failing := [name for name, each in counts.items() if each.in_a_row >= FAILING_ENDS]:
        logs = ", ".join(f"{home.logs / name}.log" for name in sorted(failing))
        yield Check("stack", "warn", f"all processes run{again}", f"read {logs}")
    else:
        yield Check("stack", "ok", f"all {len(stack.processes)} processes run{again}")


def _private(home: Home) -> Check:
    """Check that other users have no access to the home, and that the running servers have an auth
    string.
    """
    if not home.root.exists():
        return Check(
            "private", "ok", f"`astraflow up` creates {home.root} with access for you only"
        )
    if exposed := [str(path) for path in home.exposed()]:
        more = f" and {len(exposed) - 1} more" if len(exposed) > 1 else ""
        return Check(
            "private",
            "fail",
            f"other users have access to {exposed[0]}{more}",
            "`astraflow up` removes it",
        )
    try:
        home.refuse_irregular_files()
    except AstraFlowError as error:
        return Check("private", "fail", str(error), "delete it, then astraflow up")
    try:
        auth_string = auth.read(home)
    except AstraFlowError as error:
        return Check("private", "fail", str(error), "astraflow down, then astraflow up")
    if auth_string is None and reachable(home) is not None:
        return Check(
            "private",
            "fail",
            f"the stack is running, but {home.auth} is missing",
            "astraflow down, then astraflow up",
        )
    return Check("private", "ok", f"only you have access to {home.root}")


def _addresses() -> Iterator[Check]:
    """Report the variables whose addresses contain a credential or cannot be used."""
    for name in addresses.VARIABLES:
        try:
            environment.given(name)
        except ConfigError as error:
            yield Check(name, "fail", str(error), "correct it, or unset it")


def _bf16() -> Check:
    try:
        if cpu_bf16.survives_bf16():
            return Check("bf16", "ok", "matrix products work on this CPU")
        if cpu_bf16.survives_bf16(cpu_bf16.SAFE_ISA):
            name, value = next(iter(cpu_bf16.SAFE_ISA.items()))
            return Check(
                "bf16",
                "warn",
                "this CPU reports AMX without supporting it",
                f"none: the stack sets {name}={value}",
            )
    except subprocess.TimeoutExpired:
        return Check(
            "bf16",
            "warn",
            f"the check timed out after {cpu_bf16.PROBE_TIMEOUT_S:.0f} s",
            "try again when the machine has less load",
        )
    return Check(
        "bf16",
        "fail",
        "a matrix product in bf16 ends the process",
        "set EngineConfig dtype to float32, the default",
    )


def _store(home: Home) -> Check:
    from storage.store import object_store

    try:
        store = environment.open_store(home, plan.if_running(state.load(home)))
        if store.address == home.store.as_uri() and not home.store.exists():
            return Check("store", "ok", f"`astraflow up` creates {home.store}")
        object_store.check_store(store)
    except AstraFlowError as error:
        return Check("store", "fail", str(error), "correct ASTRAFLOW_STORE or its credentials")
    return Check("store", "ok", f"{store.address}: put-if-absent works")


def _prefect(home: Home) -> Check:
    from deployments.stack import readiness

    try:
        api_url = environment.given("PREFECT_API_URL")
    except ConfigError:
        shown = addresses.without_credentials(os.environ["PREFECT_API_URL"])
        return Check("prefect", "fail", f"{shown} was not checked", "see PREFECT_API_URL")
    stack = state.load(home)
    if api_url and not (stack and api_url == stack.prefect_url):
        trouble = readiness.prefect_trouble(api_url)
        if trouble is None:
            return Check("prefect", "ok", f"{api_url} responds")
        return Check(
            "prefect",
            "fail",
            f"{api_url}: {trouble}",
            "start it, or unset PREFECT_API_URL for a local one",
        )
    if stack is None:
        return Check("prefect", "ok", "the local stack is not running; `astraflow up` starts it")
    if readiness.responds(f"{stack.prefect_url}/health"):
        return Check("prefect", "ok", f"{stack.prefect_url} responds")
    return Check("prefect", "warn", f"{stack.prefect_url} does not respond", "astraflow up")


def _gpu() -> Check:
    command = shutil.which("nvidia-smi")
    if command is None:
        return Check("gpu", "ok", "none; the embedded recipes do not need one")
    try:
        listed = subprocess.run(
            [command, "-L"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GPU_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(
            "gpu",
            "warn",
            f"nvidia-smi fails ({type(error).__name__})",
            "if this machine has a GPU, check its driver",
        )
    names = [line.split(" (")[0] for line in listed.stdout.splitlines() if line.startswith("GPU")]
    if names:
        return Check("gpu", "ok", "; ".join(names))
    return Check(
        "gpu", "warn", "nvidia-smi lists no GPU", "if this machine has a GPU, check its driver"
    )


def _bubblewrap() -> Check:
    if shutil.which("bwrap"):
        return Check("bubblewrap", "ok", "found")
    return Check(
        "bubblewrap",
        "warn",
        "not found",
        "only sandboxed code workflows need it; install the package bubblewrap",
    )
