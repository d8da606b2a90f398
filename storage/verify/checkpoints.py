"""Audit of one policy's checkpoints: the newest is undamaged, and none is incomplete.

newest ◀── damaged ──▶ the one before ◀── undamaged: a resume reads no older one
"""

from collections.abc import Callable

from storage import layout
from storage.errors import UNREADABLE, NotFoundError
from storage.run import checkpoints
from storage.store.object_store import ObjectStore
from storage.verify.violations import Findings, Invariant

Progress = Callable[[str, float], None]


def audit_checkpoints(
    run: ObjectStore, policy: str, findings: Findings, progress: Progress
) -> None:
    """Read the files that a trainer would resume from, and check that those of older ones exist.

    As a trainer does, it goes back from the newest checkpoint to the first undamaged one.
    """
    folder = f"{layout.CHECKPOINTS}/{policy}"
    steps = findings.listed(folder, lambda: checkpoints.steps(run, policy))
    check = checkpoints.check_undamaged
    for index, step in enumerate(reversed(steps)):
        progress(f"checkpoints of {policy}", (index + 1) / len(steps))
        try:
            check(run, policy, step)
            check = checkpoints.check_complete
        except NotFoundError:
            pass  # the trainer has deleted it meanwhile
        except UNREADABLE as error:
            key = layout.manifest(layout.checkpoint(policy, step))
            findings.add(Invariant.LINEAGE, key, str(error))
