"""Keys of Prefect's artifacts."""

import re

from tasks.artifact_keys import artifact_key


def test_different_names_have_different_keys_that_prefect_accepts() -> None:
    names = ("a-b", "a_b", "a.b", "A-B", "A_b", "a--b", "a")
    keys = [artifact_key("progress", name) for name in names]
    assert len(set(keys)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9-]+", key) for key in keys)


def test_a_name_that_prefect_accepts_is_in_its_key_as_it_is() -> None:
    assert artifact_key("progress", "solver-2") == "progress-solver-2"
    assert artifact_key("nights", "solver_b") == "nights-solver-b-0ec236dd"
