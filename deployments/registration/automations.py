"""The automations, and their registration at a Prefect server.

    restart a dead supervisor    flow run Crashed ──▶ the same deployment, parameters and run id
    restart a dead night         flow run Crashed ──▶ the same deployment, parameters and night
    notify of a failed run       flow run Failed  ──▶ the user's notification block
    notify of an idle pool       pool not ready   ──▶ the user's notification block

A process that was killed is reported as Crashed by its worker, or by the watchdog of its machine.
An automation is ours by its whole name; others are never read or changed. One that the user has
switched off stays off.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from deployments.registration import pools
from deployments.registration.client import connected
from deployments.registration.deployments import DEPLOYMENTS, NIGHTLY, TAG, flow_of, form
from storage.errors import ConfigError
from tasks.services import notification_block

SUPERVISORS = "astraflow"
"""Flow of the runs and of the nights."""
RESTART_RUN = "AstraFlow: restart a dead supervisor"
RESTART_NIGHT = "AstraFlow: restart a dead night"
NOTIFY_FAILED = "AstraFlow: notify of a failed run"
NOTIFY_IDLE_POOL = "AstraFlow: notify of a work pool without a worker"
NIGHT_PAUSE_S = 30.0
"""Pause before a dead night is started again; `tasks.recurring.restarts` limits how often."""

RUN_ID = "{% for tag in flow_run.tags if tag.startswith('run:') %}{{ tag[4:] }}{% endfor %}"
NIGHT_ID = (
    "{{ (flow_run.parameters.night_id or flow_run.expected_start_time.strftime('%Y%m%d-%H%M')) }}"
)
"""As `tasks.recurring.due_time` names a night."""


def register(api_url: str, notify: str = "") -> list[str]:
    """Create or update the automations; return their names.

    `notify` is a notification block, such as `slack-webhook/on-call`; without one, the automations
    that notify are neither created nor changed. Raises ConfigError when the server has no such
    block, or refuses an automation.
    """
    from prefect.exceptions import PrefectHTTPStatusError

    notification_block.check_name("--notify", notify)
    with connected(api_url) as client:
        wanted = [*_restarts(), *(_notifications(client, notify, api_url) if notify else ())]
        for automation in wanted:
            try:
                _create_or_update(client, automation)
            except PrefectHTTPStatusError as error:
                raise ConfigError(
                    f"{api_url} refused the automation {automation.name!r}: "
                    f"{error.response.text[:500]}"
                ) from error
    return [automation.name for automation in wanted]


def _create_or_update(client: Any, automation: Any) -> None:
    for existing in client.read_automations_by_name(automation.name):
        kept = automation.model_copy(update={"enabled": existing.enabled})
        client.update_automation(existing.id, kept)
        return
    client.create_automation(automation)


def _restarts() -> Iterator[Any]:
    """Yield the automations that start a dead supervisor again.

    A supervisor has the tag `run:…` once its run has begun, that of a night `night:…`; before that
    there is nothing to resume, and one that dies at every start would be started for ever.
    """
    from prefect.events.actions import RunDeployment
    from prefect.events.schemas.automations import AutomationCore

    run, night = _supervising_flow(nightly=False), _supervising_flow(nightly=True)
    yield AutomationCore(
        name=RESTART_RUN,
        description="Starts the supervisor of a run again after its process was killed. "
        "A run whose supervisor keeps dying fails.",
        tags=[TAG],
        trigger=_flow_run_trigger(
            "Crashed",
            {"prefect.resource.role": "tag", "prefect.resource.id": "prefect.tag.run:*"},
            {"prefect.resource.role": "deployment", "prefect.resource.name": f"!{NIGHTLY}"},
        ),
        actions=[
            RunDeployment(source="inferred", parameters={**_same(run), "run_id": RUN_ID}),
        ],
    )
    yield AutomationCore(
        name=RESTART_NIGHT,
        description="Starts a night again after its process was killed. "
        "A night that keeps dying without storing anything new fails.",
        tags=[TAG],
        trigger=_flow_run_trigger(
            "Crashed",
            {"prefect.resource.role": "tag", "prefect.resource.id": "prefect.tag.night:*"},
            {"prefect.resource.role": "deployment", "prefect.resource.name": NIGHTLY},
        ),
        actions=[
            RunDeployment.model_validate(
                {
                    "source": "inferred",
                    "parameters": {**_same(night), "night_id": NIGHT_ID},
                    "schedule_after": NIGHT_PAUSE_S,
                }
            ),
        ],
    )


def _notifications(client: Any, notify: str, api_url: str) -> Iterator[Any]:
    """Yield the automations that send messages through a block."""
    from prefect.events.actions import SendNotification
    from prefect.events.schemas.automations import AutomationCore

    block = _block_id(client, notify, api_url)
    yield AutomationCore(
        name=NOTIFY_FAILED,
        description=f"Notifies {notify} when a run or a night has failed.",
        tags=[TAG],
        trigger=_flow_run_trigger("Failed"),
        actions=[
            SendNotification(
                block_document_id=block,
                subject="{{ flow_run.name }} failed",
                body="{{ flow_run.state.message }}\n\n{{ flow_run|ui_url }}",
            )
        ],
    )
    yield AutomationCore(
        name=NOTIFY_IDLE_POOL,
        description=f"Notifies {notify} when a work pool has no worker any more.",
        tags=[TAG],
        trigger=_trigger(
            "prefect.work-pool.not-ready",
            match={
                "prefect.resource.id": "prefect.work-pool.*",
                "prefect.resource.name": list(pools.NAMES),
            },
            match_related={},
        ),
        actions=[
            SendNotification(
                block_document_id=block,
                subject="the work pool {{ work_pool.name }} has no worker",
                body="No worker serves the work pool {{ work_pool.name }}; flow runs in it wait. "
                "Start one: astraflow worker --pool {{ work_pool.name }}",
            )
        ],
    )


def _flow_run_trigger(state: str, *related: Mapping[str, str]) -> Any:
    """Return the trigger of every flow run of a supervisor or a night that enters the state."""
    flow = {"prefect.resource.role": "flow", "prefect.resource.name": SUPERVISORS}
    return _trigger(
        f"prefect.flow-run.{state}",
        match={"prefect.resource.id": "prefect.flow-run.*"},
        match_related=[flow, *related],
    )


def _trigger(event: str, match: Any, match_related: Any) -> Any:
    """Return a trigger that fires at once for each event of this name."""
    from prefect.events.schemas.automations import EventTrigger, Posture

    return EventTrigger(
        expect={event},
        match=match,
        match_related=match_related,
        for_each={"prefect.resource.id"},
        posture=Posture.Reactive,
        threshold=1,
    )


def _supervising_flow(*, nightly: bool) -> Any:
    """Return the flow of the nights, or that of the runs."""
    return flow_of(
        next(
            each
            for each in DEPLOYMENTS
            if each.flow == SUPERVISORS and (each.name == NIGHTLY) == nightly
        )
    )


def _same(flow: Any) -> dict[str, str]:
    """Return templates for the parameters that a flow run had; for absent ones, the defaults."""
    return {
        name: f"{{{{ flow_run.parameters.{name} | default({_literal(schema.get('default'))}) }}}}"
        for name, schema in form(flow)["properties"].items()
    }


def _literal(default: Any) -> str:
    """Return a default as an expression of Jinja, which spells null as none."""
    return "none" if default is None else json.dumps(default)


def _block_id(client: Any, notify: str, api_url: str) -> Any:
    from prefect.exceptions import ObjectNotFound

    kind, _, name = notify.partition("/")
    try:
        return client.read_block_document_by_name(name, kind).id
    except ObjectNotFound:
        raise ConfigError(
            f"{api_url} has no block {notify}; create it on the page Blocks, or correct the name"
        ) from None
