"""Names of the flow runs of members: `trainer-solver #2 · tiny-1` is the second attempt of one."""

from prefect.runtime import flow_run


def attempt_name(member: str, attempt: int, run_id: str) -> str:
    """Return the name of a member's attempt; the first one, number 0 in its heartbeat, is #1."""
    return f"{member} #{attempt + 1} · {run_id}"


def of_this_flow_run() -> str:
    """Return the name of the current flow run, from its parameters."""
    parameters = flow_run.get_parameters()
    member = parameters.get("member") or flow_run.get_flow_name() or ""
    return attempt_name(member, int(parameters["attempt"]), parameters["run_id"])
