"""How often a night was started again in a row without anything new in the store.

Nothing else counts: an automation starts a night again whenever its process has died. What the
night has stored, and not the time, says whether another start may help.
"""

import re
import time

from storage import layout
from storage.errors import ConfigError, ConflictError, CorruptError
from storage.plain_names import new_write_id
from storage.promotion import nights
from storage.records.nights import NightPlan, NightStart
from storage.store.object_store import ObjectStore

RESTARTS_MAX = 5
"""Further starts of a night in a row before which nothing new was stored; the next one fails it."""
_RESULT = re.compile(
    r"(run|stop)\.json|(shards|batches|evals)/.+\.arrow|(weights|checkpoints)/.+/manifest\.json"
)
"""Objects of a run that are created once, when some of its work is done."""


def begin_again(store: ObjectStore, plan: NightPlan) -> str:
    """Store that the night is started again; return why it may not be, empty where it may.

    Raises:
        ConfigError: another process has started it again at the same time.
        CorruptError: the record of an earlier start is invalid.
    """
    try:
        starts = nights.read_starts(store, plan.name, plan.night, RESTARTS_MAX)
    except CorruptError as error:
        raise CorruptError(
            f"how often night {plan.night} of {plan.name} was started is not known: {error}; "
            "delete that object to count from there"
        ) from error
    results = _num_results(store, plan)
    if len(starts) == RESTARTS_MAX and all(each.results == results for each in starts):
        return (
            f"its process died again and again: it was started again {RESTARTS_MAX} times in a "
            "row without storing anything new; the logs of its flow runs say why. Correct that: "
            "its data is used by the next night"
        )
    start = NightStart(
        name=plan.name,
        night=plan.night,
        number=starts[-1].number + 1 if starts else 1,
        at_s=time.time(),
        results=results,
        write_id=new_write_id(),
    )
    try:
        nights.create_start(store, start)
    except ConflictError:
        raise ConfigError(
            f"night {plan.night} of {plan.name} was started again by another process"
        ) from None
    return ""


def _num_results(store: ObjectStore, plan: NightPlan) -> int:
    """Count what is stored of the night: by its run, and in its contest."""
    run = store.sub(layout.run_prefix(plan.run_id))
    contests = layout.outcomes(plan.name, "").rpartition("/")[0]
    return sum(bool(_RESULT.fullmatch(key)) for key in run.list()) + len(store.list(contests))
