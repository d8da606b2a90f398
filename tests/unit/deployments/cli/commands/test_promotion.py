"""`astraflow promote`, `rollback` and `promotions`, without servers."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from deployments.cli.app import app
from storage.store.object_store import ObjectStore, open_store
from storage.weights import tags
from tests.support.runs.contestants import (
    SkilledEngine,
    contest_config,
    create_contestants,
    evaluate_as_best,
)
from tests.support.runs.promotable import create_run, evaluate
from tests.support.stores.bad_sectors import fail_reads, go_away
from tests.support.stores.ordinary_user import as_ordinary_user


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """A run `tiny-1` of the recipe `tiny`, whose version 1 is the best of three."""
    monkeypatch.setenv("ASTRAFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ASTRAFLOW_STORE", str(tmp_path / "store"))
    for variable in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "COLUMNS"):  # xdist sets COLUMNS
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("tasks.promotion.announcements.prefect_api_url", lambda: "")
    run = create_run(open_store(str(tmp_path / "store")), "tiny-1")
    for version, right in ((0, 1), (1, 3), (2, 2)):
        evaluate(run, version, right)
    return run


def call(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result


def test_promote_takes_the_best_evaluated_version_and_the_recipes_name(run: ObjectStore) -> None:
    result = call("promote", "tiny-1", "--reason", "looked good")
    assert result.stdout.strip() == (
        "solver@1 of tiny-1, verifier@1 of tiny-1: champion of tiny by decision 1; looked good; "
        "accuracy 75.0% of 4 (held_out)"
    )
    assert "MLflow's aliases stay" in result.stderr
    assert {tag.name for tag in tags.require_all(run)} == {"tiny-solver-1", "tiny-verifier-1"}


def test_promote_takes_the_named_versions_and_the_named_log() -> None:
    result = call(
        "promote", "tiny-1", "--name", "mine", "--version", "solver@2", "--version", "latest"
    )
    assert "solver@2 of tiny-1, verifier@2 of tiny-1: champion of mine" in result.stdout
    result = call("promote", "tiny-1", "--version", "7", code=2)
    assert "solver has no version 7; its newest is 2" in result.stderr
    result = call("promote", "tiny-9", code=2)
    assert "there is no run 'tiny-9'" in result.stderr
    result = call("promote", "tiny-1", "--name", "a/b", code=2)
    assert "cannot name a promotion log" in result.stderr or "cannot be a tag" in result.stderr


def test_rollback_returns_to_the_champion_before_or_to_a_decision() -> None:
    for version in ("0", "1", "2"):
        call("promote", "tiny-1", "--version", version)
    result = call("rollback", "tiny", "--reason", "too long")
    assert "solver@1 of tiny-1, verifier@1 of tiny-1: champion of tiny by decision 4; too long" in (
        result.stdout
    )
    assert "decision 5; back to decision 1" in call("rollback", "tiny", "--to", "1").stdout
    result = call("rollback", "tiny", code=2)
    assert "tiny has no earlier champion to return to" in result.stderr


def test_promotions_lists_decisions_with_their_roles() -> None:
    assert "no decisions yet in file:///" in call("promotions").stdout
    for version in ("0", "1"):
        call("promote", "tiny-1", "--version", version)
    lines = call("promotions", "tiny").stdout.splitlines()
    assert lines[0].split() == ["name", "decision", "time", "kind", "is", "team", "gain", "reason"]
    first, second = (line.split() for line in lines[1:])
    assert (first[:2], first[4:6]) == (["tiny", "1"], ["promoted", "previous"])
    assert (second[:2], second[4:6]) == (["tiny", "2"], ["promoted", "champion"])
    assert "solver@1 of tiny-1, verifier@1 of tiny-1" in lines[2]


def test_promotions_as_json_have_the_documented_fields() -> None:
    call("promote", "tiny-1", "--name", "b")
    call("promote", "tiny-1", "--name", "a")
    listed = json.loads(call("promotions", "--json").stdout)
    assert [each["name"] for each in listed] == ["a", "b"]
    assert listed[0]["is"] == ["champion"]
    assert listed[0]["team"]["solver"].keys() == {"run_id", "version", "digest"}
    assert listed[0].keys() == {
        "name", "number", "kind", "at_s", "by", "reason", "team", "returns_to", "gate", "is",
    }  # fmt: skip
    assert [each["name"] for each in json.loads(call("promotions", "b", "--json").stdout)] == ["b"]


def test_an_unreadable_decision_is_a_warning_and_the_others_are_listed(tmp_path: Path) -> None:
    call("promote", "tiny-1")
    (tmp_path / "store" / "promotions" / "tiny" / "00000002.json").write_text("torn")
    result = call("promotions")
    assert "solver@1 of tiny-1" in result.stdout
    assert "tiny: promotions/tiny/00000002.json is not JSON" in result.stderr
    assert "`astraflow rollback tiny --to NUMBER`" in result.stderr
    result = call("promote", "tiny-1", "--version", "2", code=2)
    assert "the champion of tiny is not known" in result.stderr
    call("rollback", "tiny", "--to", "1")
    assert "champion of tiny is not known" not in call("promotions").stderr


def test_a_log_of_another_user_hides_no_other_log(tmp_path: Path) -> None:
    call("promote", "tiny-1", "--name", "mine")
    call("promote", "tiny-1", "--name", "theirs")
    call("promotions")  # an ordinary user may not import what is imported here

    def work() -> None:
        (tmp_path / "store" / "promotions" / "theirs").chmod(0)
        result = call("promotions")
        assert "solver@1 of tiny-1" in result.stdout
        assert "theirs is skipped, because it cannot be read: access to " in result.stderr
        assert "is denied" in call("promotions", "theirs", code=2).stderr

    as_ordinary_user(tmp_path, work)


def test_a_log_on_a_bad_sector_hides_no_other_log(monkeypatch: pytest.MonkeyPatch) -> None:
    call("promote", "tiny-1", "--name", "mine")
    call("promote", "tiny-1", "--name", "broken")
    fail_reads(monkeypatch, "promotions/broken/00000001.json")
    result = call("promotions")
    assert "solver@1 of tiny-1" in result.stdout
    assert "broken is skipped, because it cannot be read: the file system" in result.stderr
    assert "Input/output error" in call("promotions", "broken", code=1).stderr


def test_a_store_that_goes_away_is_no_empty_list(monkeypatch: pytest.MonkeyPatch) -> None:
    call("promote", "tiny-1", "--name", "mine")
    fail_reads(monkeypatch, "promotions/mine/00000001.json")
    go_away(monkeypatch)
    result = call("promotions", code=1)
    assert (result.stdout, result.stderr) == ("", "the store is away: promotions/\n")


def test_repair_brings_tags_back_and_names_what_it_cannot_do(run: ObjectStore) -> None:
    call("promote", "tiny-1")
    tags.delete(run, "tiny-solver-1")
    assert "MLFLOW_TRACKING_URI is not set" in call("promotions", "--repair").stderr
    assert "tiny-solver-1" in {tag.name for tag in tags.require_all(run)}
    tags.delete(run, "tiny-solver-1")
    assert call("promotions").stderr == ""
    assert "tiny-solver-1" not in {tag.name for tag in tags.require_all(run)}


@pytest.fixture
def contestants(run: ObjectStore, tmp_path: Path) -> ObjectStore:
    """A run `two` whose versions are right in 0 %, 100 % and 30 %; the first one is the best."""
    opened = open_store(str(tmp_path / "store"))
    config = contest_config(gate__confidence=0.9, name="contest")
    stored = create_contestants(opened, "two", (0, 100, 30), config)
    evaluate_as_best(stored, 1)
    SkilledEngine.forget()
    return stored


def test_promote_with_a_gate_promotes_the_better_team_and_rejects_the_worse(
    contestants: ObjectStore,
) -> None:
    result = call("promote", "two", "--gate", "--reason", "nightly")
    lines = result.stdout.splitlines()
    assert lines[0] == (
        "solver@1 of two, verifier@1 of two against solver@0 of two, verifier@0 of two (no "
        "champion: its base model)"
    )
    assert lines[1].split("  ")[0] == "data set"
    assert lines[2].split()[:5] == ["held_out", "12", "0.0%", "100.0%", "+100.0%"]
    assert lines[3].startswith(
        "solver@1 of two, verifier@1 of two: champion of contest by decision 1; nightly; held_out: "
        "gain of +100.0%"
    )
    assert "held_out: champion" in result.stderr
    assert "held_out: candidate" in result.stderr
    result = call("promote", "two", "--gate", "--version", "2", code=1)
    assert "against solver@1 of two, verifier@1 of two (decision 1)" in result.stdout
    assert (
        "solver@2 of two, verifier@2 of two: not champion of contest by decision 2; held_out"
        in (result.stdout)
    )
    listed = json.loads(call("promotions", "contest", "--json").stdout)
    assert [(each["kind"], each["is"]) for each in listed] == [
        ("promoted", ["champion"]),
        ("rejected", ["challenger"]),
    ]


def test_a_gate_without_two_teams_decides_nothing(contestants: ObjectStore) -> None:
    call("promote", "two")
    result = call("promote", "two", "--gate", code=2)
    assert "has the weights of the champion of contest (decision 1); nothing is decided" in (
        result.stderr
    )
    assert SkilledEngine.made == []
    assert len(json.loads(call("promotions", "contest", "--json").stdout)) == 1


def test_the_exit_codes_of_a_gate_are_in_the_help() -> None:
    text = " ".join(call("promote", "--help").stdout.split())
    assert "The exit code is 0 for a promotion and 1 for a rejection" in text
