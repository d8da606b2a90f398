"""The steps of `astraflow run`: check the recipe, start stack and flow run, show the run."""

import datetime
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deployments.cli import preflight, run_follower
from deployments.cli.output import live_view, tables
from deployments.cli.output.plain_console import PlainConsole
from deployments.cli.run_follower import ENDED, Followed, Follower
from deployments.paths import Home
from deployments.registration import deployments, flow_runs
from deployments.stack import environment, pages, plan, state, up_down
from deployments.stack.state import Stack
from storage import layout
from storage.errors import ConfigError
from storage.records.control import Stop
from storage.store import object_store
from storage.store.object_store import ObjectStore
from storage.verify.verify import Progress, verify
from tasks.monitoring.status import Status
from tasks.recipes import loader
from tasks.recipes.run_config import RunConfig
from tasks.recipes.run_terms import run_terms
from tasks.recipes.source import parse_assignments
from tasks.terminal_text import one_line

Say = Callable[[str], None]
DEPLOYMENT_MAX = 200
_RESERVED = re.compile("[?#%&<>]")
"""Characters that end or change a path in an address; Prefect takes them for no name."""
FLOW = "astraflow"
"""The flow of a deployment that is written without a flow's name."""
NIGHTLY = "astraflow/nightly"


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A checked request for a run.

    Example: `RunRequest(deployment="astraflow/multi-policy", run_id="tiny-1",
    recipe="multi_policy_tiny", overrides={})`.
    """

    deployment: str
    run_id: str
    recipe: str | None
    """A name or a path; None for the deployment's own."""
    overrides: dict[str, Any]
    config: RunConfig | None = None
    """The loaded recipe; None when only the user's own deployment names it."""


def prepare(
    deployment: str, recipe: str | None, assignments: list[str], run_id: str | None
) -> RunRequest:
    """Check the arguments of `astraflow run`.

    Raises ConfigError for a recipe that cannot work, with key, line and fix.
    """
    if run_id is not None:
        layout.run_prefix(run_id)  # ConfigError for an invalid run id, before anything starts
    check_deployment(deployment)
    full = deployment if "/" in deployment else f"{FLOW}/{deployment}"
    shipped_recipes = {
        f"{shipped.flow}/{shipped.name}": shipped.parameters.get("recipe")
        for shipped in deployments.DEPLOYMENTS
        if shipped.entrypoint == deployments.SUPERVISOR
    }
    if full not in (deployment, NIGHTLY) and full not in shipped_recipes:
        names = ", ".join(name.removeprefix(f"{FLOW}/") for name in shipped_recipes)
        raise ConfigError(
            f"there is no deployment {deployment}; name {names}, or your own as FLOW/DEPLOYMENT"
        )
    if full == NIGHTLY:
        raise ConfigError(
            f"{NIGHTLY} begins a night of recurring training, not a run; start it with `prefect "
            f"deployment run {NIGHTLY}`"
        )
    overrides = parse_assignments(assignments)
    source = shipped_recipes.get(full) if recipe is None else recipe
    config = loader.load(source, overrides) if source is not None else None
    name = (
        config.name
        if config
        else re.sub(r"\W+", "-", full.rsplit("/", 1)[-1], flags=re.ASCII).strip("-_")[:60] or "run"
    )
    return RunRequest(
        deployment=full,
        run_id=new_run_id(name) if run_id is None else run_id,
        recipe=recipe,
        overrides=overrides,
        config=config,
    )


def check_deployment(name: str) -> None:
    """Raise ConfigError for a name that no deployment has, with or without a flow's before it."""
    parts = name.split("/")
    if (
        len(parts) > 2
        or any(part in ("", ".", "..") for part in parts)
        or not name.isprintable()
        or _RESERVED.search(name)
        or len(name) > DEPLOYMENT_MAX
    ):
        raise ConfigError(
            f"{name[:DEPLOYMENT_MAX]!r} cannot be the name of a deployment; write FLOW/DEPLOYMENT"
        )


def new_run_id(name: str) -> str:
    """Return `{name}-{date}-{time}-{4 random hex digits}`."""
    return f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def start(home: Home, request: RunRequest, say: Say) -> Followed:
    """Start the run; return the arguments of `watch`. MLflow may still be starting."""
    if request.config is not None and preflight.continues_runs(request.config):
        environment.refuse_bad_addresses()
        recorded = environment.open_store(home, plan.if_running(state.load(home)))
        preflight.refuse_missing_origins(recorded, request.run_id, request.config)
    stack = _stack(home, say)
    store = environment.open_store(home, stack)
    previous_stop = _refuse_what_cannot_start(request, stack, store)
    parameters: dict[str, Any] = {
        "run_id": request.run_id,
        "overrides": _overrides(request, stack),
    }
    if request.recipe is not None:
        parameters["recipe"] = loader.portable(request.recipe, elsewhere=not stack.own_server)
    tags = [deployments.TAG, f"run:{request.run_id}"]
    flow_run = flow_runs.start(
        stack.prefect_url, request.deployment, parameters, request.run_id, tags
    )
    return Followed(
        store=store,
        run_id=request.run_id,
        api_url=stack.prefect_url,
        flow_run_id=flow_run.id,
        links=links(home, stack, store, request.run_id, flow_run.id),
        home=home,
        previous_stop=previous_stop,
    )


def links(
    home: Home, stack: Stack, store: ObjectStore, run_id: str, flow_run_id: str
) -> dict[str, str]:
    """Return the addresses of a run: name → address."""
    return {
        "Prefect": pages.prefect(home, stack, f"/runs/flow-run/{flow_run_id}"),
        "MLflow": pages.mlflow(home, stack),
        "objects": store.sub(layout.run_prefix(run_id)).address,
    }


def watch(followed: Followed, say: Say, ask: Callable[[str], str] | None = input) -> bool:
    """Show the run until it ends, then its summary.

    `ask` asks on Ctrl-C whether to cancel the run; without it, the run is left. Return True when it
    completed or used up its budget, or when the user stopped watching.
    """
    follower = Follower(followed, PlainConsole(), ask)
    last = follower.follow()
    if last is None:
        run_id, seen = followed.run_id, follower.seen
        if seen is not None and seen.state in ENDED:
            say(f"{run_id} is {seen.state}; `astraflow status {run_id}` shows it")
        else:
            say(
                f"{run_id} continues; `astraflow status {run_id}` shows it, `astraflow cancel "
                f"{run_id}` ends it"
            )
        return True
    summarize(followed, last, say)
    return last.state in ("completed", "exhausted")


def summarize(followed: Followed, last: Status, say: Say) -> None:
    """Print the run's results, the verdict of `verify` and the report's address."""
    run = followed.store.sub(layout.run_prefix(followed.run_id))
    say("")
    took, reason = live_view.clock(last.elapsed_s), one_line(last.reason)
    say(f"{followed.run_id}: {last.state} after {took}; {reason}")
    if last.state == "exhausted":
        settings = [
            f"--set budget.{kind}=…" for kind, each in last.budget.items() if each.is_used_up
        ]
        say(
            "  start it again with a larger budget to go on: "
            f"{' '.join(['--run-id', followed.run_id, *settings])}"
        )
    if last.state == "suspended":
        say(f"  `astraflow resume {followed.run_id}` goes on")
    for line in tables.summary_lines(last):
        say(f"  {line}")
    say(f"  verify: {tables.verdict_line(verify(run, run_terms(run), _progress_printer(say)))}")
    report = (
        f"{run.url}/{layout.REPORT}"
        if run.exists(layout.REPORT)
        else "`astraflow report` writes it"
    )
    if report.startswith("s3:"):  # a browser cannot open it
        report += f"; `astraflow report {followed.run_id} --out report.html` writes it here"
    say(f"  report: {report}")
    if up_down.running(followed.home):
        say("the stack stays up for the next run; `astraflow down` stops it")


def _progress_printer(say: Say) -> Progress:
    """Return a function that prints the progress of `verify` every LINE_INTERVAL_S."""
    printed_at = time.monotonic()

    def print_progress(part: str, share: float) -> None:
        nonlocal printed_at
        if time.monotonic() - printed_at >= run_follower.LINE_INTERVAL_S:
            printed_at = time.monotonic()
            say(f"  verifying {part} {share:.0%}")

    return print_progress


def _refuse_what_cannot_start(request: RunRequest, stack: Stack, store: ObjectStore) -> Stop | None:
    """Raise ConfigError, or return the stop of the run's last start, if that ended.

    A remote supervisor resolves the recipe's paths on its own machine, so it compares the
    configurations itself.
    """
    config = request.config
    previous_stop = preflight.refuse_restart(
        store, request.run_id, config if stack.own_server else None
    )
    if config is not None:
        preflight.refuse_mirrors_at_home(store, config)
        preflight.refuse_missing_deployments(stack.prefect_url, config)
        if stack.own_server:
            preflight.refuse_what_this_machine_lacks(config)
    return previous_stop


def _stack(home: Home, say: Say) -> Stack:
    """Return the local stack, started if needed, or the external servers.

    With an external Prefect server and an external store, nothing is started here.
    """
    environment.refuse_bad_addresses()
    server, store = environment.given("PREFECT_API_URL"), environment.given("ASTRAFLOW_STORE")
    recorded = state.load(home)
    if server and store and not (recorded and server == recorded.prefect_url):
        say(f"starting the run on {server}; its workers may be on other machines")
        object_store.check_store(environment.open_store(home))
        tracking = environment.given("MLFLOW_TRACKING_URI") or ""
        return Stack(
            prefect_url=server,
            mlflow_url=tracking,
            store_url=store,
            own_server=False,
            own_mlflow=False,
        )
    stack = up_down.up(home, say, wait_for_mlflow=False)
    environment.adopt(up_down.settings(home, stack))
    return stack


def _overrides(request: RunRequest, stack: Stack) -> dict[str, Any]:
    """Return the overrides of the recipe, with absolute paths for a supervisor on this machine,
    which runs in another folder.
    """
    if request.config is None or not stack.own_server:
        return request.overrides
    paths = loader.absolute_paths(request.config)
    return {key: value for key, value in request.overrides.items() if key not in paths} | paths
