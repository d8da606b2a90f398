"""The final state in Prefect of the flow `astraflow`, for each end of a run."""

import asyncio
from typing import Any

import pytest
from prefect.client.schemas.objects import State
from prefect.states import Cancelled

from flows import run_supervisor
from tasks.supervision import suspension
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


def test_a_suspended_run_suspends_its_flow_run_and_a_completed_one_settles_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends: list[tuple[str | None, ...]] = []

    async def suspend(run_id: str, reason: str) -> State[None]:
        ends.append((run_id, reason))
        return Cancelled()

    async def settle(final: State[None]) -> State[None]:
        ends.append((final.name, final.message))
        return final

    monkeypatch.setattr(suspension, "suspend", suspend)
    monkeypatch.setattr(suspension, "settle", settle)
    for state in ("suspended", "completed"):

        async def ended(*arguments: Any, state: str = state) -> Outcome:
            return Outcome("tiny-1", state, "why")

        monkeypatch.setattr(run_supervisor, "run_training", ended)
        final = asyncio.run(run_supervisor.astraflow.fn("tiny-1"))
        assert getattr(final, "name", final) == {"suspended": "Cancelled"}.get(state, "tiny-1")
    assert ends == [("tiny-1", "why"), ("Completed", "why")]
