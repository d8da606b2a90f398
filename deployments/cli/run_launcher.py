"""What `astraflow run` does: judge the recipe before anything starts, bring the stack up, start the
flow run, watch it.
"""

import datetime
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deployments.cli import live_view, preflight, run_follower, tables
from deployments.cli.plain_console import PlainConsole
from deployments.cli.run_follower import Followed, Follower
from deployments.paths import Home
from deployments.registration import deployments, flow_runs
from deployments.stack import environment, pages, state, up_down
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
from tasks.recipes.source import parse_assignments

Say = Callable[[str], None]
DEPLOYMENT_MAX = 200
FLOW = "astraflow"
"""The flow that a deployment without a flow's name is of."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A run that can be started. Example:
    `Wanted("astraflow/multi-policy", "tiny-1", "multi_policy_tiny", {})`.
    """

    deployment: str
    run_id: str
    recipe: str | None
    """A name or a path; None for the deployment's own."""
    overrides: dict[str, Any]
    config: RunConfig | None = None
    """What the recipe comes to; None when it is a stranger's deployment that knows it."""


def prepare(
    deployment: str, recipe: str | None, assignments: list[str], run_id: str | None
) -> Wanted:
    """Raises ConfigError, naming key, line and fix, for a recipe that cannot work."""
    if run_id is not None:
        layout.run_prefix(run_id)  # ConfigError for what cannot be a run id, before anything starts
    if not deployment.isprintable() or len(deployment) > DEPLOYMENT_MAX:
        raise ConfigError(
            f"{deployment[:DEPLOYMENT_MAX]!r} can be no deployment's name; write FLOW/DEPLOYMENT"
        )
    full = deployment if "/" in deployment else f"{FLOW}/{deployment}"
    own = {
        f"{one.flow}/{one.name}": one.parameters.get("recipe")
        for one in deployments.DEPLOYMENTS
        if one.flow == FLOW
    }
    if full != deployment and full not in own:
        names = ", ".join(name.removeprefix(f"{FLOW}/") for name in own)
        raise ConfigError(
            f"there is no deployment {deployment}; name {names}, or one of your own as "
            "FLOW/DEPLOYMENT"
        )
    overrides = parse_assignments(assignments)
    judged = own.get(full) if recipe is None else recipe
    config = loader.load(judged, overrides) if judged is not None else None
    name = (
        config.name
        if config
        else re.sub(r"\W+", "-", full.rsplit("/", 1)[-1], flags=re.ASCII).strip("-_")[:60] or "run"
    )
    made_up = f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    return Wanted(
        deployment=full,
        run_id=made_up if run_id is None else run_id,
        recipe=recipe,
        overrides=overrides,
        config=config,
    )


def start(home: Home, wanted: Wanted, say: Say) -> Followed:
    """Starts the run and returns what `watch` needs. MLflow may still be starting by then, since
    nothing waits for it.
    """
    up = _stack(home, say)
    store = environment.open_store(home, up)
    stood = _refuse_what_cannot_start(wanted, up, store)
    parameters: dict[str, Any] = {"run_id": wanted.run_id, "overrides": _overrides(wanted, up)}
    if wanted.recipe is not None:
        parameters["recipe"] = loader.portable(wanted.recipe, elsewhere=not up.own_server)
    tags = [deployments.TAG, f"run:{wanted.run_id}"]
    flow_run = flow_runs.start(up.prefect_url, wanted.deployment, parameters, wanted.run_id, tags)
    links = {
        "Prefect": pages.prefect(home, up, f"/runs/flow-run/{flow_run.id}"),
        "MLflow": pages.mlflow(home, up),
        "objects": store.sub(layout.run_prefix(wanted.run_id)).address,
    }
    return Followed(
        store=store,
        run_id=wanted.run_id,
        api_url=up.prefect_url,
        flow_run_id=flow_run.id,
        links=links,
        home=home,
        stood=stood,
    )


def watch(followed: Followed, say: Say) -> bool:
    """Shows the run until it ends, then its summary; True when it completed or was left going."""
    last = Follower(followed, PlainConsole()).follow()
    if last is None:
        run_id = followed.run_id
        say(
            f"{run_id} goes on; `astraflow status {run_id}` shows it, `astraflow cancel {run_id}` "
            "ends it"
        )
        return True
    summarize(followed, last, say)
    return last.state == "completed"


def summarize(followed: Followed, last: Status, say: Say) -> None:
    """What the run brought, whether its books are clean, and where to read more."""
    run = followed.store.sub(layout.run_prefix(followed.run_id))
    say("")
    say(f"{followed.run_id}: {last.state} after {live_view.clock(last.elapsed_s)}; {last.reason}")
    for line in tables.summary_lines(last):
        say(f"  {line}")
    say(f"  verify: {tables.verdict_words(verify(run, _told(say)))}")
    report = (
        f"{run.url}/{layout.REPORT}" if run.exists(layout.REPORT) else "`astraflow report` makes it"
    )
    if report.startswith("s3:"):  # no browser opens it
        report += f"; `astraflow report {followed.run_id} --out report.html` writes it here"
    say(f"  report: {report}")
    if up_down.running(followed.home):
        say("the stack stays up for the next run; `astraflow down` stops it")


def _told(say: Say) -> Progress:
    """Says every few seconds what is being verified; nothing of a check that takes less."""
    told_at = time.monotonic()

    def tell(part: str, share: float) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= run_follower.LINE_INTERVAL_S:
            told_at = time.monotonic()
            say(f"  verifying {part} {share:.0%}")

    return tell


def _refuse_what_cannot_start(wanted: Wanted, up: Stack, store: ObjectStore) -> Stop | None:
    """Raises ConfigError; else the stop of the run's last start, if that ended. Paths in the recipe
    mean the same to a supervisor on this machine only, so that elsewhere it alone compares
    configurations.
    """
    config = wanted.config
    stood = preflight.refuse_restart(store, wanted.run_id, config if up.own_server else None)
    if config is not None:
        preflight.refuse_mirrors_at_home(store, config)
        preflight.refuse_missing_deployments(up.prefect_url, config)
        if up.own_server:
            preflight.refuse_what_this_machine_lacks(config)
    return stood


def _stack(home: Home, say: Say) -> Stack:
    """With a Prefect server and a store elsewhere, the run happens elsewhere too, and nothing is
    started here.
    """
    server, store = environment.given("PREFECT_API_URL"), environment.given("ASTRAFLOW_STORE")
    known = state.load(home)
    if server and store and not (known and server == known.prefect_url):
        say(f"starting the run on {server}; its workers may be anywhere")
        object_store.check_store(environment.open_store(home))
        tracking = environment.given("MLFLOW_TRACKING_URI") or ""
        return Stack(
            prefect_url=server,
            mlflow_url=tracking,
            store_url=store,
            own_server=False,
            own_mlflow=False,
        )
    up = up_down.up(home, say, wait_for_mlflow=False)
    environment.adopt(up_down.settings(home, up))
    return up


def _overrides(wanted: Wanted, up: Stack) -> dict[str, Any]:
    """A supervisor on this machine runs in another folder: it is sent the paths that the recipe
    came to here, last, since they are what the person's own overrides led to.
    """
    if wanted.config is None or not up.own_server:
        return wanted.overrides
    paths = loader.absolute_paths(wanted.config)
    return {key: value for key, value in wanted.overrides.items() if key not in paths} | paths
