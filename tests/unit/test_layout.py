import pytest

from storage import layout
from storage.errors import ConfigError

BAD = ["", "a/b", "..", "../../runs", "a.b", "-x", "a b", "solver\n"]


@pytest.mark.parametrize("name", BAD)
def test_a_policy_whose_name_cannot_be_part_of_a_key_is_refused_everywhere(name: str) -> None:
    for key in (layout.batch, layout.weights, layout.checkpoint):
        with pytest.raises(ConfigError, match="cannot name a policy or a member; use letters, digits, '_' and '-'"):
            key(name, 1)
    with pytest.raises(ConfigError, match="cannot name a policy or a member"):
        layout.evaluation({"solver": 1, name: 1})


@pytest.mark.parametrize("name", BAD)
def test_a_member_whose_name_cannot_be_part_of_a_key_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a policy or a member"):
        layout.heartbeat("rollout", name)


def test_plain_names_make_keys() -> None:
    assert layout.batch("solver_2", 3) == "batches/solver_2/00000003.arrow"
    assert layout.heartbeat("rollout", "rollout-us-east-0") == "heartbeats/rollout/rollout-us-east-0.json"
