"""One run with damaged, hostile or foreign objects: every command names it and continues with the
others.
"""

import io
import json
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from deployments.cli.app import _PlainFormatter, app
from deployments.cli.output import live_view, tables, terminal
from deployments.cli.output.plain_console import PlainConsole
from storage.errors import CorruptError
from storage.formats.json_objects import seal, unseal
from storage.records.control import Stop
from storage.run import runs
from storage.run.runs import RunRecord
from storage.store.object_store import ObjectStore, open_store
from storage.verify.verify import verify
from tasks.monitoring.status import status
from tasks.recipes.run_terms import run_terms
from tasks.reports.page import render_report
from tests.support.runs.small_run import SmallRun
from tests.support.stores.bad_sectors import fail_reads, go_away
from tests.support.stores.ordinary_user import as_ordinary_user
from tests.support.stores.strange_objects import STRANGE, link, strange, take_place

NOT_JSON = b"\x00\xff{"


@cache
def sound_run() -> dict[str, bytes]:
    """Key → object of a run with one step."""
    small_run = SmallRun("bad-runs")
    for policy in ("solver", "verifier"):
        small_run.version(policy, 0)
        small_run.batch(policy, 1)
        small_run.version(policy, 1)
    small_run.order(0)
    small_run.shard(0)
    small_run.evaluation(0, [1, 0], [1, 1])
    small_run.beat("supervisor", "supervisor", 100.0)
    return {key: small_run.run.get(key) for key in small_run.run.list()}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """Two valid runs, `good` and the newer `bad`."""
    monkeypatch.setenv("ASTRAFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ASTRAFLOW_STORE", str(tmp_path / "store"))
    result = open_store(str(tmp_path / "store"))
    stands = unseal(RunRecord, sound_run()["run.json"], "run.json")
    for created_s, run_id in ((5.0, "good"), (6.0, "bad")):
        for key, body in sound_run().items():
            result.put(f"runs/{run_id}/{key}", body)
        result.put(
            f"runs/{run_id}/run.json",
            seal(RunRecord(run_id, created_s, stands.deployment, stands.config)),
        )
    return result


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def config(store: ObjectStore, **changes: object) -> bytes:
    stands = runs.read_run(store.sub("runs/bad"))
    return seal(RunRecord("bad", 6.0, "", {**stands.config, **changes}))


OF_RUN: dict[str, Callable[[ObjectStore], bytes]] = {
    "an empty run.json": lambda store: b"",
    "a run.json that is not JSON": lambda store: NOT_JSON,
    "a list": lambda store: b"[]",
    "another format": lambda store: b'{"format": 2}',
    "a config of another release": lambda store: config(store, added_later={"a": 1}),
    "a config that is no config": lambda store: seal(RunRecord("bad", 6.0, "", {})),
    "an absurd time": lambda store: seal(RunRecord("bad", float("nan"), "", {})),
    "a policy whose name is a path": lambda store: config(
        store, policies={"../x": {"model": {"tiny": {}}}}
    ),
}


@pytest.mark.parametrize("damage", OF_RUN.values(), ids=OF_RUN.keys())
def test_an_unreadable_run_is_listed_with_the_reason_beside_the_others(
    store: ObjectStore, damage: Callable[[ObjectStore], bytes]
) -> None:
    store.put("runs/bad/run.json", damage(store))
    result = call("runs")
    assert result.exit_code == 0, result.stderr
    assert [line.split()[:2] for line in result.stdout.splitlines()[1:]] == [
        ["bad", "unreadable"],
        ["good", "interrupted"],
    ]
    assert result.stderr.startswith("bad: ")
    listed = json.loads(call("runs", "--json").stdout)
    assert [(run["run_id"], run["state"], run["started"]) for run in listed] == [
        ("bad", "unreadable", None),
        ("good", "interrupted", 5.0),
    ]
    assert listed[0]["reason"]


@pytest.mark.parametrize("make", STRANGE.values(), ids=STRANGE.keys())
def test_a_run_with_a_folder_as_its_record_is_listed_with_the_reason(
    store: ObjectStore, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "store" / "runs" / "bad" / "run.json"
    take_place(path, make)
    result = call("runs")
    assert [line.split()[:2] for line in result.stdout.splitlines()[1:]] == [
        ["bad", "unreadable"],
        ["good", "interrupted"],
    ]
    assert f"bad: {path} is " in result.stderr
    assert json.loads(call("status", "--json").stdout)["run_id"] == "good"


@pytest.mark.parametrize("command", ["cancel", "gc"])
def test_a_damaged_end_of_a_run_gives_an_error_with_a_remedy(
    store: ObjectStore, command: str
) -> None:
    store.put("runs/bad/stop.json", b"{")
    result = call(command, "bad")
    assert result.exit_code == 1
    assert result.stderr.startswith("the run's end cannot be read: stop.json is not JSON")
    assert "; put file:///" in result.stderr
    assert "/runs/bad/stop.json back from a copy, or delete it to resume the run" in result.stderr


def test_a_run_with_a_damaged_end_is_not_restarted_silently(store: ObjectStore) -> None:
    store.put("runs/bad/stop.json", b"{")
    with pytest.raises(CorruptError, match="or delete it to resume the run"):
        runs.check_restart(store, "bad", None)
    assert store.get("runs/bad/stop.json") == b"{"


@pytest.mark.parametrize("command", ["status", "report", "weights", "verify", "gc"])
@pytest.mark.parametrize("damage", OF_RUN.values(), ids=OF_RUN.keys())
def test_a_command_on_an_unreadable_run_gives_an_error_of_one_sentence(
    store: ObjectStore, damage: Callable[[ObjectStore], bytes], command: str
) -> None:
    store.put("runs/bad/run.json", damage(store))
    result = call(command, "bad")
    assert result.exit_code in (1, 2)
    assert "unexpected" not in result.output
    assert "Traceback" not in result.output
    assert (
        "run.json" in result.stderr or command == "verify"
    )  # it validates the config's content, whatever that is
    assert call(command, "good").exit_code == (
        1 if command == "verify" else 0
    )  # the ledger of a small run does not balance


def test_the_default_run_is_the_newest_readable_one(store: ObjectStore) -> None:
    store.put("runs/bad/run.json", b"")
    result = call("status", "--json")
    assert json.loads(result.stdout)["run_id"] == "good"
    assert result.stderr.startswith(
        f"the run bad is skipped, because it cannot be read: {store.url}/runs/bad/run.json is not JSON"
    )


OF_A_PART = {
    "an empty stop": ("stop.json", b"", "the run's end cannot be read: stop.json is not JSON"),
    "a stop that is no stop": (
        "stop.json",
        b'{"format": 1, "state": "weird"}',
        "the run's end cannot be read: stop.json has",
    ),
    "a stop at no time": (
        "stop.json",
        seal(Stop("failed", "x", float("inf"))),
        "the run's end cannot be read: stop.json is not a",
    ),
    "a heartbeat": (
        "heartbeats/dataflow/dataflow.json",
        b"{",
        "1 heartbeat cannot be read: heartbeats/dataflow/dataflow.json",
    ),
    "an evaluation": (
        "evals/solver-00000001_verifier-00000001.arrow",
        b"x",
        "1 evaluation cannot be read: evals/solver-00000001",
    ),
    "a tag": ("tags/best.json", b"", "1 tag cannot be read: tags/best.json is not JSON"),
    "the newest batch": (
        "batches/solver/00000001.arrow",
        b"x",
        "batch 1 of solver cannot be read: ",
    ),
}


@pytest.mark.parametrize(("key", "body", "words"), OF_A_PART.values(), ids=OF_A_PART.keys())
def test_a_damaged_part_of_a_run_is_named_and_the_rest_is_shown(
    store: ObjectStore, key: str, body: bytes, words: str
) -> None:
    store.put(f"runs/bad/{key}", body)
    output = json.loads(call("status", "bad", "--json").stdout)
    assert [problem[: len(words)] for problem in output["problems"]] == [words]
    assert output["policies"]["solver"]["version"] == 1
    shown = call("status", "bad")
    assert (shown.exit_code, words in shown.stdout) == (0, True)
    reported = call("report", "bad")
    assert reported.exit_code == 0, reported.stderr
    assert words.replace("'", "&#39;") in store.get("runs/bad/report.html").decode()
    assert [run["state"] for run in json.loads(call("runs", "--json").stdout)] == [
        "interrupted",
        "interrupted",
    ]
    assert call("runs").exit_code == 0


OF_A_LISTING = {
    "heartbeats/dataflow/dataflow.json": "1 heartbeat cannot be read: ",
    "evals/solver-00000001_verifier-00000001.arrow": "1 evaluation cannot be read: evals/solver-00000001_",
    "tags/best.json": "1 tag cannot be read: ",
    "heartbeats/rollout": "1 heartbeat cannot be read: ",
}


@pytest.mark.parametrize(("key", "make"), strange(OF_A_LISTING))
def test_a_listed_object_that_is_a_folder_is_named_and_the_rest_is_shown(
    store: ObjectStore, tmp_path: Path, key: str, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "store" / "runs" / "bad" / key
    take_place(path, make)
    output = json.loads(call("status", "bad", "--json").stdout)
    ((problem,), where) = output["problems"], str(path)
    assert problem.startswith(OF_A_LISTING[key])
    assert where in problem
    assert output["policies"]["solver"]["version"] == 1
    for command in ("report", "weights"):
        result = call(command, "bad")
        assert (result.exit_code, result.stderr.count("Traceback")) == (0, 0), result.stderr
    assert call("verify", "bad").exit_code == 1
    assert [run["state"] for run in json.loads(call("runs", "--json").stdout)] == [
        "interrupted",
        "interrupted",
    ]


@pytest.mark.parametrize(
    ("folder", "one"), [("heartbeats", "heartbeat"), ("evals", "evaluation"), ("tags", "tag")]
)
def test_a_folder_of_a_run_that_is_a_link_or_a_file_is_named_and_the_rest_is_shown(
    store: ObjectStore, tmp_path: Path, folder: str, one: str
) -> None:
    path = tmp_path / "store" / "runs" / "bad" / folder
    for make in (link, Path.touch):
        take_place(path, make)
        output = json.loads(call("status", "bad", "--json").stdout)
        assert [
            problem.startswith(f"1 {one} cannot be read: {path} ") for problem in output["problems"]
        ] == [True]
        assert output["policies"]["solver"]["version"] == 1
        assert call("report", "bad").exit_code == 0


def test_an_object_without_read_permission_is_named_and_the_rest_is_shown(
    store: ObjectStore, tmp_path: Path
) -> None:
    keys = [
        "heartbeats/supervisor/supervisor.json",
        "tags/best.json",
        "batches/solver/00000001.arrow",
    ]
    store.put("runs/bad/tags/best.json", b"{}")

    def work() -> None:
        for key in keys:
            (tmp_path / "store" / "runs" / "bad" / key).chmod(0)
        problems = status(store, "bad").problems
        assert [
            key
            for key in keys
            if any(key in problem and "is denied" in problem for problem in problems)
        ] == keys
        assert len(problems) == 3
        bad = store.sub("runs/bad")
        verdict = verify(bad, run_terms(bad))
        denied = {item.where for item in verdict.violations if "is denied" in item.what}
        assert denied == set(keys)

    as_ordinary_user(tmp_path, work)


BAD_SECTORS = ["run.json", "stop.json", "heartbeats/supervisor/supervisor.json"]


@pytest.mark.parametrize("key", BAD_SECTORS)
def test_a_run_with_an_object_on_a_bad_sector_is_listed_beside_the_others(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    store.put("runs/bad/stop.json", b"{}")
    fail_reads(monkeypatch, f"runs/bad/{key}")
    result = call("runs", "--json")
    assert result.exit_code == 0, result.stderr
    assert [(run["run_id"], run["state"]) for run in json.loads(result.stdout)] == [
        ("bad", "unreadable"),
        ("good", "interrupted"),
    ]
    assert f"bad: the file system failed at {tmp_path}/store/runs/bad/{key}: " in result.stderr
    if key == "run.json":
        assert json.loads(call("status", "--json").stdout)["run_id"] == "good"


def test_a_store_that_is_away_is_an_error_and_not_the_fault_of_its_runs(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_reads(monkeypatch, "runs/bad/run.json")
    go_away(monkeypatch)
    for _ in range(2):  # it goes away while the runs are read, and then it is away
        result = call("runs")
        assert (result.exit_code, result.stdout, result.stderr) == (
            1,
            "",
            "the store is away: runs/\n",
        )


def test_an_undamaged_run_has_no_problems(store: ObjectStore) -> None:
    assert json.loads(call("status", "good", "--json").stdout)["problems"] == []
    assert call("runs").stderr == ""


def test_a_damaged_manifest_tag_or_heartbeat_does_not_hide_the_other_versions(
    store: ObjectStore,
) -> None:
    store.put("runs/bad/weights/solver/00000000/manifest.json", b"{")
    store.put("runs/bad/tags/best.json", b"")
    store.put("runs/bad/heartbeats/rollout/rollout-0.json", b"{")
    result = call("weights", "bad", "--json")
    assert [(item["policy"], item["version"]) for item in json.loads(result.stdout)] == [
        ("solver", 1),
        ("verifier", 0),
        ("verifier", 1),
    ]
    for problem in (
        "weights/solver/00000000/manifest.json is not JSON",
        "tags/best.json is not JSON",
        "heartbeats/rollout/rollout-0.json is not JSON",
    ):
        assert result.stderr.count(f"skipped, because it cannot be read: {problem}") == 1
    assert call("report", "bad").exit_code == 0
    refused = call("gc", "bad")
    assert (
        refused.exit_code,
        "weights/solver/00000000/manifest.json is not JSON" in refused.stderr,
    ) == (1, True)


HOSTILE = "\x1b]0;owned\x07\x1b[2J[/][bold]\u202e\x9b31m<script>alert(1)</script> | \n# forged"


def hostile_run(name: str) -> SmallRun:
    """A run in which every freely chosen text is hostile."""
    small_run = SmallRun(name)
    small_run.version("solver", 0)
    small_run.beat("supervisor", "supervisor", 100.0, state=HOSTILE, note=HOSTILE)
    small_run.beat(
        "rollout",
        "rollout-0",
        100.0,
        region="us-east",
        note=HOSTILE,
        seconds={HOSTILE: 3.0},
    )
    small_run.run.put(
        "heartbeats/rollout/rollout-1.json", json.dumps({"format": 1, "kind": HOSTILE}).encode()
    )
    small_run.evaluation(0, [1.0], [1.0])
    small_run.stop("failed", HOSTILE, small_run.created_s + 9)
    return small_run


def test_stored_text_cannot_contain_terminal_commands() -> None:
    small_run = hostile_run("hostile-terminal")
    seen = status(small_run.store, "tiny-1", small_run.created_s)
    assert seen.reason == HOSTILE
    written = io.StringIO()
    console = PlainConsole(file=written, width=120, force_terminal=True)
    console.print(tables.status_picture(seen))
    console.print(
        live_view.picture(
            live_view.View(
                run_id="tiny-1",
                elapsed_s=1.0,
                flow_state=HOSTILE,
                status=seen,
                note=HOSTILE,
                links={HOSTILE: HOSTILE},
            )
        )
    )
    line = live_view.line(
        live_view.View(run_id="tiny-1", elapsed_s=1.0, flow_state=HOSTILE, status=None)
    )
    console.print(line)
    text = written.getvalue()
    assert "[/][bold]" in text
    for command in ("\x1b]0", "\x1b[2J", "\x07", "\x9b", "\u202e"):
        assert command not in text
    assert "\n" not in line
    assert "\x1b" not in line


def test_stored_text_adds_no_line_to_messages_and_warnings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal.say(HOSTILE)
    terminal.warn(HOSTILE)
    shown = capsys.readouterr()
    record = logging.LogRecord("storage", logging.WARNING, "", 0, "%s", (HOSTILE,), None)
    texts = [shown.out, shown.err, _PlainFormatter().format(record) + "\n"]
    assert [text.count("\n") for text in texts] == [1, 1, 1]
    assert all("# forged" in text and "\x1b]" not in text for text in texts)


def test_stored_text_cannot_be_markup_of_the_report() -> None:
    page = render_report(hostile_run("hostile-page").run, "tiny-1")
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(page)


def test_extreme_measurements_neither_break_the_report_nor_appear_in_the_json() -> None:
    small_run = SmallRun("hostile-numbers")
    small_run.version("solver", 0)
    for step, value in enumerate(
        (1e308, -1e308, float("nan"), float("inf"), 5e-324, 1e200), start=1
    ):
        small_run.batch(
            "solver",
            step,
            reward__mean=value,
            staleness__mean=value,
            staleness__max=value,
            accuracy__final=value,
        )
        small_run.version("solver", step, loss=value, wait_fraction=value, **{"kl/mean": value})
    seen = json.loads(status(small_run.store, "tiny-1").model_dump_json())
    solver = seen["policies"]["solver"]
    assert (solver["reward_mean"], solver["accuracy"], solver["staleness_max"]) == (
        None,
        None,
        None,
    )
    assert "Reward per policy" in render_report(small_run.run, "tiny-1")
