"""The supervisor's and the evaluation's Prefect tasks: each is one call of a plain function, whose
parameters are names, never tables or tensors.
"""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from prefect import task
from prefect.cache_policies import NO_CACHE

from storage.records.control import Stop
from storage.run import runs
from storage.store import object_store
from storage.verify.verify import Progress, Verdict, verify
from tasks.monitoring.mlflow_sync import Tracker
from tasks.recipes.run_terms import run_terms
from tasks.terminal_text import markdown

if TYPE_CHECKING:  # it imports torch, which the supervisor does not need
    from tasks.evaluation import Evaluate

log = logging.getLogger(__name__)


def evaluation_task(evaluate: "Evaluate") -> "Evaluate":
    """Return the evaluation of one version vector as a Prefect task, which Prefect's pages show."""

    @task(
        name="evaluate",
        task_run_name="evaluate {versions}",
        cache_policy=NO_CACHE,
        persist_result=False,
    )
    def evaluate_versions(versions: Mapping[str, int]) -> bool:
        return evaluate(versions)

    return evaluate_versions


@task(name="verify", task_run_name="verify {run_id}", cache_policy=NO_CACHE, persist_result=False)
def verify_run(run_id: str, progress: Progress) -> Verdict:
    """Check every invariant of the run from the store alone."""
    run = runs.open_run(object_store.default_store(), run_id)
    verdict = verify(run, run_terms(run), progress)
    for violation in verdict.violations:
        log.error(
            "invariant %d is broken at %s: %s", violation.invariant, violation.where, violation.what
        )
    return verdict


@task(name="report", task_run_name="report {run_id}", cache_policy=NO_CACHE, persist_result=False)
def write_report(run_id: str) -> None:
    """Write the run's HTML report into the store."""
    from tasks.reports.page import write_report as write

    write(runs.open_run(object_store.default_store(), run_id), run_id)


@task(
    name="track", task_run_name="last sync with MLflow", cache_policy=NO_CACHE, persist_result=False
)
def finish_tracking(tracker: Tracker, state: str) -> str | None:
    """Send MLflow what it lacks, the report and the final weights; return the address of the run's
    page there.
    """
    return tracker.finish(state)


def summary(run_id: str, stop: Stop, verdict: Verdict | None) -> str:
    """Return a summary of a finished run in Markdown, for Prefect's artifact page."""
    from tasks.monitoring.status import status

    store = object_store.default_store()
    run_status = status(store, run_id)
    lines = [
        f"# {run_id}: {stop.state}",
        "",
        markdown(stop.reason),
        "",
        "| versions | dataset | workflow | accuracy | n |",
        "|---|---|---|---|---|",
    ]
    for row in run_status.evals:
        versions = ", ".join(f"{policy} {version}" for policy, version in row.versions.items())
        texts = map(markdown, (versions, row.dataset, row.workflow))
        lines.append(f"| {' | '.join(texts)} | {row.accuracy:.1%} | {row.n} |")
    if verdict is not None:
        lines += [
            "",
            "verify: clean" if verdict.ok else f"verify: **{len(verdict.violations)} violations**",
        ]
    lines += [
        "",
        f"Report: `astraflow report {run_id}`, or `{store.url}/runs/{run_id}/report.html`",
    ]
    return "\n".join(lines)
