"""The CPUs of this process."""

import os


def num_cpus() -> int:
    """Return the number of CPUs that this process may use: a container, a batch system or
    `taskset` may allow fewer than the machine has.
    """
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
