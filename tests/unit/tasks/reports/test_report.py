import re
import time
from html.parser import HTMLParser

import pytest

from storage import layout
from storage.errors import TransientError
from storage.records.control import ClosingStep, ServiceState
from storage.run import shards
from storage.store.object_store import ObjectStore
from tasks.reports import figures, page
from tasks.reports.page import REFRESH_S, render_report, watch, write_report
from tasks.reports.words import WORDS, ScoreNames
from tests.support.checkout import ROOT
from tests.support.runs import builders
from tests.support.runs.small_run import RUN_ID, SmallRun

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Balanced(HTMLParser):
    """Collects text and fails on tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def text_of(page: str) -> str:
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    return " ".join(" ".join(parser.words).split())


def test_a_report_shows_episodes_before_and_after_training() -> None:
    small_run = SmallRun("report-learned")
    for policy in ("solver", "verifier"):
        small_run.version(policy, 0)
        for step in range(1, 5):
            small_run.batch(
                policy, step, reward__mean=0.2 * step, staleness__mean=0.5, staleness__max=1.0
            )
            small_run.version(policy, step, loss=0.1, grad_norm=1.0)
    small_run.order(0)
    small_run.shard(0)
    small_run.evaluation(0, [1, 0, 0, 0], [1, 1, 0, 0])
    small_run.evaluation(4, [1, 1, 1, 0], [1, 1, 1, 1])
    small_run.beat(
        "trainer",
        "trainer-solver",
        small_run.created_s,
        seconds={"step": 3.0, "wait": 1.0, "cpu": 3.0},
    )
    small_run.stop("completed", "all policies reached version 4", small_run.created_s + 75)
    page = write_report(small_run.run, RUN_ID)
    text = text_of(page)
    assert small_run.run.get(layout.REPORT).decode() == page
    assert "25.0% → 75.0%" in text
    assert "+50.0 points, 4 held-out problems of chained_addition" in text
    assert "50.0% → 100.0%" in text
    assert "4 / 4" in text
    assert "1 min 15 s" in text
    assert "trainer-solver, wait: 1 seconds (25%)" in text
    assert "order 0: 2 episodes, 6 tokens in 1.5 s, solver ≤ v0" in text
    assert "solver filtered: zero_advantage 4 30.8 %" in text
    assert "⟨40⟩" in text


TEAM = """\
name: tiny
steps: 4
policies:
  critic:
    model: {tiny: {}}
    batch_size: 2
  writer:
    model: {tiny: {}}
    batch_size: 2
data:
  prompts: {builtin: chained_addition}
rollout:
  workflow: {name: actor_and_verify, roles: {solver: writer, verifier: critic}}
"""


def played_by_writer(name: str, recipe: str) -> SmallRun:
    small_run = SmallRun(name, recipe)
    policies = tuple(small_run.config.policies)
    for policy in policies:
        small_run.version(policy, 0)
    first = builders.sequence(policy="writer", policies=policies)
    last = builders.sequence(policy=policies[0], policies=policies, starts_episode=False)
    small_run.order(0)
    group = builders.group(builders.episode(first, last))
    shards.create(small_run.run, builders.shard(group, weights={"writer": {0: "sha256:00"}}))
    small_run.evaluation(0, [1, 0, 0, 0], [1, 1, 1, 0])
    return small_run


def test_accuracies_are_named_after_the_policies_of_the_run() -> None:
    small_run = played_by_writer("report-names", TEAM)
    page = write_report(small_run.run, RUN_ID)
    text = text_of(page)
    for name in ("writer alone", "team (actor_and_verify)"):
        assert text.count(name) > 1  # a card, and a line of the figure
    assert "solver alone" not in text


def test_an_accuracy_has_the_color_of_its_policy_or_of_the_team() -> None:
    colors = figures.policy_colors(["critic", "writer"])
    names = ScoreNames(["critic", "writer"], "writer")
    assert figures.score_color("single_turn", colors, names) == colors["writer"] != colors["critic"]
    assert figures.score_color("actor_and_verify", colors, names) == figures.TEAM_COLOR


def test_every_policy_of_a_large_team_has_a_color() -> None:
    policies = [f"p{number}" for number in range(100)]
    colors = figures.policy_colors(policies)
    assert list(colors) == policies
    assert figures.TEAM_COLOR not in colors.values()


def test_before_the_first_episode_the_answering_policy_is_not_named() -> None:
    small_run = SmallRun("report-unknown", TEAM)
    small_run.evaluation(0, [1, 0], [1, 1])
    text = text_of(write_report(small_run.run, RUN_ID))
    assert text.count("first attempts") > 1
    assert "alone" not in text


def test_the_accuracy_of_a_single_policy_has_its_name() -> None:
    recipe = TEAM.replace("  critic:\n    model: {tiny: {}}\n    batch_size: 2\n", "").replace(
        "{name: actor_and_verify, roles: {solver: writer, verifier: critic}}",
        "{name: single_turn, roles: {solver: writer}}",
    )
    small_run = played_by_writer("report-single", recipe)
    text = text_of(write_report(small_run.run, RUN_ID))
    assert "writer (actor_and_verify)" in text  # the workflow that the evaluation names
    assert "alone" not in text


def test_the_page_loads_no_external_resource() -> None:
    page = write_report(SmallRun("report-self-contained").run, RUN_ID)
    outside = re.findall(
        r'(?:src|href)="(?!#)[^"]*"|url\(|@import|https?://(?!www\.w3\.org/2000/svg)', page
    )
    assert outside == []


def test_a_run_before_its_first_step_has_a_report() -> None:
    text = text_of(write_report(SmallRun("report-empty").run, RUN_ID))
    assert "no reward yet" in text
    assert "No episode has been played yet." in text
    assert "0 / 4" in text


def test_a_report_of_a_damaged_cancelled_run_shows_the_readable_objects() -> None:
    small_run = SmallRun("report-damaged")
    small_run.version("solver", 0)
    small_run.batch("solver", 1, reward__mean=0.5)
    small_run.order(0)
    small_run.order(1)
    small_run.shard(0)
    for key in (
        "batches/verifier/00000001.arrow",
        "shards/00000001.arrow",
        "evals/solver-00000000.arrow",
    ):
        small_run.run.put(key, b"damage")
    small_run.stop("cancelled", "the flow run was cancelled", small_run.created_s + 5)
    text = text_of(write_report(small_run.run, RUN_ID))
    assert "cancelled" in text
    assert "the flow run was cancelled" in text


def test_output_of_models_is_never_markup() -> None:
    small_run = SmallRun("report-escaped")
    small_run.order(0)
    play = builders.episode(error="ValueError: <script>alert(1)</script>")
    shards.create(small_run.run, builders.shard(builders.group(play)))
    page = write_report(small_run.run, RUN_ID)
    assert "<script>alert" not in page
    assert "ValueError: <script>alert(1)</script>" in text_of(page)


def test_the_ledger_of_the_page_counts_shards_that_no_batch_ingested() -> None:
    small_run = SmallRun("report-ledger")
    small_run.batch("solver", 1)
    small_run.shard(0)
    small_run.shard(1)
    text = text_of(render_report(small_run.run, RUN_ID))
    assert "solver waiting 3 50.0 %" in text  # one after the batch, two of shard 1


def test_the_page_of_a_run_that_goes_on_reloads_itself_and_that_of_an_ended_run_does_not() -> None:
    small_run = SmallRun("report-live")
    small_run.beat("supervisor", "supervisor", time.time())
    live = render_report(small_run.run, RUN_ID)
    assert f'<meta http-equiv="refresh" content="{REFRESH_S}">' in live
    assert "location.reload()" in live
    small_run.stop("completed", "all policies reached version 4", time.time())
    small_run.beat("supervisor", "supervisor", time.time(), state=ServiceState.DONE)
    ended = render_report(small_run.run, RUN_ID)
    assert "http-equiv" not in ended
    assert "location.reload()" not in ended


def test_a_watched_report_is_written_until_the_run_and_its_closing_steps_have_ended() -> None:
    small_run = SmallRun("report-watched")
    small_run.beat("supervisor", "supervisor", time.time())
    pages: list[str] = []

    def go_on(seconds: float) -> None:
        assert seconds == REFRESH_S
        if len(pages) == 1:
            small_run.shard(0)
            small_run.beat("supervisor", "supervisor", time.time())
        elif len(pages) == 2:
            small_run.stop("completed", "all done", time.time())
            small_run.beat("supervisor", "supervisor", time.time(), state=ClosingStep.VERIFYING)

    def written(page: str) -> None:
        pages.append(page)
        if len(pages) == 3:  # the page is not of the end yet: another one must follow
            small_run.beat("supervisor", "supervisor", time.time(), state=ServiceState.DONE)

    watch(small_run.run, RUN_ID, go_on, written)
    assert len(pages) == 4
    assert ["location.reload()" in page for page in pages] == [True, True, True, False]
    assert ["order 0 ·" in page for page in pages] == [False, True, True, True]
    assert small_run.run.get(layout.REPORT).decode() == pages[-1]


def test_a_watched_report_outlives_a_store_that_does_not_answer_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_run = SmallRun("report-away")
    small_run.stop("completed", "all done", time.time())
    small_run.beat("supervisor", "supervisor", time.time(), state=ServiceState.DONE)
    store_report, waits, pages = page.store_report, list[float](), list[str]()

    def away_at_first(run: ObjectStore, body: str) -> None:
        if not waits:
            raise TransientError("the store is away")
        store_report(run, body)

    monkeypatch.setattr(page, "store_report", away_at_first)
    watch(small_run.run, RUN_ID, waits.append, pages.append)
    assert (waits, len(pages)) == ([REFRESH_S], 1)


def test_probabilities_can_be_read_without_a_mouse() -> None:
    small_run = SmallRun("report-touch")
    small_run.shard(0)
    page = render_report(small_run.run, RUN_ID)
    assert '<details class="probabilities">' in page
    assert 'addEventListener("click"' in page
    assert "p ≥ 0.9 p ≥ 0.5 p ≥ 0.1 p < 0.1" in text_of(page)


def test_the_page_explains_its_words_as_the_glossary_does() -> None:
    text = text_of(render_report(SmallRun("report-words").run, RUN_ID))
    assert "expired of a sequence: too stale" in text
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", (ROOT / "docs/glossary.md").read_text(), re.M)
    glossary = {word: meaning.replace("*", "") for word, meaning in rows}
    shared = WORDS.keys() & glossary.keys()
    assert len(shared) > 12
    assert {word: WORDS[word] for word in shared} == {word: glossary[word] for word in shared}
