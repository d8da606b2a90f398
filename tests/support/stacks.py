"""The stack of a home and its processes, where a test needs them to exist."""

from deployments.paths import Home
from deployments.stack import state
from deployments.stack.processes import Process
from deployments.stack.state import Stack


def recorded_stack(home: Home) -> Stack:
    """Return the stack that the home records; LookupError without one."""
    stack = state.load(home)
    if stack is None:
        raise LookupError(f"{home.record} records no stack")
    return stack


def process_of(stack: Stack, name: str) -> Process:
    """Return the process of this name; LookupError when it does not run."""
    process = stack.process(name)
    if process is None:
        raise LookupError(f"{name} does not run")
    return process
