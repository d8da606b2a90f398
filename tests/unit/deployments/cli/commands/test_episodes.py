"""`astraflow episodes`: the list with its conditions, one episode, a prompt's groups, JSON."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from typer.testing import CliRunner, Result

from deployments.cli.app import app
from storage import layout
from storage.records.batches import SequenceKey
from storage.records.rollouts import FailureKind, Group, Prompt
from storage.run import batches, runs, shards
from storage.store.object_store import ObjectStore, open_store
from storage.weights import publisher
from tasks.recipes.loader import load
from tasks.terminal_text import LINE_MAX
from tests.support.runs import builders
from tests.support.runs.small_run import RECIPE, TENSORS

EVIL = "\x1b[2Jevil\u202e"
WORDS = {"7": 11, "+": 12, EVIL: 40, "1": 41, "\n": 2}


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """Three orders of one prompt with two samples each, by versions 0, 1 and 2; sample 0 of order 0
    is trained in batch 1, the third sample of order 2 has failed.
    """
    monkeypatch.setenv("ASTRAFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ASTRAFLOW_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("COLUMNS", "200")
    store = open_store(str(tmp_path / "store"))
    run = runs.create_run(store, "tiny-1", load(RECIPE).model_dump(mode="json"))
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="1")).to_str().encode()
    publisher.publish(run, "solver", 0, TENSORS, extra_files={"tokenizer.json": tokenizer})
    for order in range(3):
        plays = [
            builders.episode(builders.sequence(version=order, reward=reward), reward=reward)
            for reward in (1.0, 0.5 * order)
        ]
        if order == 2:
            plays.append(
                builders.episode(
                    error=f"ValueError: {EVIL}", failure_kind=FailureKind.TOOL, reward=0.0
                )
            )
        prompt = Prompt("sums/1", {"question": f"7+{EVIL}", "answer": "1"})
        group = Group(prompt, tuple(plays))
        weights = {"solver": {order: "sha256:00"}}
        shards.create(run, builders.shard(group, order=order, weights=weights))
    row = builders.row(SequenceKey(0, 0, 0, 0), advantage=0.75)
    entry = builders.entry(SequenceKey(0, 0, 1, 0))
    batches.create(run, builders.batch(row, ledger=(entry,)))
    return run


def call(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["episodes", *arguments])
    assert result.exit_code == code, result.output
    return result


def ids(*arguments: str) -> list[str]:
    """First column of the list."""
    return [line.split()[0] for line in call(*arguments).stdout.splitlines()[1:]]


def test_all_episodes_are_listed_the_newest_order_first() -> None:
    assert ids() == ["2.0.0", "2.0.1", "2.0.2", "1.0.0", "1.0.1", "0.0.0", "0.0.1"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--reward", "<0.5"], ["2.0.2", "0.0.1"]),
        (["--version", "1-2", "--reward", "1"], ["2.0.0", "2.0.1", "1.0.0"]),
        (["--failure", "any"], ["2.0.2"]),
        (["--failure", "tool", "--region", "us-east"], ["2.0.2"]),
        (["--fate", "trained"], ["0.0.0"]),
        (["--fate", "trained:1", "--policy", "solver"], ["0.0.0"]),
        (["--fate", "filtered:zero_advantage"], ["0.0.1"]),
        (["--fate", "waiting", "--prompt", "sums/*", "--version", "1"], ["1.0.0", "1.0.1"]),
    ],
    ids=str,
)
def test_conditions_select_episodes(options: list[str], expected: list[str]) -> None:
    assert ids(*options) == expected


def test_the_list_is_limited_and_says_so() -> None:
    lines = call("--limit", "2").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["2.0.0", "2.0.1"]
    assert lines[3] == "more than these 2 meet the conditions; --limit 0 lists all"
    assert len(ids("--limit", "7")) == len(ids("--limit", "0")) == 7


def test_no_match_is_said() -> None:
    assert call("--region", "mars").stdout.strip() == "no episode of this run meets the conditions"
    assert "no episode of the prompt 'x' meets" in call("--prompt", "x").stdout


def test_a_row_names_versions_and_fate() -> None:
    lines = call("--version", "0").stdout.splitlines()
    assert "solver v0 trained in batch 1" in lines[1]
    assert "solver v0 filtered: zero_advantage" in lines[2]
    assert "solver v1 waiting: not_ingested" in call("--version", "1").stdout


def test_an_episode_has_its_tokens_with_owner_probability_mask_and_advantage(
    run: ObjectStore,
) -> None:
    output = call("--episode", "0.0.0").stdout
    rows = [line.split() for line in output.splitlines()]
    assert ["0–1", '"7+"', "–"] in rows
    escaped = r'"\x1b[2Jevil\u202e"'
    assert ["2", escaped, "solver", "40", "0", "0.607", "yes", "+0.750"] in rows
    assert ["4", r'"\n"', "solver", "2", "0", "0.607", "yes", "+0.750"] in rows
    assert f"{run.url}/shards/00000000.arrow" in output
    assert r"7+\x1b[2Jevil\u202e" in output  # the question
    assert "\x1b" not in output
    assert "\u202e" not in output


def test_a_token_that_was_not_trained_on_has_no_advantage() -> None:
    rows = [line.split() for line in call("--episode", "0.0.1").stdout.splitlines()]
    assert ["3", '"1"', "solver", "41", "0", "0.607", "yes", "–"] in rows


def test_a_failed_episode_shows_its_error() -> None:
    assert r"tool: ValueError: \x1b[2Jevil\u202e" in call("--episode", "2.0.2").stdout


def test_the_groups_of_a_prompt_are_shown_side_by_side() -> None:
    output = call("--prompt", "sums/1").stdout
    header = next(line for line in output.splitlines() if "order 0" in line)
    assert header.split() == ["order", "0", "order", "1", "order", "2"]
    assert "solver v0   " in output
    means = next(line for line in output.splitlines() if "mean reward" in line)
    assert [part.strip() for part in means.split("mean reward")[1:]] == ["0.5", "0.75", "1"]
    (first,) = [line for line in output.splitlines() if line.strip().startswith("0 ")]
    assert first.split() == ["0", "1", "trained", "1", "waiting", "1", "waiting"]
    assert r"\x1b[2Jevil\u202e1⏎" in output


def test_of_many_groups_an_even_sample_is_shown(run: ObjectStore) -> None:
    for order in range(3, 20):
        shards.create(run, replace(shards.read(run, 1), order=order))
    output = call("--prompt", "sums/1").stdout
    header = next(line for line in output.splitlines() if "order 0" in line)
    assert header.split()[1::2] == ["0", "4", "8", "11", "15", "19"]
    assert "14 more orders have this prompt" in output


def test_json_has_every_sequence_with_its_fate() -> None:
    (trained,) = json.loads(call("--json", "--fate", "trained").stdout)
    assert trained == {
        "id": "0.0.0",
        "prompt": "sums/1",
        "region": "us-east",
        "worker": "rollout-us-east-0",
        "reward": 1.0,
        "failure": None,
        "seconds": 0.25,
        "sequences": [
            {
                "sequence": 0,
                "name": "attempt",
                "policy": "solver",
                "tokens": 3,
                "min_version": 0,
                "max_version": 0,
                "reward": 1.0,
                "fate": "trained",
                "reason": None,
                "batch": 1,
                "replays": [],
            }
        ],
    }
    assert len(json.loads(call("--json", "--prompt", "sums/1", "--limit", "4").stdout)) == 4


def test_json_of_an_episode_has_its_tokens() -> None:
    described = json.loads(call("--json", "--episode", "0.0.0").stdout)
    assert described["fields"] == {"question": f"7+{EVIL}", "answer": "1"}
    assert described["metrics"] == {}
    (turn,) = described["turns"]
    assert turn["tokens"][0] == {"text": "7", "id": 11, "owner": None}
    assert turn["tokens"][3] == {
        "text": "1",
        "id": 41,
        "owner": "solver",
        "version": 0,
        "logprob": -0.5,
        "mask": True,
        "advantage": 0.75,
    }


def test_a_very_long_prompt_id_is_cut_in_json(run: ObjectStore) -> None:
    group = builders.group(prompt_id="x" * 100_000)
    shards.create(run, builders.shard(group, order=9))
    listed = json.loads(call("--json", "--prompt", "x*").stdout)
    assert [each["prompt"] for each in listed] == ["x" * LINE_MAX] * 2


def test_numbers_that_are_not_finite_are_null_in_json(run: ObjectStore) -> None:
    sequence = builders.sequence(reward=np.nan, logprob=-np.inf)
    play = builders.episode(sequence, reward=np.inf)
    shards.create(run, builders.shard(builders.group(play), order=9))
    described = json.loads(call("--json", "--episode", "9.0.0").stdout)
    assert described["reward"] is None
    assert described["sequences"][0]["reward"] is None
    assert described["turns"][0]["tokens"][3]["logprob"] is None
    assert call("--episode", "9.0.0").stdout


def test_names_of_columns_and_metrics_neither_begin_a_line_nor_replace_the_true_values(
    run: ObjectStore,
) -> None:
    fields = {"a\nFORGED": "v", "episode": "9.9.9", "prompt": "zzz", "seconds": "q"}
    play = replace(builders.episode(reward=0.5), metrics={"reward": 7.0, "b\nFORGED": 1.0})
    group = builders.group(play, prompt_id="sums/9")
    prompt = replace(group.prompt, fields=fields)
    shards.create(run, builders.shard(replace(group, prompt=prompt), order=9))
    one = call("--episode", "9.0.0").stdout
    shown = [line.split()[:2] for line in one.splitlines() if line.strip()]
    for name, true, other in (
        ("episode", "9.0.0", "9.9.9"),
        ("prompt", "sums/9", "zzz"),
        ("reward", "0.5", "7"),
    ):
        assert shown.index([name, true]) < shown.index([name, other])
    for output in (one, call("--prompt", "sums/9").stdout):
        assert "a FORGED" in output
        assert not [line for line in output.splitlines() if line.startswith("FORGED")]


def test_damaged_shards_are_named_and_the_others_are_listed(run: ObjectStore) -> None:
    run.put(layout.shard(1), b"damage")
    result = call()
    assert "1.0.0" not in result.stdout
    assert "2.0.0" in result.stdout
    assert "skipped, because it cannot be read: shards/00000001.arrow" in result.stderr
    assert "the shard of order 1 cannot be read" in call("--episode", "1.0.0", code=2).stderr


def test_many_damaged_shards_are_counted(run: ObjectStore) -> None:
    for number in range(10, 18):
        run.put(layout.shard(number), b"damage")
    result = call()
    assert result.stderr.count("cannot be read") == 5
    assert "and 3 more objects; `astraflow verify` lists what is damaged" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--episode", "7"], "--episode '7' is no episode; write order, prompt and sample"),
        (["--episode", "9.0.0"], "has no readable shard of order 9"),
        (["--episode", "1.0.5"], "order 1 has no sample 5 of a prompt 0; it has 1 prompts and 2"),
        (["--episode", "1.0.0", "--fate", "trained"], "give it without conditions"),
        (["--fate", "lost"], "--fate 'lost' is none of trained,"),
        (["--failure", "bad"], "--failure 'bad' is none of model,"),
        (["--limit", "9" * 20], "'--limit'"),
        (["--reward", "high"], "--reward 'high' is no condition on a number"),
    ],
    ids=str,
)
def test_what_cannot_be_shown_is_an_error_with_advice(options: list[str], message: str) -> None:
    assert message in " ".join(call(*options, code=2).stderr.split())


def test_the_page_is_written_into_the_named_folder(tmp_path: Path) -> None:
    folder = tmp_path / "page"
    result = call("--page", str(folder), "--fate", "trained")
    assert result.stdout.strip() == f"1 episodes are in {folder}/index.html"
    assert (folder / "index.html").is_file()
    assert "give it without" in call("--page", str(folder), "--json", code=2).stderr
    assert "give it without" in call("--page", str(folder), "--episode", "0.0.0", code=2).stderr
