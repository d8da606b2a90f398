"""The end of a run's members, after its `stop.json`.

stop.json ─▶ members leave by themselves ─▶ those that did not are cancelled, ended by Prefect
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.records.control import ClosingStep
from tasks.monitoring import closing_steps
from tasks.supervision.flow_processes import FlowProcesses
from tasks.supervision.launcher import Launched, Launcher
from tasks.supervision.members import SLOW_FACTOR, FlowRunPhase

log = logging.getLogger(__name__)

_KILL_TIMEOUT_S = 35.0
"""Prefect kills a cancelled flow run that has not left after 30 s."""


@dataclass(frozen=True, kw_only=True)
class Shutdown:
    """Waits for the members of one run to leave, and cancels those that do not."""

    launcher: Launcher
    processes: FlowProcesses
    heartbeat: HeartbeatWriter
    """The supervisor's; it names the members that have not left."""
    clock: Callable[[], float]
    poll_interval_s: float
    leave_within_s: float
    """Time for the members to leave by themselves."""
    patient: bool
    """A member whose process works gets SLOW_FACTOR times as long."""

    async def run(self) -> None:
        """End all members, also those whose process is still starting.

        A flow run without a worker is cancelled at once.
        """
        closing_steps.record(self.heartbeat, ClosingStep.LEAVING)
        newest = await self.launcher.newest() or {}
        for launched in newest.values():
            if launched.phase is FlowRunPhase.SCHEDULED:
                await self.launcher.cancel(launched)
        if not await self.all_left(self.leave_within_s, patient=self.patient):
            for member, launched in (await self.launcher.newest() or {}).items():
                if launched.phase is not FlowRunPhase.ENDED:
                    log.warning("cancelling %s, which did not leave by itself", member)
                    await self.launcher.cancel(launched)
            await self.all_left(_KILL_TIMEOUT_S)
        await self.launcher.bury(list(newest.values()))

    async def all_left(self, limit_s: float, patient: bool = False) -> bool:
        """Wait until every member's flow run has ended; returns whether they have.

        The wait ends after `limit_s`, and if `patient` later for a member whose process works.
        """
        start_s = self.clock()
        while True:
            newest = await self.launcher.newest()
            remaining = {
                member: launched
                for member, launched in (newest or {}).items()
                if launched.phase is not FlowRunPhase.ENDED
            }
            if newest is not None and not remaining:
                return True
            closing_steps.record(self.heartbeat, ClosingStep.LEAVING, ", ".join(sorted(remaining)))
            waited_s = self.clock() - start_s
            if waited_s >= limit_s and not (
                patient and waited_s < SLOW_FACTOR * limit_s and await self._any_works(remaining)
            ):
                return False
            await asyncio.sleep(self.poll_interval_s / 4)

    async def _any_works(self, remaining: Mapping[str, Launched]) -> bool:
        idle_s = [
            await asyncio.to_thread(self.processes.idle_s, launched.flow_run_id)
            for launched in remaining.values()
        ]
        return any(each is not None and each < self.leave_within_s / 2 for each in idle_s)
