"""The report of a run: one self-contained HTML page, made from the store at any time of the run.

    status, training curves, shard log, ─▶ figures ─▶ report.html.j2 ─▶ report.html
    evaluations, episode samples

This module collects the data and formats the texts; `figures.py` selects the figures, `plots.py`
draws them, the template has the layout. The page of a run that goes on reloads itself; `watch`
writes it again and again.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from storage import layout
from storage.coordination import heartbeats
from storage.errors import TransientError
from storage.records.control import Heartbeat
from storage.run import evaluations
from storage.run.evaluations import Evaluation
from storage.run.fates import BatchFates
from storage.store.object_store import ObjectStore
from tasks.monitoring.budget_status import budget_words
from tasks.monitoring.status import status_of
from tasks.monitoring.status_schema import Status, continues
from tasks.monitoring.training_curves import History, read_history
from tasks.recipes.run_config import RunConfig
from tasks.recipes.stored_config import flatten, read_config
from tasks.reports import figures, ledgers, mismatch
from tasks.reports.episode_samples import EpisodeSample, answering_policy, sample_episodes
from tasks.reports.figures import Figure
from tasks.reports.shard_log import ShardLog, read_shard_log
from tasks.reports.templates import clock_time, duration, template
from tasks.reports.words import WORDS, ScoreNames

log = logging.getLogger(__name__)

SURPRISE_NATS = (0.1, 0.7, 2.3)
"""Bounds of −log p between the four shades of a token: p = 0.9, 0.5, 0.1."""
SHADES = ("p ≥ 0.9", "p ≥ 0.5", "p ≥ 0.1", "p < 0.1")
REFRESH_S = 15
"""Time between two pages of a run that goes on, and between two reloads of its page."""


@dataclass(frozen=True)
class Card:
    """A headline number.

    Example: `Card("tokens", "1,204,224", "sampled; 803,112 trained on")`.
    """

    label: str
    value: str
    note: str
    color: int | None = None


@dataclass(frozen=True)
class Section:
    id: str
    title: str
    figures: Sequence[Figure]


@dataclass
class SeenObjects:
    """What earlier pages of the same run have read of objects that never change."""

    histories: Mapping[str, History] = field(default_factory=dict)
    fates: Mapping[str, Mapping[int, BatchFates]] = field(default_factory=dict)
    log: ShardLog = field(default_factory=lambda: ShardLog(()))


def write_report(run: ObjectStore, run_id: str) -> str:
    """Make the page, store it and return it."""
    page = render_report(run, run_id)
    store_report(run, page)
    return page


def watch(
    run: ObjectStore, run_id: str, wait: Callable[[float], None], written: Callable[[str], None]
) -> None:
    """Write the report every REFRESH_S seconds until the run and its closing steps have ended.

    While the store does not answer, the last page stays.

    Args:
        wait: waits that number of seconds.
        written: called with every page after it is stored.
    """
    seen = SeenObjects()
    while True:
        try:
            going_on = goes_on(status_of(run))
            page = render_report(run, run_id, seen)
            store_report(run, page)
            written(page)
            if not going_on:
                return
        except TransientError as error:
            log.warning("the report is not up to date: %s", error)
        wait(REFRESH_S)


def goes_on(status: Status) -> bool:
    """Return whether a later report of the run will differ."""
    return status.state in ("starting", "running") or status.closing is not None


def store_report(run: ObjectStore, page: str) -> None:
    """Store the page as the run's `report.html`; replaces an older page."""
    run.put(layout.REPORT, page.encode())


def render_report(run: ObjectStore, run_id: str, seen: SeenObjects | None = None) -> str:
    """Make the page as text. A run of any state has one, also before its first step.

    Objects in `seen` are not read again; those that were read are added to it.
    """
    seen = seen or SeenObjects()
    config = read_config(run)
    status = status_of(run)
    beats = heartbeats.read_all(run).beats
    colors = figures.policy_colors(config.policies)
    histories = _read_histories(run, status, seen)
    # Batches before shards: the shards that a batch has ingested exist when it does.
    seen.fates = {
        history.policy: ledgers.read_batch_fates(run, history, seen.fates.get(history.policy, {}))
        for history in histories
    }
    seen.log = log = read_shard_log(run, seen.log)
    orders = [shard.order for shard in log.played]
    episodes = sample_episodes(run, orders, next(iter(config.policies)))
    names = ScoreNames(list(config.policies), answering_policy(episodes))
    page: str = template("report.html.j2").render(
        run_id=run_id,
        status=status,
        problems=[*status.problems, *ledgers.left_out(status, histories, seen.fates, log)],
        budget=budget_words(status.budget),
        started=clock_time(status.started),
        made=clock_time(time.time()),
        duration=duration(status.elapsed_s),
        cards=[*_cards(status, log, names, colors), *_mismatch_card(histories, config)],
        sections=_sections(
            config, histories, evaluations.read_all(run).readable, log, beats, status, names
        ),
        ledger=ledgers.all_rows(seen.fates, log),
        sampled=any(len(history.steps) < history.num_steps for history in histories),
        members=status.members,
        beats={beat.id: beat for beat in beats},
        episodes=episodes,
        episode_count=_counts(episodes),
        colors=colors,
        settings=sorted(flatten(config.model_dump(mode="json", exclude_none=True)).items()),
        surprise=_surprise,
        shades=SHADES,
        words=WORDS,
        refresh_s=REFRESH_S if goes_on(status) else 0,
    )
    return page


def _read_histories(run: ObjectStore, status: Status, seen: SeenObjects) -> list[History]:
    """Read each policy's history, without the steps that were seen completely."""
    histories = []
    for policy, progress in status.policies.items():
        earlier = seen.histories.get(policy)
        known = {step.number: step for step in earlier.steps} if earlier else {}
        newest = max(progress.version or 0, progress.batches)
        histories.append(read_history(run, policy, newest, known=known))
    seen.histories = {history.policy: history for history in histories}
    return histories


def _sections(
    config: RunConfig, histories: Sequence[History], evaluated: Sequence[Evaluation], log: ShardLog,
    beats: Sequence[Heartbeat], status: Status, names: ScoreNames,
) -> list[Section]:  # fmt: skip
    colors = figures.policy_colors(config.policies)
    start_s = min([shard.started_s for shard in log.played], default=status.started)
    return [
        Section("learning", "Learning", figures.learning(histories, evaluated, colors, names)),
        Section(
            "staleness",
            "Staleness",
            figures.staleness(histories, config.data.max_staleness, colors),
        ),
        Section("flow", "Flow", figures.flow(histories, log, start_s, colors)),
        Section(
            "time",
            "Time",
            [figures.wall_clock(beats), figures.worker_timeline(log, histories, start_s, colors)],
        ),
        Section(
            "health",
            "Training health",
            [
                *figures.health(histories, colors),
                *mismatch.figures(histories, config.rollout.engine.name, colors),
            ],
        ),
    ]


def _cards(
    status: Status, log: ShardLog, names: ScoreNames, colors: Mapping[str, int]
) -> list[Card]:
    cards = []
    for workflow in dict.fromkeys(score.workflow for score in status.evals):
        scores = [score for score in status.evals if score.workflow == workflow]
        first, last = scores[0], scores[-1]
        gain = f"{(last.accuracy - first.accuracy) * 100:+.1f} points, " if len(scores) > 1 else ""
        cards.append(
            Card(
                names.of(workflow),
                f"{first.accuracy:.1%} → {last.accuracy:.1%}"
                if len(scores) > 1
                else f"{first.accuracy:.1%}",
                f"{gain}{last.n} held-out problems of {last.dataset}",
                figures.score_color(workflow, colors, names),
            )
        )
    if words := continues(status.origins).removeprefix("continues "):
        run, _, version = words.partition(" from ")
        cards.append(Card("continues", run, f"from {version}"))
    policies = status.policies
    steps = ", ".join(f"{policy} {progress.step}" for policy, progress in policies.items())
    step = min((progress.step for progress in policies.values()), default=0)
    trained = sum(progress.tokens_trained for progress in policies.values())
    sampled = sum(shard.tokens for shard in log.played)
    cards.append(Card("steps", f"{step} / {status.steps}", steps))
    cards.append(
        Card("wall-clock", duration(status.elapsed_s), f"started {clock_time(status.started)}")
    )
    cards.append(Card("tokens", f"{sampled:,}", f"sampled; {trained:,} trained on"))
    return cards


def _mismatch_card(histories: Sequence[History], config: RunConfig) -> list[Card]:
    headline = mismatch.headline(histories, config.rollout.engine.name)
    return [Card("mismatch", headline.value, headline.note)] if headline else []


def _counts(episodes: Iterable[EpisodeSample]) -> dict[str, int]:
    """Number of episodes of each phase and outcome, for the labels of the filter's buttons."""
    counts: dict[str, int] = {}
    for episode in episodes:
        for kind in (episode.phase, episode.outcome):
            counts[kind] = counts.get(kind, 0) + 1
    return counts


def _surprise(logprob: float) -> int:
    """Shade of a token: 0 for a likely one, up to 3 for an unlikely one."""
    return sum(-logprob >= bound for bound in SURPRISE_NATS)
