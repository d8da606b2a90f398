"""The identity of this machine or container, and of a process on it, for the stack's record.

The wall clock is not part of either on Linux: `create_time` of psutil is derived from the boot
time, which shifts when the clock is set, and after a suspend.
"""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = "/proc/self/ns/pid"
_START_TICKS = 19
"""Index of the start time (field 22 of proc(5)) in the fields after the program's name."""


@dataclass(frozen=True)
class Machine:
    """Where the processes of a record run. Example: `Machine("laptop", "0d6f…", "pid:[4026531]")`.

    A record of an earlier release has none of the fields.
    """

    host: str = ""
    boot_id: str = ""
    """Changes with every boot of the kernel; empty on other systems than Linux."""
    pid_namespace: str = ""
    """Differs between containers, which see only their own processes."""

    def is_foreign_to(self, here: "Machine") -> bool:
        """Return whether this is another machine or container than `here`, whose processes may run.

        A machine that was rebooted, or a container that was restarted, keeps its name: its earlier
        processes have ended. A machine that was renamed keeps its boot id and its namespace.
        """
        if not self.host:
            return False  # the record of an earlier release
        if not self.boot_id and not here.boot_id:
            return False  # macOS: the name is that of the network, and pids are compared by time
        if (self.boot_id, self.pid_namespace) == (here.boot_id, here.pid_namespace):
            return False
        return self.host != here.host


def this_machine() -> Machine:
    """Return the identity of this machine or container."""
    try:
        pid_namespace = os.readlink(_PID_NAMESPACE)
    except OSError:
        pid_namespace = ""
    return Machine(socket.gethostname(), _boot_id(), pid_namespace)


def start_of(pid: int) -> str:
    """Return the boot id and the start of a process in the kernel's ticks since the boot.

    It is empty when the process has ended, and on other systems than Linux.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return f"{_boot_id()} {int(fields[_START_TICKS])}"
    except (OSError, ValueError, IndexError):
        return ""


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
