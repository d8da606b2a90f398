"""Our automations, evaluated by the code of Prefect's server: what they react to, what they start."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.exceptions import ObjectNotFound
from prefect.server.events.actions import RunDeployment as ServerRunDeployment
from prefect.server.events.schemas.automations import EventTrigger as ServerTrigger
from prefect.server.events.schemas.events import ReceivedEvent
from prefect.utilities.schema_tools.hydration import HydrationContext, hydrate

from deployments.registration import automations, deployments
from deployments.registration.automations import (
    NOTIFY_FAILED,
    NOTIFY_IDLE_POOL,
    RESTART_NIGHT,
    RESTART_RUN,
)
from deployments.registration.deployments import DEPLOYMENTS
from storage.errors import ConfigError
from tasks.recurring import due_time

BLOCK = uuid.uuid4()


class Server:
    """A client of a server with these automations."""

    def __init__(self, *standing: SimpleNamespace) -> None:
        self.standing = standing
        self.created: dict[str, Any] = {}
        self.updated: dict[str, Any] = {}

    def read_automations_by_name(self, name: str) -> list[SimpleNamespace]:
        return [each for each in self.standing if each.name == name]

    def create_automation(self, automation: Any) -> None:
        self.created[automation.name] = automation

    def update_automation(self, automation_id: str, automation: Any) -> None:
        self.updated[automation_id] = automation

    def read_block_document_by_name(self, name: str, kind: str) -> SimpleNamespace:
        if (kind, name) != ("slack-webhook", "on-call"):
            raise ObjectNotFound(http_exc=RuntimeError("404"))
        return SimpleNamespace(id=BLOCK)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Any:
    def register(server: Server, notify: str = "") -> list[str]:
        @contextmanager
        def connected(api_url: str) -> Iterator[Server]:
            yield server

        monkeypatch.setattr(automations, "connected", connected)
        return automations.register("http://prefect/api", notify)

    return register


def test_only_our_automations_are_written_and_one_that_is_off_stays_off(registered: Any) -> None:
    off = SimpleNamespace(id="1", name=RESTART_RUN, enabled=False)
    theirs = SimpleNamespace(id="2", name="theirs", enabled=True)
    server = Server(off, theirs)
    assert registered(server) == [RESTART_RUN, RESTART_NIGHT]
    assert {key: each.enabled for key, each in server.updated.items()} == {"1": False}
    assert {key: each.enabled for key, each in server.created.items()} == {RESTART_NIGHT: True}


def test_notifications_need_a_block_which_must_exist(registered: Any) -> None:
    server = Server()
    assert registered(server, "slack-webhook/on-call")[2:] == [NOTIFY_FAILED, NOTIFY_IDLE_POOL]
    for name in (NOTIFY_FAILED, NOTIFY_IDLE_POOL):
        assert server.created[name].actions[0].block_document_id == BLOCK
    with pytest.raises(ConfigError, match="has no block slack-webhook/nobody; create it"):
        registered(Server(), "slack-webhook/nobody")


@pytest.mark.parametrize("name", ["on-call-1", "https://hooks.slack.com/services/T0/B0/on-call-1"])
def test_what_names_no_block_is_refused_and_not_shown(registered: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=r"^--notify does not name a notification") as raised:
        registered(Server(), name)
    assert "on-call-1" not in str(raised.value)


def _event(name: str, resource: dict[str, str], *related: tuple[str, str, str]) -> ReceivedEvent:
    return ReceivedEvent.model_validate(
        {
            "occurred": datetime.now(UTC),
            "event": name,
            "resource": resource,
            "related": [
                {
                    "prefect.resource.id": f"prefect.{role}.{name if role == 'tag' else 1}",
                    "prefect.resource.role": role,
                    "prefect.resource.name": name,
                }
                for role, name in (item[:2] for item in related)
            ],
            "id": uuid.uuid4(),
        }
    )


def _ended(state: str, flow: str, deployment: str, *tags: str) -> ReceivedEvent:
    related = [("flow", flow, ""), *([("deployment", deployment, "")] if deployment else [])]
    related += [("tag", tag, "") for tag in tags]
    resource = {"prefect.resource.id": "prefect.flow-run.1", "prefect.resource.name": "a name"}
    return _event(f"prefect.flow-run.{state}", resource, *related)


def _reactions(server: Server, event: ReceivedEvent) -> set[str]:
    return {
        name
        for name, automation in server.created.items()
        if ServerTrigger.model_validate(automation.trigger.model_dump(mode="json")).covers(event)
    }


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (_ended("Crashed", "astraflow", "multi-policy", "astraflow", "run:a"), {RESTART_RUN}),
        (_ended("Crashed", "astraflow", "mine", "run:a"), {RESTART_RUN}),
        (_ended("Crashed", "astraflow", "multi-policy", "astraflow"), set()),
        (_ended("Crashed", "astraflow", "", "run:a"), set()),
        (_ended("Crashed", "train", "trainer", "run:a", "member:trainer-solver"), set()),
        (_ended("Crashed", "astraflow", "nightly", "astraflow", "night:math"), {RESTART_NIGHT}),
        (_ended("Crashed", "astraflow", "nightly", "astraflow"), set()),
        (_ended("Crashed", "gc", "nightly", "astraflow"), set()),
        (_ended("Cancelled", "astraflow", "multi-policy", "run:a"), set()),
        (_ended("Failed", "astraflow", "multi-policy", "run:a"), {NOTIFY_FAILED}),
        (_ended("Failed", "astraflow", "nightly"), {NOTIFY_FAILED}),
        (_ended("Failed", "rollout", "worker", "run:a"), set()),
    ],
)
def test_each_automation_reacts_to_its_events_alone(
    registered: Any, event: ReceivedEvent, expected: set[str]
) -> None:
    server = Server()
    registered(server, "slack-webhook/on-call")
    assert _reactions(server, event) == expected


@pytest.mark.parametrize(
    ("pool", "status", "expected"),
    [
        ("control", "not-ready", {NOTIFY_IDLE_POOL}),
        ("rollout", "not-ready", {NOTIFY_IDLE_POOL}),
        ("control", "ready", set()),
        ("theirs", "not-ready", set()),
    ],
)
def test_only_our_work_pools_without_a_worker_notify(
    registered: Any, pool: str, status: str, expected: set[str]
) -> None:
    server = Server()
    registered(server, "slack-webhook/on-call")
    resource = {"prefect.resource.id": "prefect.work-pool.1", "prefect.resource.name": pool}
    assert _reactions(server, _event(f"prefect.work-pool.{status}", resource)) == expected


def _rendered(automation: Any, **flow_run: Any) -> dict[str, Any]:
    """The parameters of the flow run that the automation starts."""
    (action,) = automation.actions
    parameters = ServerRunDeployment.model_validate(action.model_dump(mode="json")).parameters
    assert parameters is not None
    ServerRunDeployment._upgrade_v1_templates(parameters)
    context = {"flow_run": SimpleNamespace(**flow_run)}
    return hydrate(
        parameters,
        HydrationContext(raise_on_error=True, render_jinja=True, jinja_context=context),
    )  # type: ignore[return-value]  # a dictionary goes in


def test_a_dead_supervisor_is_started_with_its_parameters_and_run_id(registered: Any) -> None:
    registered(server := Server())
    given = {
        "recipe": 'name: "<a & b>"\nsteps: 3\n',
        "steps": 40,
        "overrides": {"policies.solver.train.lr": 1e-4, "x": [True, None]},
    }
    rendered = _rendered(
        server.created[RESTART_RUN], parameters=given, tags=["astraflow", "run:tiny-1"]
    )
    absent = {"seed": None, "max_staleness": None, "samples_per_prompt": None}
    assert rendered == {**given, **absent, "run_id": "tiny-1"}
    deployments.flow_of(DEPLOYMENTS[0]).validate_parameters(rendered)
    assert server.created[RESTART_RUN].actions[0].source == "inferred"


@pytest.mark.parametrize(
    ("given", "night"),
    [({}, "20260102-0203"), ({"night_id": None}, "20260102-0203"), ({"night_id": "x"}, "x")],
)
def test_a_dead_night_is_started_for_the_same_night(
    registered: Any, given: dict[str, Any], night: str
) -> None:
    registered(server := Server())
    due = datetime(2026, 1, 2, 2, 3, 4, tzinfo=UTC)
    rendered = _rendered(
        server.created[RESTART_NIGHT],
        parameters={"recipe": "other", "catch_up": True, "late_limit_h": 3.5, **given},
        expected_start_time=due,
    )
    assert rendered.pop("night_id") == night
    assert night == "x" or night == due_time.night_id(due)
    assert (rendered["recipe"], rendered["catch_up"], rendered["late_limit_h"]) == (
        "other",
        True,
        3.5,
    )
    assert (rendered["begin_with"], rendered["name"]) == ("champion", None)
