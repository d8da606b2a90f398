"""Prefect artifacts of a run that goes on, which are updated in place.

    store ──status──▶ links (MLflow, store, report), one progress bar a policy, the members' table

Prefect shows them in the tab "Artifacts" of the supervisor's flow run. They are for people: one
that fails is logged once, and changes nothing in the run or in the other artifacts.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from uuid import UUID

import httpx
from prefect.artifacts import (
    acreate_link_artifact,
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate

from storage import layout
from storage.store.object_store import ObjectStore
from tasks.artifact_keys import artifact_key
from tasks.monitoring.status import MemberStatus, PolicyStatus, status_of
from tasks.terminal_text import one_line

log = logging.getLogger(__name__)

NOTE_MAX = 200
"""Characters of a member's note that its row shows."""


class LiveArtifacts:
    """The artifacts of one run, in the flow run that supervises it now.

    Args:
        page: the address of the run's page in MLflow; None as long as there is none.
    """

    def __init__(self, run: ObjectStore, page: Callable[[], str | None]) -> None:
        self._run, self._page = run, page
        self._links: set[str] = set()
        self._bars: dict[str, UUID] = {}
        """Policy → its progress artifact."""
        self._table: UUID | None = None
        self._shown: dict[str, tuple[float, str]] = {}
        """Policy → what its progress artifact shows."""
        self._rows: list[dict[str, Any]] = []
        """What the members' table shows."""
        self._failing: set[str] = set()
        """What could not be shown in the last update; it was logged."""

    async def update(self) -> None:
        """Create what is missing, and update what has changed.

        While Prefect's server does not answer, the first failure ends the update.
        """
        try:
            await self._update()
        except httpx.TransportError:
            self._note_failure("server")
        else:
            self._failing.discard("server")

    async def _update(self) -> None:
        report = f"{self._run.url}/{layout.REPORT}"
        await self._attempt(
            "store", lambda: self._link("store", self._run.address, "Objects of the run")
        )
        await self._attempt(
            "report", lambda: self._link("report", report, "Report, written when the run ends")
        )
        await self._attempt("mlflow", self._mlflow)
        await self._attempt("status", self._status)

    async def _mlflow(self) -> None:
        if (page := self._page()) is not None:
            await self._link("mlflow", page, "MLflow: metrics, models, report")

    async def _status(self) -> None:
        seen = await asyncio.to_thread(status_of, self._run)
        for policy, found in seen.policies.items():
            await self._attempt(f"progress of {policy}", partial(self._progress, policy, found))
        rows = [_row(member) for member in seen.members]
        await self._attempt("members", lambda: self._members(rows))

    async def _attempt(self, what: str, show: Callable[[], Awaitable[None]]) -> None:
        """Show one artifact; a failure does not affect the others."""
        try:
            await show()
        except httpx.TransportError:
            raise
        except Exception:  # Prefect's client and the store may raise anything
            self._note_failure(what)
        else:
            self._failing.discard(what)

    def _note_failure(self, what: str) -> None:
        """Log the exception, unless it failed in the last update, too."""
        if what not in self._failing:
            log.exception(
                "Prefect's artifacts are not up to date (%s); the run is not affected", what
            )
        self._failing.add(what)

    async def _link(self, key: str, address: str, description: str) -> None:
        if key not in self._links:
            await acreate_link_artifact(address, key=key, description=description)
            self._links.add(key)

    async def _progress(self, policy: str, found: PolicyStatus) -> None:
        key = artifact_key("progress", policy)
        percent = 100.0 * min(found.step, found.steps) / found.steps
        text = _words(policy, found)
        if self._shown.get(policy) == (percent, text):
            return
        if policy in self._bars:
            await aupdate_progress_artifact(self._bars[policy], percent, description=text)
        else:
            self._bars[policy] = await acreate_progress_artifact(percent, key, description=text)
        self._shown[policy] = percent, text

    async def _members(self, rows: list[dict[str, Any]]) -> None:
        if rows == self._rows:
            return
        if self._table is None:
            self._table = await acreate_table_artifact(rows, "members", "Members of the run")
        else:
            async with get_client() as client:
                await client.update_artifact(self._table, ArtifactUpdate(data=json.dumps(rows)))
        self._rows = rows


def _words(policy: str, found: PolicyStatus) -> str:
    """Example: `solver: step 3 of 80, mean reward 0.41`."""
    reward = "" if found.reward_mean is None else f", mean reward {found.reward_mean:.2f}"
    return f"{policy}: step {found.step} of {found.steps}{reward}"


def _row(member: MemberStatus) -> dict[str, Any]:
    return {
        "member": member.id,
        "attempt": f"#{member.attempt + 1}",
        "region": one_line(member.region),
        "state": one_line(member.state),
        "waits for": one_line(member.wait_reason),
        "note": one_line(member.note)[:NOTE_MAX],
    }
