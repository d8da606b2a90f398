"""The supervisor's and the evaluation's Prefect tasks: each is one call of a plain function, whose
parameters are names, never tables or tensors.
"""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task

from storage import layout
from storage.errors import ConfigError, CorruptError
from storage.records.control import Stop
from storage.run import evaluations, runs
from storage.store import object_store
from storage.verify.verify import Progress, Verdict, verify
from tasks.recipes.run_terms import run_terms
from tasks.terminal_text import markdown
from tasks.tracking.mlflow_sync import Tracker

if TYPE_CHECKING:  # it imports torch, which the supervisor does not need
    from tasks.evaluation import Evaluate

log = logging.getLogger(__name__)

RETRIES, RETRY_DELAY_S = 2, 10.0
"""Of each closing step."""
CLOSING_TAG = "closing"

T = TypeVar("T")
Result: TypeAlias = T | BaseException
"""What a step before returned, or why it failed."""


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


async def may_pass(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Whether a step that failed may succeed when it is repeated: not after an error that a person
    must correct, nor after its time limit.
    """
    error = await state.aresult(raise_on_failure=False)
    return not isinstance(error, ConfigError | CorruptError | TimeoutError)


_closing: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "persist_result": False,
    "retries": RETRIES,
    "retry_delay_seconds": RETRY_DELAY_S,
    "retry_condition_fn": may_pass,
    "tags": [CLOSING_TAG],
}


@task(name="last evaluation", task_run_name="last evaluation of {run_id}", **_closing)
def last_evaluation(run_id: str) -> str | None:
    """Return the object name of the evaluation of the newest versions; None where there is none."""
    stored = evaluations.keys(runs.open_run(object_store.default_store(), run_id))
    return stored[-1] if stored else None


@task(name="verify", task_run_name="verify {run_id}", **_closing)
def verify_run(run_id: str, progress: Progress) -> Verdict:
    """Check every invariant of the run from the store alone."""
    run = runs.open_run(object_store.default_store(), run_id)
    verdict = verify(run, run_terms(run), progress)
    for violation in verdict.violations:
        log.error(
            "invariant %d is broken at %s: %s", violation.invariant, violation.where, violation.what
        )
    return verdict


@task(name="report", task_run_name="report {run_id}", **_closing)
def write_report(run_id: str) -> str:
    """Write the run's HTML report into the store, and return its object name."""
    from tasks.reports.page import write_report as write

    write(runs.open_run(object_store.default_store(), run_id), run_id)
    return f"{layout.run_prefix(run_id)}/{layout.REPORT}"


@task(name="register", task_run_name="register {run_id} in MLflow", **_closing)
def register(run_id: str, tracker: Tracker, state: str) -> str | None:
    """Send MLflow what it lacks, the report and the final weights; return the address of the run's
    page there.
    """
    return tracker.finish(state)


@task(name="notify", task_run_name="notify {run_id}", **_closing)
def notify(
    run_id: str,
    stop: Stop,
    evaluation: Result[str | None],
    verdict: Result[Verdict],
    report: Result[str],
    page: Result[str | None],
) -> None:
    """Show how the run ended among Prefect's artifacts.

    The results are those of the steps before, or why there is none.
    """
    create_markdown_artifact(
        key="run-summary",
        markdown=summary(run_id, stop, evaluation, verdict, report, page),
        description=f"Run {run_id}",
    )


def summary(
    run_id: str,
    stop: Stop,
    evaluation: Result[str | None],
    verdict: Result[Verdict],
    report: Result[str],
    page: Result[str | None],
) -> str:
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
    if not isinstance(evaluation, str | None):
        lines += ["", f"Last evaluation: {_failed(evaluation)}"]
    elif evaluation:
        lines += ["", f"Last evaluation: `{evaluation}`"]
    if isinstance(verdict, BaseException):
        lines += ["", f"verify: {_failed(verdict)}"]
    else:
        num = len(verdict.violations)
        lines += ["", "verify: clean" if verdict.ok else f"verify: **{num} violations**"]
    written = (
        f"`astraflow report {run_id}`, or `{store.url}/{report}`"
        if isinstance(report, str)
        else f"{_failed(report)}; `astraflow report {run_id}` writes it"
    )
    lines += ["", f"Report: {written}"]
    if page is not None:
        lines += ["", f"MLflow: {page if isinstance(page, str) else _failed(page)}"]
    return "\n".join(lines)


def _failed(error: BaseException) -> str:
    return f"**not finished** ({type(error).__name__}: {markdown(str(error))})"
