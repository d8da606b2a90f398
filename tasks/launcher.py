"""The few words the supervisor speaks to Prefect: launch a member, read its newest flow run, cancel. Nothing is decided here.

A member's flow runs carry the tags `run:{run id}` and `member:{member id}`; a restarted supervisor finds them by these, so
nothing about a run is lost with the supervisor's process. Prefect being away is normal: it answers `Phase.UNKNOWN`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.deployments import arun_deployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.states import Cancelling, Crashed

from storage.errors import ConfigError
from tasks.members import Member, Phase

log = logging.getLogger(__name__)

_AWAY = (httpx.TransportError, PrefectHTTPStatusError, TimeoutError)
_PAGE = 200
"""Most rows the API returns at once."""


@dataclass(frozen=True)
class Launched:
    """A member's newest flow run."""

    attempt: int
    phase: Phase
    flow_run_id: str
    state_name: str


class PrefectLauncher:
    """Speaks for one run."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._tags = ["astraflow", f"run:{run_id}"]

    async def launch(self, member: Member, attempt: int) -> Launched | None:
        """Ask Prefect to start an attempt; None when Prefect is away. Asking again is harmless: same key, same flow run.

        Raises:
            ConfigError: the member's deployment does not exist on the server.
        """
        try:
            flow_run = await arun_deployment(
                member.deployment,
                parameters={"run_id": self._run_id, "member": member.id, "attempt": attempt, **member.parameters},
                timeout=0,
                tags=[*self._tags, f"member:{member.id}"],
                idempotency_key=f"{self._run_id}:{member.id}:{attempt}",
            )
        except ObjectNotFound as error:
            raise ConfigError(
                f"the Prefect server has no deployment {member.deployment!r}; register the deployments: astraflow deploy"
            ) from error
        except _AWAY as error:
            log.warning("could not launch %s: %s", member.id, error)
            return None
        return _launched(flow_run)

    async def newest(self) -> Mapping[str, Launched] | None:
        """member id → its newest flow run, for every member ever launched; None when Prefect is away."""
        newest: dict[str, Launched] = {}
        try:
            async with get_client() as client:
                flow_runs = await _read_all(client, FlowRunFilter(tags=FlowRunFilterTags(all_=self._tags)))
        except _AWAY as error:
            log.warning("Prefect does not answer: %s", error)
            return None
        for flow_run in flow_runs:
            found = _launched(flow_run)
            for member in (tag.partition(":")[2] for tag in flow_run.tags if tag.startswith("member:")):
                if member not in newest or newest[member].attempt < found.attempt:
                    newest[member] = found
        return newest

    async def declare_crashed(self, launched: Launched, reason: str) -> None:
        """Prefect alone never notices a lost machine. The process, should it live, is fenced by created-once writes."""
        await _set_state(launched, Crashed(message=reason))

    async def cancel(self, launched: Launched) -> None:
        await _set_state(launched, Cancelling(message="the run has ended"))


async def _set_state(launched: Launched, state: object) -> None:
    try:
        async with get_client() as client:
            await client.set_flow_run_state(launched.flow_run_id, state, force=True)  # type: ignore[arg-type]  # ids may be str
    except (*_AWAY, ObjectNotFound) as error:
        log.warning("could not set the state of flow run %s: %s", launched.flow_run_id, error)


async def _read_all(client: PrefectClient, which: FlowRunFilter) -> Sequence[FlowRun]:
    rows: list[FlowRun] = []
    while True:
        page = await client.read_flow_runs(
            flow_run_filter=which, sort=FlowRunSort.START_TIME_DESC, limit=_PAGE, offset=len(rows)
        )
        rows += page
        if len(page) < _PAGE:
            return rows


def _launched(flow_run: FlowRun) -> Launched:
    state = flow_run.state
    if state is None or state.is_scheduled() or state.is_pending():
        phase = Phase.PENDING
    elif state.is_final():
        phase = Phase.ENDED
    else:
        phase = Phase.RUNNING
    return Launched(
        attempt=int(flow_run.parameters.get("attempt", 0)),
        phase=phase,
        flow_run_id=str(flow_run.id),
        state_name=state.name or "" if state else "",
    )
