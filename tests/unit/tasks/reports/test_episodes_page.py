"""The page of all episodes: what its files contain, and which folders it may replace."""

import json
import os
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage import layout
from storage.errors import ConfigError
from storage.records.rollouts import FailureKind, Group, Prompt
from storage.run import batches, shards
from tasks.episodes.selection import Selection
from tasks.reports import episodes_page
from tasks.reports.episodes_page import write_page
from tests.support.runs import builders
from tests.support.runs.small_run import RUN_ID, SmallRun

EVIL = "</script><script>alert(1)</script>\x1b[2J\u202e\u2028"


def call_of(file: Path) -> tuple[str, int, Any]:
    """Return function, number and value of a data file; fails for anything but one call."""
    match = re.fullmatch(r"astraflow\.(\w+)\((\d+),(.*)\);\n", file.read_text("ascii"), re.DOTALL)
    assert match is not None
    return match[1], int(match[2]), json.loads(match[3])


def facts_of(folder: Path) -> dict[str, Any]:
    page = (folder / "index.html").read_text(encoding="utf-8")
    match = re.search(r'<script type="application/json" id="facts">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    loaded: dict[str, Any] = json.loads(match[1])
    return loaded


def small(name: str) -> SmallRun:
    """Order 0 with a trained and a filtered sequence, order 1 with a failed episode."""
    run = SmallRun(name)
    answer = builders.sequence(version=3, logprob=-0.25)
    plays = (
        builders.episode(replace(answer, versions=np.array([-1, -1, 3, 3, 4], np.int32))),
        builders.episode(answer, reward=np.nan, luck=0.5),
    )
    shards.create(run.run, builders.shard(Group(Prompt("p/0", {"question": EVIL}), plays)))
    failed = builders.episode(error=f"ValueError: {EVIL}", failure_kind=FailureKind.TOOL)
    shards.create(run.run, builders.shard(builders.group(failed), order=1))
    entry = builders.entry(builders.FIRST._replace(episode=1), "filtered", EVIL)
    batches.create(run.run, builders.batch(builders.row(advantage=0.5), ledger=(entry,)))
    return run


def test_the_list_has_every_episode_the_newest_order_first(tmp_path: Path) -> None:
    run = small("page-list")
    assert write_page(run.run, RUN_ID, Selection(), tmp_path / "page") == 3
    facts = facts_of(tmp_path / "page")
    assert (facts["run"], facts["episodes"], facts["chunks"]) == (RUN_ID, 3, 1)
    assert facts["shards"] == f"{run.run.url}/shards/"
    function, number, rows = call_of(tmp_path / "page/data/episodes-0000.js")
    assert (function, number) == ("chunk", 0)
    assert [row[:3] for row in rows] == [[1, 0, 0], [0, 0, 0], [0, 0, 1]]
    failed, trained, filtered = rows
    assert facts["failures"][failed[6]] == "tool"
    assert failed[7] == []
    assert (trained[3], trained[5], facts["regions"][trained[4]]) == ("p/0", 1.0, "us-east")
    ((policy, low, high, fate, batch, _, replays, place),) = trained[7]
    assert (facts["policies"][policy], facts["fates"][fate]) == ("solver", "trained")
    assert (low, high, batch, replays, place) == (3, 4, 1, [], 0)
    assert filtered[5] is None
    assert facts["reasons"][filtered[7][0][5]] == "</script><script>alert(1)</script>[2J"


def test_tokens_of_one_episode_are_in_memory_at_a_time(tmp_path: Path) -> None:
    answer = builders.sequence(answer=[40] * 3000)
    turns = np.where(np.arange(len(answer.tokens)) % 2, answer.owners, -1).astype(np.int8)
    answer = replace(answer, owners=turns, loss_mask=turns >= 0)
    answer = replace(
        answer,
        versions=np.where(turns >= 0, answer.versions, -1).astype(np.int32),
        logprobs=np.where(turns >= 0, answer.logprobs, 0).astype(np.float32),
    )
    peaks = []
    for number in (1, 8):
        run = SmallRun(f"page-memory-{number}").run
        shards.create(run, builders.shard(builders.group(*[builders.episode(answer)] * number)))
        tracemalloc.start()
        write_page(run, RUN_ID, Selection(), tmp_path / f"page-{number}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0]


def test_a_shard_file_has_tokens_with_owner_mask_advantage_and_probability(tmp_path: Path) -> None:
    write_page(small("page-tokens").run, RUN_ID, Selection(), tmp_path / "page")
    function, number, data = call_of(tmp_path / "page/data/shard-0.js")
    assert (function, number) == ("shard", 0)
    (turn,) = data["episodes"]["0.0"]["turns"]
    assert turn["pieces"] == [
        [-1, -1, 0, None, ["⟨11⟩⟨12⟩"], []],
        [0, 3, 1, 0.5, ["⟨40⟩", "⟨41⟩"], [-0.25, -0.25]],
        [0, 4, 1, 0.5, ["⟨2⟩"], [-0.25]],
    ]
    (other,) = data["episodes"]["0.1"]["turns"]
    assert other["pieces"][1][:4] == [0, 3, 1, None]
    assert data["episodes"]["0.1"]["metrics"] == [["luck", "0.5"]]


def test_stored_text_is_neither_markup_nor_invisible(tmp_path: Path) -> None:
    run = small("page-evil")
    run.run.put(layout.shard(7), b"damage")
    write_page(run.run, RUN_ID, Selection(), tmp_path / "page")
    page = (tmp_path / "page/index.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert "skipped: shards/00000007.arrow" in page
    data = call_of(tmp_path / "page/data/shard-0.js")[2]
    escaped = r"</script><script>alert(1)</script>\x1b[2J\u202e\u2028"
    assert data["prompts"]["0"] == [["question", escaped]]
    error = call_of(tmp_path / "page/data/shard-1.js")[2]["episodes"]["0.0"]["error"]
    assert error == f"ValueError: {escaped}"
    outside = re.findall(r'(?:src|href)="(?!#)[^"]*"|url\(|@import|https?://', page)
    assert outside == []


def test_only_selected_episodes_are_in_the_page(tmp_path: Path) -> None:
    selection = Selection.parse(fate="trained")
    assert write_page(small("page-some").run, RUN_ID, selection, tmp_path / "page") == 1
    assert sorted(os.listdir(tmp_path / "page/data")) == ["episodes-0000.js", "shard-0.js"]
    assert list(call_of(tmp_path / "page/data/shard-0.js")[2]["episodes"]) == ["0.0"]


def test_the_list_is_cut_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes_page, "CHUNK_EPISODES", 3)
    run = SmallRun("page-chunks")
    for number in range(4):
        run.shard(number)
    assert write_page(run.run, RUN_ID, Selection(), tmp_path / "page") == 8
    chunks = [call_of(tmp_path / f"page/data/episodes-{number:04d}.js")[2] for number in range(3)]
    assert [len(chunk) for chunk in chunks] == [3, 3, 2]
    ids = [tuple(row[:3]) for chunk in chunks for row in chunk]
    assert ids == [(order, 0, sample) for order in (3, 2, 1, 0) for sample in (0, 1)]
    assert facts_of(tmp_path / "page")["chunks"] == 3


def test_the_middle_of_a_long_sequence_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episodes_page, "TOKENS_PER_SEQUENCE_MAX", 4)
    run = SmallRun("page-long")
    long = builders.sequence(prompt=(11,), answer=(1, 2, 3, 4, 5, 6, 7))
    shards.create(run.run, builders.shard(builders.group(builders.episode(long))))
    write_page(run.run, RUN_ID, Selection(), tmp_path / "page")
    (turn,) = call_of(tmp_path / "page/data/shard-0.js")[2]["episodes"]["0.0"]["turns"]
    assert [piece[4] if len(piece) > 1 else piece for piece in turn["pieces"]] == [
        ["⟨11⟩"],
        ["⟨1⟩"],
        [4],
        ["⟨6⟩", "⟨7⟩"],
    ]


def test_an_earlier_page_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "page"
    run = small("page-again")
    write_page(run.run, RUN_ID, Selection(), folder)
    assert write_page(run.run, RUN_ID, Selection.parse(failure="any"), folder) == 1
    assert sorted(os.listdir(folder / "data")) == ["episodes-0000.js", "shard-1.js"]
    assert os.listdir(tmp_path) == ["page"]


@pytest.mark.parametrize("name", ["notes.txt", "index.html", "data"])
def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match="has files that `astraflow episodes` has not written"):
        write_page(small(f"page-foreign-{name}").run, RUN_ID, Selection(), tmp_path)
    assert (tmp_path / name).read_text() == "mine"
    assert os.listdir(tmp_path) == [name]


def test_a_file_added_to_an_earlier_page_is_not_deleted(tmp_path: Path) -> None:
    folder, run = tmp_path / "page", small("page-added")
    write_page(run.run, RUN_ID, Selection(), folder)
    for added in (folder / "notes.txt", folder / "data/notes.js"):
        added.write_text("mine")
        with pytest.raises(ConfigError, match="name a new or an empty folder"):
            write_page(run.run, RUN_ID, Selection(), folder)
        assert added.read_text() == "mine"
        added.unlink()
    write_page(run.run, RUN_ID, Selection(), folder)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page").write_text("mine")
    with pytest.raises(ConfigError, match="cannot be read"):
        write_page(small("page-file").run, RUN_ID, Selection(), tmp_path / "page")
    with pytest.raises(ConfigError, match="page/inside cannot be"):
        write_page(small("page-inside").run, RUN_ID, Selection(), tmp_path / "page/inside")


def test_a_run_without_episodes_has_an_empty_page(tmp_path: Path) -> None:
    assert write_page(SmallRun("page-empty").run, RUN_ID, Selection(), tmp_path / "page") == 0
    assert facts_of(tmp_path / "page")["chunks"] == 0
