"""The final state in Prefect of the flow `astraflow`, for each end of a run."""

import asyncio
from typing import Any

import pytest
from prefect.client.schemas.objects import State

from flows import run_supervisor
from tasks.supervision.lifecycle import Outcome


@pytest.mark.parametrize(
    ("state", "name"), [("exhausted", "Completed"), ("cancelled", "Cancelled")]
)
def test_an_early_end_is_a_state_of_prefect_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, state: str, name: str
) -> None:
    async def ended(*arguments: Any) -> Outcome:
        return Outcome("tiny-1", state, "budget: hours 8.0 of 8")

    monkeypatch.setattr(run_supervisor, "run_training", ended)
    final = asyncio.run(run_supervisor.astraflow.fn("tiny-1"))
    assert isinstance(final, State)
    assert (final.name, final.message) == (name, "budget: hours 8.0 of 8")
