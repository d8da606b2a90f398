"""The live view of a run that was started elsewhere: in another terminal, on another machine, by a
schedule or from Prefect's page.
"""

from deployments.cli import run_follower, run_launcher
from deployments.cli.output import live_view
from deployments.cli.output.live_view import View
from deployments.cli.output.plain_console import PlainConsole
from deployments.cli.run_follower import ENDED, Followed
from deployments.cli.run_launcher import Say
from deployments.paths import Home
from deployments.registration import flow_runs
from deployments.registration.flow_runs import FlowRun
from deployments.stack import environment, up_down
from deployments.stack.state import Stack
from storage import layout
from storage.errors import ConfigError
from storage.run import runs
from storage.store.object_store import ObjectStore
from tasks.monitoring.status import Status, status
from tasks.terminal_text import one_line


def attach(home: Home, store: ObjectStore, run_id: str, say: Say) -> bool:
    """Show the run until it ends; of a run that is over, show the last picture.

    Ctrl-C leaves the run going. Without Prefect's server, and until it answers, the view comes from
    the store alone.
    Return True when the run completed or used up its budget, or when the user stopped watching.

    Raises:
        ConfigError: neither the store nor Prefect has the run.
    """
    server, flow_run, is_asked_again = "", None, False
    try:
        server = up_down.adopt_server(home)
        flow_run = flow_runs.newest_supervisor(server, run_id)
    except ConfigError as error:
        is_asked_again = bool(server)
        until = " until Prefect answers" if is_asked_again else ""
        say(f"only the store is shown{until}: {error}")
    is_active = flow_run is not None and not (flow_run.final or flow_run.is_suspended)
    run = store.sub(layout.run_prefix(run_id))
    seen = None if is_active and not run.exists(layout.RUN) else status(store, run_id)
    if seen is not None and not is_active and _is_over(seen, run, is_asked_again):
        PlainConsole().print(live_view.picture(_last_view(seen, flow_run)))
        say(f"{run_id} is {seen.state}: {one_line(seen.reason)}")
        return seen.state in ("completed", "exhausted")
    previous_stop = None if seen is None else runs.read_stop(run)
    followed = Followed(
        store=store,
        run_id=run_id,
        api_url=server,
        flow_run_id=flow_run.id if flow_run else "",
        links=_links(home, server, store, run_id, flow_run),
        home=home,
        previous_stop=previous_stop
        if previous_stop and flow_run and flow_run.created_s > previous_stop.at_s
        else None,
        elapsed_s=seen.elapsed_s if seen else 0.0,
    )
    return run_launcher.watch(followed, say, ask=None)


def _is_over(seen: Status, run: ObjectStore, is_asked_again: bool) -> bool:
    if seen.state == "interrupted":
        return not is_asked_again and not run_follower.supervisor_lives_here(run)
    return seen.closing is None and seen.state in ENDED


def _last_view(seen: Status, flow_run: FlowRun | None) -> View:
    return View(
        run_id=seen.run_id,
        elapsed_s=seen.elapsed_s,
        flow_state=flow_run.state if flow_run else "",
        status=seen,
    )


def _links(
    home: Home, server: str, store: ObjectStore, run_id: str, flow_run: FlowRun | None
) -> dict[str, str]:
    if flow_run is None:
        return {"objects": store.sub(layout.run_prefix(run_id)).address}
    stack = up_down.reachable(home)
    if stack is None or stack.prefect_url != server:
        tracking = environment.given("MLFLOW_TRACKING_URI") or ""
        stack = Stack(
            prefect_url=server,
            mlflow_url=tracking,
            store_url=store.address,
            own_server=False,
            own_mlflow=False,
        )
    return run_launcher.links(home, stack, store, run_id, flow_run.id)
