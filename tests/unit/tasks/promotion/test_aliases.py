"""MLflow's aliases follow from the log: in a real MLflow, also after a crash between two moves."""

from typing import Any

import pytest

from storage import layout
from storage.promotion import promotions
from storage.records.promotions import DecisionKind, PromotionDecision
from storage.store.object_store import ObjectStore
from storage.weights import publisher
from tasks.promotion import aliases, decision_log
from tasks.promotion.aliases import Alias, Move, Projection, moves
from tasks.promotion.decision_log import Standing
from tasks.tracking.mlflow_client import Board, MlflowError
from tests.support.http_servers import refusing_port
from tests.support.runs import builders
from tests.support.runs.promotable import EVALUATED_RECIPE, create_run, team

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own imports and database layer warn

PROMOTED, REJECTED = DecisionKind.PROMOTED, DecisionKind.REJECTED
SOLVER, VERIFIER = "astraflow-solver", "astraflow-verifier"


@pytest.fixture
def run(memory_store: ObjectStore) -> ObjectStore:
    return create_run(memory_store, "tiny-1", versions=4)


def decided(
    store: ObjectStore,
    run: ObjectStore,
    kind: DecisionKind,
    version: int,
    name: str = "tiny",
    run_id: str = "tiny-1",
) -> Standing:
    drafted = PromotionDecision(
        name=name, number=0, kind=kind, at_s=0.0, by="", reason="", team=team(run, run_id, version)
    )
    decision_log.add(store, name, lambda standing, log: drafted)
    return decision_log.fold(promotions.read_log(store, name))


def client(uri: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def stored(uri: str) -> dict[str, dict[str, str]]:
    """Alias → model → number of the training version, as tags and MLflow's runs have it."""
    reader = client(uri)
    found: dict[str, dict[str, str]] = {}
    for model in reader.search_registered_models():
        for alias, number in reader.get_registered_model(model.name).aliases.items():
            version = reader.get_model_version(model.name, number)
            found.setdefault(alias, {})[model.name] = version.tags["astraflow.version"]
    return found


def both(version: int) -> dict[str, str]:
    return {SOLVER: str(version), VERIFIER: str(version)}


def test_a_team_that_is_not_registered_is_registered_and_gets_its_aliases(
    memory_store: ObjectStore, run: ObjectStore, uri: str
) -> None:
    standing = decided(memory_store, run, PROMOTED, 1)
    projected = aliases.project(memory_store, standing, uri)
    assert projected == Projection(
        (Move(Alias(SOLVER, "champion"), "1"), Move(Alias(VERIFIER, "champion"), "1")), ()
    )
    assert stored(uri) == {"champion": both(1)}
    assert {status for status, _ in _states(uri).values()} == {"FINISHED"}  # it was not tracked
    model = client(uri).get_registered_model(SOLVER)
    assert model.tags == {"astraflow.promotions": "tiny"}


def test_only_aliases_that_differ_are_written(
    memory_store: ObjectStore, run: ObjectStore, uri: str
) -> None:
    aliases.project(memory_store, decided(memory_store, run, PROMOTED, 1), uri)
    standing = decided(memory_store, run, REJECTED, 2)
    projected = aliases.project(memory_store, standing, uri)
    assert {(move.alias.name, move.alias.model) for move in projected.moves} == {
        ("challenger", SOLVER),
        ("challenger", VERIFIER),
    }
    assert aliases.project(memory_store, standing, uri).moves == ()
    standing = decided(memory_store, run, PROMOTED, 3)
    aliases.project(memory_store, standing, uri)
    assert stored(uri) == {"champion": both(3), "previous": both(1)}


@pytest.mark.parametrize("survived", [0, 1, 2, 3])
def test_a_crash_between_two_moves_is_repaired_by_the_next_projection(
    memory_store: ObjectStore,
    run: ObjectStore,
    uri: str,
    monkeypatch: pytest.MonkeyPatch,
    survived: int,
) -> None:
    """Of four moves, previous and champion of two policies, `survived` are done before the crash."""
    from mlflow.tracking import MlflowClient

    aliases.project(memory_store, decided(memory_store, run, PROMOTED, 1), uri)
    standing = decided(memory_store, run, PROMOTED, 2)
    set_alias, done = MlflowClient.set_registered_model_alias, []

    def dies(self: Any, name: str, alias: str, version: str) -> None:
        if len(done) == survived:
            raise KeyboardInterrupt
        done.append((alias, name))
        set_alias(self, name, alias, version)

    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "set_registered_model_alias", dies)
        with pytest.raises(KeyboardInterrupt):
            aliases.project(memory_store, standing, uri)
    assert stored(uri) != {"champion": both(2), "previous": both(1)}
    expected = [(alias, name) for alias in ("previous", "champion") for name in (SOLVER, VERIFIER)]
    assert done == expected[:survived]
    rest = aliases.project(memory_store, standing, uri).moves
    assert [(move.alias.name, move.alias.model) for move in rest] == expected[survived:]
    assert stored(uri) == {"champion": both(2), "previous": both(1)}


def test_registered_versions_are_found_by_their_tags(
    memory_store: ObjectStore, run: ObjectStore, uri: str
) -> None:
    """Also in models of other names; versions of other runs and policies are not taken."""
    register(uri, "a", "solver", "another", 1)
    register(uri, "a", "other", "tiny-1", 1)
    register(uri, "a", "solver", "tiny-1", 2)
    register(uri, "b", "solver", "tiny-1", 1)  # registered twice: the first model by name is taken
    register(uri, "a", "solver", "tiny-1", 1)
    register(uri, "b", "verifier", "tiny-1", 1)
    projected = aliases.project(memory_store, decided(memory_store, run, PROMOTED, 1), uri)
    assert projected.moves == (
        Move(Alias("a", "champion"), "4"),
        Move(Alias("b", "champion"), "2"),
    )
    assert client(uri).search_experiments(filter_string="name = 'astraflow'") == []


def test_policies_in_one_registered_model_cannot_share_an_alias(
    memory_store: ObjectStore, run: ObjectStore, uri: str
) -> None:
    for policy in ("solver", "verifier"):
        register(uri, "a", policy, "tiny-1", 1)
    projected = aliases.project(memory_store, decided(memory_store, run, PROMOTED, 1), uri)
    assert projected.moves == ()
    assert "the registered model a has versions of several policies" in projected.problems[0]


def register(uri: str, model: str, policy: str, run_id: str, version: int) -> None:
    """Register a version with the tags by which it is found."""
    writer = client(uri)
    if model not in {each.name for each in writer.search_registered_models()}:
        writer.create_registered_model(model)
    tags = {
        "astraflow.run_id": run_id,
        "astraflow.policy": policy,
        "astraflow.version": str(version),
    }
    writer.create_model_version(model, "file:///x", tags=tags)


def test_a_version_that_an_earlier_release_registered_is_found_by_its_mlflow_run(
    memory_store: ObjectStore, run: ObjectStore, uri: str, tmp_path: Any
) -> None:
    (tmp_path / "model").mkdir()
    other = Board(uri, "astraflow", "another", ["solver", "verifier"])
    board = Board(uri, "astraflow", "tiny-1", ["solver", "verifier"])
    for each in (other, board):
        for policy in ("solver", "verifier"):
            each.register(policy, tmp_path / "model", {"astraflow.version": "1"})
    registered = client(uri).search_model_versions()
    for version in registered:  # tags that this release writes
        for key in set(version.tags) - {"astraflow.version"}:
            client(uri).delete_model_version_tag(version.name, version.version, key)
    for key in run.list("weights"):  # nothing can be exported, so nothing is registered again
        if not key.endswith("manifest.json"):
            run.delete(key)
    projected = aliases.project(memory_store, decided(memory_store, run, PROMOTED, 1), uri)
    assert [move.version for move in projected.moves] == ["2", "2"]
    assert len(client(uri).search_model_versions()) == len(registered)


def test_a_finished_run_keeps_its_state_in_mlflow(
    memory_store: ObjectStore, run: ObjectStore, uri: str
) -> None:
    Board(uri, "astraflow", "tiny-1", ["solver", "verifier"]).end("FINISHED")
    before = _states(uri)
    aliases.project(memory_store, decided(memory_store, run, PROMOTED, 1), uri)
    assert _states(uri) == before
    assert {status for status, _ in before.values()} == {"FINISHED"}


def _states(uri: str) -> dict[str, tuple[str, int]]:
    (experiment,) = client(uri).search_experiments(filter_string="name = 'astraflow'")
    runs = client(uri).search_runs([experiment.experiment_id])
    return {each.info.run_id: (each.info.status, each.info.end_time) for each in runs}


def test_a_model_of_another_log_keeps_its_aliases(
    memory_store: ObjectStore, run: ObjectStore, uri: str
) -> None:
    aliases.project(memory_store, decided(memory_store, run, PROMOTED, 1), uri)
    standing = decided(memory_store, run, PROMOTED, 2, name="rival")
    projected = aliases.project(memory_store, standing, uri)
    (problem,) = projected.problems
    assert projected.moves == ()
    assert "alias champion stays" in problem
    assert "aliases of the promotion log tiny; promote with --name tiny" in problem
    assert stored(uri) == {"champion": both(1)}


def test_aliases_leave_a_model_that_no_team_uses_any_more(
    memory_store: ObjectStore, run: ObjectStore, uri: str
) -> None:
    """The second run has another experiment, so its versions are in other models."""
    recipe = EVALUATED_RECIPE + "tracking: {experiment: 'new:one'}\n"
    other = create_run(memory_store, "tiny-2", recipe=recipe)
    aliases.project(memory_store, decided(memory_store, run, PROMOTED, 1), uri)
    standing = decided(memory_store, other, PROMOTED, 2, run_id="tiny-2")
    projected = aliases.project(memory_store, standing, uri)
    assert projected.moves[-1] == Move(Alias(VERIFIER, "champion"), None)
    assert stored(uri) == {
        "champion": {"new-one-solver": "2", "new-one-verifier": "2"},
        "previous": both(1),
    }
    aliases.project(memory_store, decided(memory_store, other, PROMOTED, 1, run_id="tiny-2"), uri)
    assert stored(uri)["previous"] == {"new-one-solver": "2", "new-one-verifier": "2"}


def test_a_team_with_a_version_that_cannot_be_registered_moves_none_of_its_aliases(
    memory_store: ObjectStore, run: ObjectStore, uri: str
) -> None:
    aliases.project(memory_store, decided(memory_store, run, PROMOTED, 1), uri)
    untracked = create_run(
        memory_store, "tiny-2", recipe=EVALUATED_RECIPE + "tracking: {enabled: false}\n"
    )
    standing = decided(memory_store, untracked, PROMOTED, 2, run_id="tiny-2")
    projected = aliases.project(memory_store, standing, uri)
    assert [problem.partition(" of tiny-2")[0] for problem in projected.problems] == [
        "MLflow's alias champion stays where it is: solver@2"
    ]
    assert "tracking.enabled: false" in projected.problems[0]
    assert stored(uri) == {"champion": both(1), "previous": both(1)}


def test_an_unknown_champion_moves_nothing(uri: str, memory_store: ObjectStore) -> None:
    standing = Standing(name="tiny", champion=None, previous=None, challenger=None, unknown="torn")
    projected = aliases.project(memory_store, standing, uri)
    assert projected.moves == ()
    assert projected.problems == ("MLflow's aliases stay, because the champion is not known: torn",)


def test_an_unknown_champion_before_keeps_the_alias_previous(
    memory_store: ObjectStore, run: ObjectStore, uri: str
) -> None:
    decided(memory_store, run, PROMOTED, 1)
    aliases.project(memory_store, decided(memory_store, run, PROMOTED, 2), uri)
    memory_store.put(layout.promotion("tiny", 1), b"torn")
    standing = decision_log.fold(promotions.read_log(memory_store, "tiny"))
    projected = aliases.project(memory_store, standing, uri)
    assert projected.moves == ()
    assert len(projected.problems) == 1
    assert projected.problems[0].startswith(
        "MLflow's alias previous stays where it is, because the champion before is not known: "
        "promotions/tiny/00000001.json"
    )
    assert stored(uri) == {"champion": both(2), "previous": both(1)}
    standing = decided(memory_store, run, REJECTED, 3)  # other aliases move
    aliases.project(memory_store, standing, uri)
    assert stored(uri) == {"champion": both(2), "previous": both(1), "challenger": both(3)}


def test_a_server_that_does_not_answer_is_a_transient_error(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    standing = decided(memory_store, run, PROMOTED, 1)
    with refusing_port() as port, pytest.raises(MlflowError):
        aliases.project(memory_store, standing, f"http://127.0.0.1:{port}")


def test_moves_set_champions_last_and_delete_after_that() -> None:
    present = {
        Alias("a", "champion"): "1",
        Alias("old", "champion"): "9",
        Alias("old", "previous"): "8",
        Alias("a", "mine"): "3",
    }
    wanted = {
        Alias("b", "champion"): "5",
        Alias("a", "champion"): "2",
        Alias("a", "challenger"): "7",
        Alias("a", "previous"): "1",
    }
    assert moves(present, wanted) == [
        Move(Alias("a", "previous"), "1"),
        Move(Alias("a", "challenger"), "7"),
        Move(Alias("a", "champion"), "2"),
        Move(Alias("b", "champion"), "5"),
        Move(Alias("old", "previous"), None),
        Move(Alias("old", "champion"), None),
    ]
    assert moves(present, {}, kept=("champion", "previous", "challenger")) == []
    assert moves(wanted, wanted) == []


def test_an_mlflow_that_stops_answering_while_it_registers_is_a_transient_error(
    memory_store: ObjectStore, run: ObjectStore, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    standing = decided(memory_store, run, PROMOTED, 1)

    def refuse(*_: object, **__: object) -> None:
        raise MlflowError("away")

    monkeypatch.setattr(Board, "register", refuse)
    with pytest.raises(MlflowError, match="away"):
        aliases.project(memory_store, standing, uri)


def test_a_version_of_a_deleted_run_with_the_same_id_does_not_get_the_alias(
    memory_store: ObjectStore, run: ObjectStore, uri: str
) -> None:
    aliases.project(memory_store, decided(memory_store, run, PROMOTED, 1), uri)
    for key in run.list(""):
        run.delete(key)
    other = create_run(memory_store, "tiny-1", versions=0)
    for policy in ("solver", "verifier"):
        for version in range(2):
            files = {} if version else {"config.json": b"{}"}
            weights = builders.tensors(version + 20)
            publisher.publish(other, policy, version, weights, extra_files=files)
    projected = aliases.project(memory_store, decided(memory_store, other, PROMOTED, 1), uri)
    assert "previous stays where it is" not in "".join(projected.problems)
    reader = client(uri)
    digests = {
        alias: reader.get_model_version_by_alias(SOLVER, alias).tags["astraflow.weights_digest"]
        for alias in ("champion", "previous")
    }
    assert digests["champion"] == team(other, "tiny-1", 1)["solver"].digest
    assert digests["previous"] != digests["champion"]


def test_a_damaged_run_of_one_team_does_not_stop_the_aliases_of_the_others(
    memory_store: ObjectStore, run: ObjectStore, uri: str
) -> None:
    other = create_run(memory_store, "tiny-2", versions=2)
    decided(memory_store, other, PROMOTED, 1, run_id="tiny-2")
    other.put("run.json", b"torn")
    projected = aliases.project(memory_store, decided(memory_store, run, PROMOTED, 1), uri)
    (problem,) = projected.problems
    assert "alias previous stays where it is: solver@1 of tiny-2 is not registered" in problem
    assert stored(uri) == {"champion": both(1)}
