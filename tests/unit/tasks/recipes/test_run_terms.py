"""The terms that a run is verified against: read from its configuration; a missing setting is
refused with its name.
"""

import pytest

from storage import layout
from storage.errors import ConfigError
from storage.records.types import Json
from storage.run.runs import create_run
from storage.store.object_store import ObjectStore
from storage.verify.verify import RunTerms
from tasks.recipes.run_terms import run_terms

GOOD: Json = {"steps": 2, "policies": {"solver": {"batch_size": 4}}, "data": {"max_staleness": 8}}


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"steps": "2"}, "number 'steps'"),
        ({"steps": None}, "number 'steps'"),
        ({"data": []}, "section 'data'"),
        ({"data": {"max_staleness": True}}, r"number 'data\.max_staleness'"),
        ({"policies": {"solver": None}}, r"section 'policies\.solver'"),
        ({"policies": ["solver"]}, "section 'policies'"),
        ({"policies": {"solver": {"batch_size": [4]}}}, r"number 'policies\.solver\.batch_size'"),
    ],
)
def test_a_setting_of_another_type_is_named(
    change: Json, key: str, memory_store: ObjectStore
) -> None:
    run = create_run(memory_store, "r", {**GOOD, **change})
    with pytest.raises(ConfigError, match=f"cannot be verified, because the config .* no .*{key}"):
        run_terms(run)


def test_the_terms_are_those_of_the_configuration(memory_store: ObjectStore) -> None:
    policies = {"solver": {"batch_size": 4}, "verifier": {"batch_size": 6, "train": {}}}
    config = {"steps": 80, "policies": policies, "data": {"max_staleness": 0}, "new": 1}
    run = create_run(memory_store, "r", config)
    assert run_terms(run) == RunTerms(
        steps=80, max_staleness=0, batch_sizes={"solver": 4, "verifier": 6}
    )


def test_a_run_with_a_missing_or_damaged_record_has_no_terms(memory_store: ObjectStore) -> None:
    run = create_run(memory_store, "r", GOOD)
    run.put(layout.RUN, b"{}")
    with pytest.raises(
        ConfigError, match=r"its run\.json cannot be read: .*put it back from a copy"
    ):
        run_terms(run)
    run.delete(layout.RUN)
    with pytest.raises(
        ConfigError, match=r"its run\.json cannot be read: .*put it back from a copy"
    ):
        run_terms(run)


def test_more_policies_than_a_run_has_are_refused(memory_store: ObjectStore) -> None:
    """`verify` lists two hundred missing objects of each: 4,000 policies took it 400 MB."""
    policies = {f"p{number}": {"batch_size": 1} for number in range(101)}
    run = create_run(memory_store, "r", {**GOOD, "policies": policies})
    with pytest.raises(ConfigError, match="has 101 policies; a run has at most 100"):
        run_terms(run)
