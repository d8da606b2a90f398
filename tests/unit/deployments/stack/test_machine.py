import os
from dataclasses import replace

import pytest

from deployments.stack.machine import Machine, start_of, this_machine

HERE = Machine("laptop", "boot-1", "pid:[1]")

RECORDS = {
    "the same": (HERE, False),
    "an earlier release": (Machine(), False),
    "a renamed host": (replace(HERE, host="renamed"), False),
    "before a reboot": (replace(HERE, boot_id="boot-0", pid_namespace="pid:[2]"), False),
    "another container of the host": (
        replace(HERE, host="container", pid_namespace="pid:[2]"),
        True,
    ),
    "the same container before a restart": (replace(HERE, pid_namespace="pid:[2]"), False),
    "another machine": (Machine("server", "boot-2", "pid:[1]"), True),
}


@pytest.mark.parametrize(("recorded", "is_foreign"), RECORDS.values(), ids=RECORDS.keys())
def test_a_record_is_foreign_where_its_processes_cannot_be_seen(
    recorded: Machine, is_foreign: bool
) -> None:
    assert recorded.is_foreign_to(HERE) is is_foreign


def test_a_machine_without_a_boot_id_may_have_another_name_in_another_network() -> None:
    assert not Machine("mac.local").is_foreign_to(Machine("dhcp-1.example"))
    assert Machine("mac.local").is_foreign_to(HERE)


def test_the_start_of_a_process_is_its_boot_and_its_ticks() -> None:
    boot_id, ticks = start_of(os.getpid()).split()
    assert boot_id == this_machine().boot_id
    with open("/proc/self/stat") as file:
        assert ticks == file.read().rpartition(")")[2].split()[19]
    assert start_of(2**40) == ""
