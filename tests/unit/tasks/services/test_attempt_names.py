"""The names of the flow runs of members."""

from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext

from deployments.registration.deployments import DEPLOYMENTS, flow_of
from flows.run_trainer import train
from tasks.services import attempt_names

FLOW_RUN = FlowRun(flow_id=uuid4())


def test_the_first_attempt_has_number_one() -> None:
    assert attempt_names.attempt_name("dataflow", 0, "tiny-1") == "dataflow #1 · tiny-1"
    assert attempt_names.attempt_name("dataflow", 1, "tiny-1") == "dataflow #2 · tiny-1"


@pytest.mark.parametrize(
    ("member", "name"),
    [("trainer-solver", "trainer-solver #3 · tiny-1"), ("", "train #3 · tiny-1")],
)
def test_a_flow_run_is_named_by_its_parameters(member: str, name: str) -> None:
    parameters: dict[str, Any] = {
        "run_id": "tiny-1",
        "policy": "solver",
        "member": member,
        "attempt": 2,
    }
    with FlowRunContext.model_construct(flow=train, flow_run=FLOW_RUN, parameters=parameters):
        assert train.flow_run_name is attempt_names.of_this_flow_run
        assert attempt_names.of_this_flow_run() == name


@pytest.mark.parametrize(
    "flow",
    [
        flow
        for flow in map(flow_of, DEPLOYMENTS)
        if {"member", "attempt"} <= flow.parameters.properties.keys()
    ],
    ids=lambda flow: str(flow.name),
)
def test_the_flow_runs_of_every_member_have_its_attempt_in_their_name(flow: Any) -> None:
    assert flow.flow_run_name is attempt_names.of_this_flow_run
