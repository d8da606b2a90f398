import pytest
from prefect.utilities.processutils import command_from_string

from deployments.registration import work_pools


@pytest.mark.parametrize(
    "python",
    [
        "python",
        "/home/me/My Projects/astraflow/.venv/bin/python",
        "/home/o'neil/astraflow/.venv/bin/python",
        '/home/me/a "b" $c {d}\\e/python',
    ],
)
def test_a_worker_starts_the_interpreter_of_any_path(python: str) -> None:
    assert command_from_string(work_pools.command(python)) == [
        python,
        "-m",
        "deployments.registration.flow_entrypoint",
    ]
