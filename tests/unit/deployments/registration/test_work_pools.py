import copy

import pytest
from prefect.utilities.processutils import command_from_string

from deployments.registration import work_pools
from storage.errors import ConfigError


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


KUBERNETES = {
    "job_configuration": {"command": "{{ command }}", "env": "{{ env }}"},
    "variables": {
        "type": "object",
        "properties": {
            "command": {"type": "string", "default": "old"},
            "env": {"default": {"THEIRS": "1", "ASTRAFLOW_STORE": "old", "DO_NOT_TRACK": "0"}},
            "image": {"type": "string", "default": "registry.example/theirs:2"},
            "namespace": {"type": "string", "default": "training"},
        },
    },
}


def test_own_part_of_a_template_changes_the_command_and_own_variables_alone() -> None:
    before = copy.deepcopy(KUBERNETES)
    changed = work_pools.with_own_part(
        KUBERNETES, "kubernetes", "python -m x", {"ASTRAFLOW_STORE": "s3://b"}, ["DO_NOT_TRACK"]
    )
    assert before == KUBERNETES
    properties = changed["variables"]["properties"]
    assert properties["command"] == {"type": "string", "default": "python -m x"}
    assert properties["env"]["default"] == {"THEIRS": "1", "ASTRAFLOW_STORE": "s3://b"}
    for name in ("image", "namespace"):
        assert properties[name] == before["variables"]["properties"][name]
    assert "stream_output" not in properties
    assert changed["job_configuration"] == before["job_configuration"]


def test_processes_do_not_stream_their_output_through_the_worker() -> None:
    changed = work_pools.with_own_part({}, "process", "python", {}, ())
    assert changed["variables"]["properties"]["stream_output"]["default"] is False


def test_job_variables_of_a_file_become_defaults_and_unknown_ones_are_named() -> None:
    changed = work_pools.with_defaults("rollout", "kubernetes", KUBERNETES, {"image": "mine"})
    assert changed["variables"]["properties"]["image"] == {"type": "string", "default": "mine"}
    with pytest.raises(
        ConfigError,
        match="work pool rollout: jobs of type kubernetes have no variable imag; they have command",
    ):
        work_pools.with_defaults("rollout", "kubernetes", KUBERNETES, {"imag": "mine"})
