import pytest

from storage import layout
from storage.errors import ConfigError

BAD = ["", "a/b", "..", "../../runs", "a.b", "-x", "a b", "solver\n", "a" * 101]


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_policy_name_is_refused_in_every_key(name: str) -> None:
    for key in (layout.batch, layout.weights, layout.checkpoint):
        with pytest.raises(
            ConfigError,
            match="cannot name a policy, a member or a tag; use up to 100 letters, digits, '_' and '-'",
        ):
            key(name, 1)
    with pytest.raises(ConfigError, match="cannot name a policy, a member or a tag"):
        layout.evaluation({"solver": 1, name: 1})


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_member_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a policy, a member or a tag"):
        layout.heartbeat("rollout", name)


def test_only_a_canonical_key_is_parsed_as_a_number() -> None:
    keys = [layout.shard(number) for number in (12, 3, 123456789)]
    strays = [
        "shards/7.arrow",
        "shards/000000008.arrow",
        "shards/00000009.arrow.old",
        "shards/a/00000001.arrow",
        "",
    ]
    assert layout.numbers(keys + strays, layout.shard) == [3, 12, 123456789]


def test_a_number_of_thousands_of_digits_is_not_parsed() -> None:
    long = "9" * 5000
    keys = [f"orders/{long}.json", layout.order(7), layout.order(2**63 - 1)]
    assert layout.numbers(keys, layout.order) == [7, 2**63 - 1]
    folder = layout.weights("solver", 16)
    assert layout.merged_deltas(
        [f"weights/solver/{long}/since-{long}.json", f"{folder}/since-00000008.json"], "solver"
    ) == {16: [8]}
    assert (layout.version_of(folder, "solver"), layout.version_of(folder, "verifier")) == (
        16,
        None,
    )
    others = (
        f"weights/solver/{long}",
        "weights/solver/16",
        "weights/solver/٠٠٠٠٠٠١٦",
        "checkpoints/solver/00000016",
    )
    assert [layout.version_of(other, "solver") for other in others] == [None] * 4


def test_a_policy_name_is_never_parsed_as_a_number() -> None:
    keys = [layout.batch("p00000007", 2), layout.batch("p00000002", 7)]
    assert layout.numbers(keys, lambda step: layout.batch("p00000007", step)) == [2]


def test_keys_consist_of_plain_names() -> None:
    assert layout.batch("solver_2", 3) == "batches/solver_2/00000003.arrow"
    assert (
        layout.heartbeat("rollout", "rollout-us-east-0")
        == "heartbeats/rollout/rollout-us-east-0.json"
    )


def test_only_keys_in_the_weights_folder_of_a_policy_belong_to_its_weights() -> None:
    keys = (
        "weights/solver/00000001/manifest.json",
        "weights/solver",
        "batches/solver/00000001.arrow",
        "weights",
    )
    assert [layout.policy_of_weights(key) for key in keys] == ["solver", "", "", ""]


def test_weights_of_another_run_belong_to_their_policy_there() -> None:
    keys = (
        "runs/one/weights/solver/00000001/manifest.json",
        "runs/one/run.json",
        "runs/weights/a/b",
    )
    assert [layout.policy_of_weights(key) for key in keys] == ["solver", "", ""]


def test_the_store_of_a_run_is_above_its_folder() -> None:
    assert {prefix: layout.store_prefix(prefix) for prefix in ("runs/a.b/", "x/runs/a/", "")} == {
        "runs/a.b/": "",
        "x/runs/a/": "x/",
        "": "",
    }
    assert layout.store_prefix("xruns/a/") == "xruns/a/"
    assert layout.store_prefix("runs/a/runs/b/") == "runs/a/"
