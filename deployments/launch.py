"""What `astraflow run` does: judge the recipe before anything starts, bring the stack up, start the flow run, watch
it."""

import datetime
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from deployments import environment, flow_runs, live, record, register, stack, tables
from deployments.follow import ENDED, Followed, Follower, last_words
from deployments.home import Home
from deployments.record import Stack
from storage import layout, objects
from storage.errors import AstraFlowError
from storage.verify import verify
from tasks import recipes
from tasks.recipe_source import parse_assignments
from tasks.status import Status

Say = Callable[[str], None]


@dataclass(frozen=True)
class Wanted:
    """A run that can be started. Example: `Wanted("astraflow/multi-policy", "tiny-1", "multi_policy_tiny", {})`."""

    deployment: str
    run_id: str
    recipe: str | None
    """A name or a path; None for the deployment's own."""
    overrides: dict[str, Any]


def prepare(deployment: str, recipe: str | None, assignments: list[str], run_id: str | None) -> Wanted:
    """Raises ConfigError, naming key, line and fix, for a recipe that cannot work."""
    full = deployment if "/" in deployment else f"astraflow/{deployment}"
    overrides = parse_assignments(assignments)
    own = {f"{one.flow}/{one.name}": one.parameters.get("recipe") for one in register.DEPLOYMENTS}
    judged = recipe or own.get(full)
    name = recipes.load(judged, overrides).name if judged else full.rsplit("/", 1)[-1]
    made_up = f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    return Wanted(full, run_id or made_up, recipe, overrides)


def start(home: Home, wanted: Wanted, say: Say) -> Followed:
    """Starts the run and returns what `watch` needs. MLflow may still be starting by then, since nothing waits for
    it."""
    up = _stack(home, say)
    parameters: dict[str, Any] = {"run_id": wanted.run_id, "overrides": wanted.overrides}
    if wanted.recipe is not None:
        parameters["recipe"] = _portable(wanted.recipe, up)
    tags = [register.TAG, f"run:{wanted.run_id}"]
    flow_run = flow_runs.start(up.prefect_url, wanted.deployment, parameters, wanted.run_id, tags)
    store = objects.open_store(up.store_url)
    links = {
        "Prefect": f"{up.ui_url}/runs/flow-run/{flow_run.id}",
        "MLflow": up.mlflow_url,
        "objects": store.sub(layout.run_prefix(wanted.run_id)).url,
    }
    return Followed(store, wanted.run_id, up.prefect_url, flow_run.id, links, home)


def watch(followed: Followed, say: Say) -> bool:
    """Shows the run until it ends, then its summary; True when it completed or was left going."""
    last = Follower(followed, Console()).follow()
    if last is None:
        say(f"{followed.run_id} goes on; `astraflow status {followed.run_id}` shows it, `astraflow down` ends it")
        return True
    if last.state not in ENDED:
        raise AstraFlowError(
            f"the supervisor of {followed.run_id} ended before the run did; start the run again with "
            f"`--run-id {followed.run_id}` to go on. {last_words(followed)}"
        )
    summarize(followed, last, say)
    return last.state == "completed"


def summarize(followed: Followed, last: Status, say: Say) -> None:
    """What the run brought, whether its books are clean, and where to read more."""
    run = followed.store.sub(layout.run_prefix(followed.run_id))
    say("")
    say(f"{followed.run_id}: {last.state} after {live.clock(last.elapsed_s)}; {last.reason}")
    for line in tables.summary_lines(last):
        say(f"  {line}")
    say(f"  verify: {tables.verdict_words(verify(run))}")
    report = f"{run.url}/{layout.REPORT}" if run.exists(layout.REPORT) else "`astraflow report` makes it"
    say(f"  report: {report}")
    say("the stack stays up for the next run; `astraflow down` stops it")


def _stack(home: Home, say: Say) -> Stack:
    """With a Prefect server and a store elsewhere, the run happens elsewhere too, and nothing is started here."""
    server, store = environment.given("PREFECT_API_URL"), environment.given("ASTRAFLOW_STORE")
    known = record.load(home)
    if server and store and not (known and server == known.prefect_url):
        say(f"starting the run on {server}; its workers may be anywhere")
        tracking = environment.given("MLFLOW_TRACKING_URI") or ""
        return Stack(server, tracking, store, own_server=False, own_mlflow=False)
    up = stack.running(home) or stack.up(home, say, wait_for_mlflow=False)
    environment.adopt(stack.settings(home, up))
    return up


def _portable(recipe: str, up: Stack) -> str:
    """A recipe's file is sent by its path to a supervisor on this machine, and as its text to one elsewhere."""
    if not Path(recipe).is_file():
        return recipe
    return str(Path(recipe).resolve()) if up.own_server else Path(recipe).read_text(encoding="utf-8")
