"""What Prefect and MLflow show of a decision: a page, a tag and an event.

The store has the decision; these are copies for people and for automations.
"""

import os
import uuid
from collections.abc import Sequence
from typing import Any

from storage import layout
from storage.records.promotions import GateRow, PromotionDecision
from storage.run import runs
from storage.store.object_store import ObjectStore
from tasks.artifact_keys import artifact_key
from tasks.events.run_events import RUN_RESOURCE
from tasks.recipes.stored_config import read_config
from tasks.services.prefect_settings import COMMAND, client_of, import_prefect
from tasks.terminal_text import markdown as escaped
from tasks.tracking.mlflow_client import PARENT, Board

EVENT = "astraflow.promotion.{kind}"
RESOURCE = "astraflow.promotion.{name}"
DECISION_TAG = "astraflow.promotion"
"""Of an MLflow parent run: the newest decision about one of its versions."""


def page(decision: PromotionDecision) -> str:
    """Return a decision in Markdown: the team, the reason, and the gate's table."""
    lines = [
        f"# {escaped(decision.name)}, decision {decision.number}: {decision.kind.value}",
        "",
        escaped(decision.reason),
        "",
        f"By {escaped(decision.by)}.",
        "",
        "| policy | run | version | digest |",
        "|---|---|---:|---|",
    ]
    for policy, version in decision.team.items():
        texts = map(escaped, (policy, version.run_id, str(version.version), version.digest))
        lines.append(f"| {' | '.join(texts)} |")
    if decision.gate is not None:
        lines += ["", f"Gate: {escaped(decision.gate.reason)}", "", *_table(decision.gate.rows)]
    return "\n".join(lines)


def to_prefect(store: ObjectStore, decision: PromotionDecision, api_url: str) -> None:
    """Create the artifact `promotion-{name}` and emit the event of the decision.

    The event has an id that follows from the decision, so that a second one is the same event.
    Raises an error of Prefect's client when the server does not answer.
    """
    key = artifact_key("promotion", decision.name)
    with client_of(api_url, COMMAND) as client:
        client.create_artifact(_artifact(key, decision))
        from prefect.events import emit_event

        emit_event(
            event=EVENT.format(kind=decision.kind.value),
            resource={
                "prefect.resource.id": RESOURCE.format(name=decision.name),
                "prefect.resource.name": decision.name,
            },
            related=[
                {
                    "prefect.resource.id": RUN_RESOURCE.format(run_id=run_id),
                    "prefect.resource.role": "run",
                }
                for run_id in dict.fromkeys(each.run_id for each in decision.team.values())
            ],
            payload=_payload(decision),
            id=uuid.uuid5(
                uuid.NAMESPACE_URL,
                f"{store.url}/{layout.promotion(decision.name, decision.number)}",
            ),
        )


def to_mlflow(store: ObjectStore, decision: PromotionDecision, uri: str) -> None:
    """Log the decision's page and a tag to the parent runs of its versions.

    Runs with `tracking.enabled: false` are left out.

    Raises MlflowError when MLflow does not answer.
    """
    for run_id in dict.fromkeys(version.run_id for version in decision.team.values()):
        config = read_config(runs.open_run(store, run_id))
        if not config.tracking.enabled:
            continue
        experiment, policies = config.tracking.experiment, list(config.policies)
        board = Board(uri, experiment, run_id, policies, is_live=False)
        board.log_text(
            PARENT, page(decision), f"promotions/{decision.name}-{decision.number:08d}.md"
        )
        tag = f"{decision.kind.value}: decision {decision.number} of {decision.name}"
        board.log(PARENT, [], {DECISION_TAG: tag})


def prefect_api_url() -> str:
    """Return the address of the Prefect server of this process; empty where none is configured."""
    if url := os.environ.get("PREFECT_API_URL"):
        return url
    import_prefect()
    from prefect.settings import PREFECT_API_URL

    return PREFECT_API_URL.value() or ""


def _table(rows: Sequence[GateRow]) -> list[str]:
    lines = [
        "| data set | problems | champion | candidate | gain | at least | at most | p | required | "
        "passed | why |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    for row in rows:
        cells = [
            *(escaped(row.dataset), str(row.problems)),
            *(f"{value:.1%}" for value in (row.champion, row.candidate)),
            *(f"{value:+.1%}" for value in (row.gain, row.low, row.high)),
            *(f"{row.p_value:.2g}", f"{row.required:+.1%}", "yes" if row.passed else "no"),
            escaped(row.why),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _artifact(key: str, decision: PromotionDecision) -> Any:
    from prefect.client.schemas.actions import ArtifactCreate
    from prefect.runtime import flow_run

    return ArtifactCreate(
        type="markdown",
        key=key,
        data=page(decision),
        description=f"Decision {decision.number} of {decision.name}: {decision.kind.value}",
        flow_run_id=uuid.UUID(flow_run.id) if flow_run.id else None,
    )


def _payload(decision: PromotionDecision) -> dict[str, Any]:
    return {
        "number": decision.number,
        "kind": decision.kind.value,
        "by": decision.by,
        "reason": decision.reason,
        "team": {
            policy: {
                "run": version.run_id,
                "version": version.version,
                "digest": version.digest,
            }
            for policy, version in decision.team.items()
        },
    }
