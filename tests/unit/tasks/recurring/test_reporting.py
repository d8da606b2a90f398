"""What people and programs see of a night."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.blocks.abstract import NotificationBlock
from prefect.blocks.core import Block

from storage import layout
from storage.promotion import nights
from storage.store.object_store import ObjectStore
from tasks.recipes.loader import load
from tasks.recurring import history, reporting
from tests.support.runs.promotable import EVALUATED_RECIPE
from tests.support.runs.week_of_nights import NAME, NIGHTS, write_week

CONFIG = load(EVALUATED_RECIPE)


def outcome_of(store: ObjectStore, night: str) -> Any:
    outcome = nights.read_outcome(store, NAME, night)
    assert outcome is not None
    return outcome


def test_the_table_has_the_newest_night_first(memory_store: ObjectStore) -> None:
    write_week(memory_store)
    lines = reporting.table(history.read(memory_store, NAME)).splitlines()
    assert lines[2] == f"| {NIGHTS[4]} | begun |  |  |  |  |  |  |"
    assert lines[3] == rf"| {NIGHTS[3]} | skipped |  |  |  |  |  | no row \<b\> |"
    assert lines[6] == (
        f"| {NIGHTS[0]} | promoted | 40.0 % | 65.0 % | +25.0 | +20.0 | 1 | gain 0.25 |"
    )


def test_the_table_of_many_nights_has_the_newest(memory_store: ObjectStore) -> None:
    write_week(memory_store)
    stored = history.read(memory_store, NAME)
    many = replace(stored, nights=stored.nights * 20)
    assert len(reporting.table(many).splitlines()) == 2 + reporting.SHOWN_MAX
    assert reporting.table(many).splitlines()[2].startswith(f"| {NIGHTS[4]} |")


def test_a_failure_of_one_view_is_logged_and_the_others_are_made(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_week(memory_store)
    made: list[str] = []

    def broken(*_: object) -> None:
        raise RuntimeError("Prefect is away")

    monkeypatch.setattr(reporting, "_to_prefect", broken)
    monkeypatch.setattr(reporting, "tracking_uri", lambda: "http://mlflow")
    monkeypatch.setattr(reporting, "to_mlflow", lambda *given: made.append(given[-1]))
    reporting.report(memory_store, outcome_of(memory_store, NIGHTS[0]), CONFIG)
    assert NIGHTS[0] in memory_store.get(layout.nights_report(NAME)).decode()
    assert made == ["http://mlflow"]
    assert "Prefect's table of nights is not up to date" in caplog.text


def test_mlflow_is_left_out_without_tracking(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_week(memory_store)
    off = CONFIG.model_copy(
        update={"tracking": CONFIG.tracking.model_copy(update={"enabled": False})}
    )
    monkeypatch.setattr(reporting, "_to_prefect", lambda *given: None)
    monkeypatch.setattr(reporting, "tracking_uri", lambda: "http://mlflow")
    monkeypatch.setattr(reporting, "to_mlflow", lambda *given: pytest.fail("it was called"))
    reporting.report(memory_store, outcome_of(memory_store, NIGHTS[0]), off)


@pytest.mark.filterwarnings("ignore")  # MLflow's own imports and database layer warn
def test_mlflow_has_the_gates_numbers_of_each_night_once(
    memory_store: ObjectStore, uri: str
) -> None:
    from mlflow.tracking import MlflowClient

    write_week(memory_store)
    stored = history.read(memory_store, NAME)
    for _ in range(2):
        reporting.to_mlflow(stored, "<html>", CONFIG, uri)
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(CONFIG.tracking.experiment)
    (run,) = client.search_runs([experiment.experiment_id])
    points = client.get_metric_history(run.info.run_id, "gate/pooled/candidate")
    assert [(point.step, round(point.value, 2)) for point in points] == [
        (1, 0.65), (2, 0.3), (3, 0.45),
    ]  # fmt: skip
    promoted = client.get_metric_history(run.info.run_id, "promoted")
    assert [point.value for point in promoted] == [1.0, 0.0, 1.0]
    assert run.data.tags["astraflow.champion"] == "solver 40 of tiny-1"
    assert {each.path for each in client.list_artifacts(run.info.run_id)} == {
        "nights.html",
        "nights.md",
    }


class _Told(NotificationBlock):
    sent: list[tuple[str, str | None]] = []

    def notify(self, body: str, subject: str | None = None) -> None:  # type: ignore[override]
        self.sent.append((body, subject))


@pytest.mark.filterwarnings("ignore")  # MLflow's own imports and database layer warn
def test_a_night_with_the_largest_number_and_strange_data_sets_does_not_keep_others_from_mlflow(
    memory_store: ObjectStore, uri: str
) -> None:
    from mlflow.tracking import MlflowClient

    write_week(memory_store)
    stored = history.read(memory_store, NAME)
    row = stored.nights[2]
    assert row.plan is not None
    assert row.decision is not None
    assert row.decision.gate is not None
    rows = [replace(row.decision.gate.rows[0], dataset=name) for name in ("", ".", "..", "x" * 300)]
    gate = replace(row.decision.gate, rows=tuple(rows))
    hostile = replace(
        row,
        plan=replace(row.plan, number=2**63 - 1),
        decision=replace(row.decision, gate=gate),
    )
    stored = replace(stored, nights=(*stored.nights[:2], hostile))
    reporting.to_mlflow(stored, "<html>", CONFIG, uri)
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(CONFIG.tracking.experiment)
    (run,) = client.search_runs([experiment.experiment_id])
    points = client.get_metric_history(run.info.run_id, "promoted")
    assert [point.step for point in points] == [1, 2, 2**63 - 1]


async def test_a_notification_block_is_told_how_the_night_ended(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_week(memory_store)
    block = _Told()

    async def load_block(name: str) -> object:
        assert name == "told/me"
        return block

    monkeypatch.setattr(Block, "aload", load_block)
    await reporting.notify(outcome_of(memory_store, NIGHTS[1]), "told/me")
    title = f"{NAME}, night {NIGHTS[1]}: rejected"
    assert block.sent == [(f"{title}\n\ngain -0.1", title)]


async def test_a_block_that_cannot_be_used_is_logged(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_week(memory_store)

    async def load_block(name: str) -> object:
        return SimpleNamespace()

    monkeypatch.setattr(Block, "aload", load_block)
    await reporting.notify(outcome_of(memory_store, NIGHTS[1]), "secret/key")
    assert "secret/key is a SimpleNamespace, not a notification block" in caplog.text
