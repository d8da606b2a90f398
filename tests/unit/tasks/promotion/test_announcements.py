"""What Prefect and MLflow show of a decision."""

import datetime
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from prefect.events.schemas.events import Event

from storage.records.promotions import (
    DecisionKind,
    GateRow,
    GateVerdict,
    PromotionDecision,
    Requirement,
    TeamVersion,
)
from storage.store.object_store import ObjectStore
from tasks.promotion import announcements
from tasks.tracking.mlflow_client import Board
from tests.support.http_servers import one_answer
from tests.support.runs.promotable import EVALUATED_RECIPE, create_run

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own imports and database layer warn

ROW = GateRow(
    dataset="gsm8k|*x*", problems=100, champion_failed=0, candidate_failed=0, champion=0.5,
    candidate=0.55, gain=0.05, low=-0.01, high=0.11, p_value=0.081, requirement=Requirement.GAIN,
    required=0.0, passed=False, why="it may be chance",
)  # fmt: skip
DECISION = PromotionDecision(
    name="Tiny_1.7b", number=3, kind=DecisionKind.REJECTED, at_s=1700000000.0, by="ada@host",
    reason="gsm8k: <b>no</b> gain",
    team={"solver": TeamVersion(run_id="tiny-1", version=40, digest="9f0a")},
    gate=GateVerdict(passed=False, reason="no gain", test="mcnemar", confidence=0.95, rows=(ROW,)),
)  # fmt: skip


def test_the_page_has_the_team_the_reason_and_the_gates_table() -> None:
    lines = announcements.page(DECISION).splitlines()
    assert lines[0] == r"# Tiny\_1.7b, decision 3: rejected"
    assert r"gsm8k: \<b\>no\</b\> gain" in lines
    assert "By ada@host." in lines
    assert "| solver | tiny-1 | 40 | 9f0a |" in lines
    assert lines[-1] == (
        r"| gsm8k\|\*x\* | 100 | 50.0% | 55.0% | +5.0% | -1.0% | +11.0% | 0.081 | +0.0% | no "
        "| it may be chance |"
    )


def test_a_page_by_hand_has_no_table() -> None:
    by_hand = PromotionDecision(
        name="tiny", number=1, kind=DecisionKind.PROMOTED, at_s=0.0, by="ada", reason="",
        team=DECISION.team,
    )  # fmt: skip
    assert "data set" not in announcements.page(by_hand)


class Recorder(ThreadingHTTPServer):
    """Answers as Prefect's server does to a new artifact, and records what it is sent."""

    def __init__(self) -> None:
        self.received: list[tuple[str, Any]] = []
        super().__init__(("127.0.0.1", 0), _Answer)


class _Answer(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Recorder)
        sent = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        self.server.received.append((self.path, sent))
        body = json.dumps({**sent, "id": "3fa85f64-5717-4562-b3fc-2c963f66afa6"}).encode()
        self.send_response(201)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return None


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    # the client's own event of a new artifact would start a server, too
    monkeypatch.setattr("prefect.events.utilities.should_emit_events", lambda: False)
    recorder = Recorder()
    threading.Thread(target=recorder.serve_forever, daemon=True).start()
    yield recorder
    recorder.shutdown()
    recorder.server_close()


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """The events that are handed to Prefect, whose own worker would start a server to send them."""
    events: list[Event] = []

    def record(**fields: Any) -> None:
        events.append(Event(occurred=datetime.datetime.now(datetime.UTC), **fields))

    monkeypatch.setattr("prefect.events.emit_event", record)
    return events


def test_prefect_gets_an_artifact_and_an_event_of_the_decision(
    memory_store: ObjectStore, server: Recorder, emitted: list[Event]
) -> None:
    for _ in range(2):
        announcements.to_prefect(
            memory_store, DECISION, f"http://127.0.0.1:{server.server_port}/api"
        )
    path, artifact = server.received[0]
    assert path == "/api/artifacts/"
    assert (artifact["key"], artifact["type"]) == ("promotion-tiny-1-7b-afaa17c8", "markdown")
    assert artifact["data"] == announcements.page(DECISION)
    first, second = emitted
    assert first.event == "astraflow.promotion.rejected"
    assert first.resource.id == "astraflow.promotion.Tiny_1.7b"
    assert first.payload["number"] == 3
    assert first.payload["team"] == {"solver": {"run": "tiny-1", "version": 40, "digest": "9f0a"}}
    assert first.id == second.id


def test_a_prefect_server_that_refuses_is_an_error_and_nothing_is_emitted(
    memory_store: ObjectStore, emitted: list[Event]
) -> None:
    with (
        one_answer(400, b"{}", "application/json") as strange,
        pytest.raises(httpx.HTTPStatusError, match="400"),
    ):
        announcements.to_prefect(memory_store, DECISION, f"http://127.0.0.1:{strange.port}/api")
    assert emitted == []


def test_the_address_of_prefect_is_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    assert announcements.prefect_api_url() == "http://127.0.0.1:1/api"


def test_mlflow_gets_the_page_and_a_tag_on_the_parent_run(
    memory_store: ObjectStore, uri: str
) -> None:
    create_run(memory_store, "tiny-1")
    Board(uri, "astraflow", "tiny-1", ["solver", "verifier"]).end("FINISHED")
    announcements.to_mlflow(memory_store, DECISION, uri)
    announcements.to_mlflow(memory_store, DECISION, uri)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    (experiment,) = client.search_experiments(filter_string="name = 'astraflow'")
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in runs if "astraflow.policy" not in run.data.tags]
    assert len(runs) == 3
    assert parent.data.tags["astraflow.promotion"] == "rejected: decision 3 of Tiny_1.7b"
    (file,) = client.list_artifacts(parent.info.run_id, "promotions")
    assert file.path == "promotions/Tiny_1.7b-00000003.md"
    assert parent.info.status == "FINISHED"


def test_a_run_without_tracking_is_left_out(memory_store: ObjectStore, uri: str) -> None:
    create_run(memory_store, "tiny-1", recipe=EVALUATED_RECIPE + "tracking: {enabled: false}\n")
    announcements.to_mlflow(memory_store, DECISION, uri)
    from mlflow.tracking import MlflowClient

    found = MlflowClient(tracking_uri=uri).search_experiments(filter_string="name = 'astraflow'")
    assert found == []
