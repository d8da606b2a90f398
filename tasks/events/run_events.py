"""Events of a run: their names, ids and payloads, and the ones that follow from stored objects.

    supervisor's decisions ──┐
    versions, evaluations ───┴─▶ queue ──▶ Prefect        resource: astraflow.run.RUN

The id of an event follows from its content: the event of a version has the same id whoever sends
it and however often, and Prefect stores it once.
"""

import contextlib
import logging
import time
import uuid
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from storage.errors import UNREADABLE, NotFoundError
from storage.run import evaluations
from storage.store.object_store import ObjectStore
from storage.weights import manifests

log = logging.getLogger(__name__)

PREFIX = "astraflow."
RUN_RESOURCE = "astraflow.run.{run_id}"
QUEUE_MAX = 1000
"""Events that wait for a Prefect server which does not answer; then the oldest is dropped."""
OVERLAP = 20
"""Versions of a policy, and evaluations, that a new supervisor announces again: the one before it
may have died before it did.
"""


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """One event. Example: `RunEvent(name="member.lost", key="member.lost/trainer-solver/2",
    occurred_s=1763690000.2, payload={"member": "trainer-solver", "attempt": 2})`.
    """

    name: str
    """Without PREFIX."""
    key: str
    """What makes it another event than others of its run."""
    occurred_s: float
    payload: Mapping[str, Any]

    def id(self, run: ObjectStore) -> uuid.UUID:
        """Return its id: equal for equal keys in one run."""
        return uuid.uuid5(uuid.NAMESPACE_URL, f"{run.url}#{self.key}")


class LaunchedAttempt(Protocol):
    """The flow run of an attempt of a member."""

    @property
    def attempt(self) -> int: ...
    @property
    def flow_run_id(self) -> str: ...


class EventQueue:
    """The events of one run that have not been sent yet. Used by several threads."""

    def __init__(self, run: ObjectStore, policies: Iterable[str]) -> None:
        """Reads nothing yet."""
        self._run = run
        self._next: dict[str, int | None] = dict.fromkeys(policies)
        self._evaluated: str | None = None
        self._waiting: deque[RunEvent] = deque()
        self._dropped = 0

    def add(self, name: str, key: str, occurred_s: float | None = None, **payload: Any) -> None:
        """Queue an event; by default it occurs now."""
        occurred_s = time.time() if occurred_s is None else occurred_s
        self._waiting.append(
            RunEvent(name=name, key=f"{name}/{key}", occurred_s=occurred_s, payload=payload)
        )
        while len(self._waiting) > QUEUE_MAX:
            self._waiting.popleft()
            self._dropped += 1
            if self._dropped == 1:
                log.warning("Prefect does not take events: the oldest of %d are lost", QUEUE_MAX)

    def add_attempt(
        self, name: str, member: str, launched: LaunchedAttempt, **payload: str
    ) -> None:
        """Queue an event of one attempt of a member."""
        attempt, flow_run = launched.attempt, launched.flow_run_id
        details: dict[str, Any] = {
            "member": member,
            "attempt": attempt,
            "flow_run": flow_run,
            **payload,
        }
        self.add(name, f"{member}/{attempt}", **details)

    def look(self) -> None:
        """Queue the events of versions and evaluations that were stored since the last look.

        Raises what reading the store raises; the next look begins where this one ended.
        """
        for policy in self._next:
            self._look_for_versions(policy)
        self._look_for_evaluations()

    def waiting(self) -> list[RunEvent]:
        """Return the events that have not been sent, oldest first."""
        return list(self._waiting)

    def sent(self, events: Iterable[RunEvent]) -> None:
        """Forget these events."""
        ids = {id(event) for event in events}
        self._waiting = deque(each for each in self._waiting if id(each) not in ids)

    def _look_for_versions(self, policy: str) -> None:
        """Queue the trained versions; version 0 is the base model."""
        version = self._next[policy]
        if version is None:
            newest = manifests.latest(self._run, policy)
            if newest is None:
                return
            version = max(1, newest - OVERLAP + 1)
        while manifests.exists(self._run, policy, version):
            with contextlib.suppress(NotFoundError, *UNREADABLE):  # `verify` reports it
                manifest = manifests.read_manifest(self._run, policy, version)
                self.add(
                    "version.published",
                    f"{policy}/{version}",
                    manifest.created_s or None,
                    policy=policy,
                    version=version,
                    digest=manifest.digest,
                )
            version += 1
            self._next[policy] = version
        self._next[policy] = version

    def _look_for_evaluations(self) -> None:
        if self._evaluated is None:
            keys = evaluations.keys(self._run)[-OVERLAP:]
        else:
            keys = evaluations.keys(self._run, start_after=self._evaluated)
        for key in keys:
            for evaluation in evaluations.read_all(self._run, [key]).readable:
                self.add(
                    "evaluation.done",
                    key,
                    evaluation.created_s or None,
                    versions=dict(evaluation.versions),
                    dataset=evaluation.dataset,
                    accuracy={
                        score.workflow: float(score.accuracy)
                        for score in evaluations.scores(evaluation)
                    },
                )
                self._evaluated = key  # not of a stranger's, after which others may not be listed


def body(event: RunEvent, run: ObjectStore, run_id: str, flow_run_id: str) -> dict[str, Any]:
    """Return an event in the form of Prefect's API."""
    related = (
        [
            {
                "prefect.resource.id": f"prefect.flow-run.{flow_run_id}",
                "prefect.resource.role": "flow-run",
            }
        ]
        if flow_run_id
        else []
    )
    return {
        "id": str(event.id(run)),
        "occurred": datetime.fromtimestamp(event.occurred_s, UTC).isoformat(),
        "event": f"{PREFIX}{event.name}",
        "resource": {
            "prefect.resource.id": RUN_RESOURCE.format(run_id=run_id),
            "prefect.resource.name": run_id,
        },
        "related": related,
        "payload": {"run": run_id, **event.payload},
    }
