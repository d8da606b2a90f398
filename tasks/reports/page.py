"""The report of a run: one self-contained HTML page, made from the store at any time of the run.

    status, training curves, shard log, ─▶ figures ─▶ report.html.j2 ─▶ report.html
    evaluations, episode samples

This module collects the data and formats the texts; `figures.py` selects the figures, `plots.py`
draws them, the template has the layout.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from storage import layout
from storage.coordination import heartbeats
from storage.records.control import Heartbeat
from storage.run import evaluations
from storage.run.evaluations import SOLO_WORKFLOW, Evaluation
from storage.store.object_store import ObjectStore
from tasks.monitoring.budget_status import budget_words
from tasks.monitoring.mlflow_client import flatten
from tasks.monitoring.status import status_of
from tasks.monitoring.status_schema import Status, continues
from tasks.monitoring.training_curves import History, read_history
from tasks.recipes.run_config import RunConfig
from tasks.recipes.stored_config import read_config
from tasks.reports import figures, mismatch
from tasks.reports.episode_samples import EpisodeSample, sample_episodes
from tasks.reports.figures import Figure
from tasks.reports.shard_log import ShardLog, read_shard_log
from tasks.reports.templates import clock_time, duration, template

SURPRISE_NATS = (0.1, 0.7, 2.3)
"""Bounds of −log p between the four shades of a token: p = 0.9, 0.5, 0.1."""


@dataclass(frozen=True)
class Card:
    """A headline number.

    Example: `Card("solver alone", "33 % → 92 %", "held out, 500 problems")`.
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


@dataclass(frozen=True)
class LedgerRow:
    """One row of a policy's ledger."""

    policy: str
    fate: str
    sequences: int
    share: float


def write_report(run: ObjectStore, run_id: str) -> str:
    """Make the page, store it and return it."""
    page = render_report(run, run_id)
    store_report(run, page)
    return page


def store_report(run: ObjectStore, page: str) -> None:
    """Store the page as the run's `report.html`; replaces an older page."""
    run.put(layout.REPORT, page.encode())


def render_report(run: ObjectStore, run_id: str) -> str:
    """Make the page as text. A run of any state has one, also before its first step."""
    config = read_config(run)
    status = status_of(run)
    beats = heartbeats.read_all(run).beats
    colors = figures.policy_colors(config.policies)
    histories = [
        read_history(run, policy, max(progress.version or 0, progress.batches))
        for policy, progress in status.policies.items()
    ]
    log = read_shard_log(run)
    episodes = sample_episodes(run, log.num_orders, next(iter(config.policies)))
    page: str = template("report.html.j2").render(
        run_id=run_id,
        status=status,
        budget=budget_words(status.budget),
        started=clock_time(status.started),
        made=clock_time(time.time()),
        duration=duration(status.elapsed_s),
        cards=[*_cards(status, log), *_mismatch_card(histories, config)],
        sections=_sections(
            config, histories, evaluations.read_all(run).readable, log, beats, status
        ),
        ledger=[row for history in histories for row in _ledger(history)],
        sampled=any(len(history.steps) < history.num_steps for history in histories),
        members=status.members,
        beats={beat.id: beat for beat in beats},
        episodes=episodes,
        episode_count=_counts(episodes),
        colors=colors,
        settings=sorted(flatten(config.model_dump(mode="json", exclude_none=True)).items()),
        surprise=_surprise,
    )
    return page


def _sections(
    config: RunConfig, histories: Sequence[History], evaluated: Sequence[Evaluation], log: ShardLog,
    beats: Sequence[Heartbeat], status: Status,
) -> list[Section]:  # fmt: skip
    colors = figures.policy_colors(config.policies)
    start_s = min([shard.started_s for shard in log.played], default=status.started)
    return [
        Section("learning", "Learning", figures.learning(histories, evaluated, colors)),
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


def _cards(status: Status, log: ShardLog) -> list[Card]:
    cards = []
    for workflow in dict.fromkeys(score.workflow for score in status.evals):
        scores = [score for score in status.evals if score.workflow == workflow]
        first, last = scores[0], scores[-1]
        gain = f"{(last.accuracy - first.accuracy) * 100:+.1f} points, " if len(scores) > 1 else ""
        alone = workflow == SOLO_WORKFLOW
        cards.append(
            Card(
                "solver alone" if alone else "team",
                f"{first.accuracy:.1%} → {last.accuracy:.1%}"
                if len(scores) > 1
                else f"{first.accuracy:.1%}",
                f"{gain}{last.n} held-out problems of {last.dataset}",
                0 if alone else figures.TEAM_COLOR,
            )
        )
    if words := continues(status.origins).removeprefix("continues "):
        run, _, version = words.partition(" from ")
        cards.append(Card("continues", run, f"from {version}"))
    policies = status.policies
    steps = ", ".join(f"{policy} {progress.step}" for policy, progress in policies.items())
    step = min((progress.step for progress in policies.values()), default=0)
    trained = sum(progress.tokens_trained for progress in policies.values())
    sampled = round(sum(shard.tokens for shard in log.played) / log.share)
    cards.append(Card("steps", f"{step} / {status.steps}", steps))
    cards.append(
        Card("wall-clock", duration(status.elapsed_s), f"started {clock_time(status.started)}")
    )
    cards.append(Card("tokens", f"{sampled:,}", f"sampled; {trained:,} trained on"))
    return cards


def _mismatch_card(histories: Sequence[History], config: RunConfig) -> list[Card]:
    headline = mismatch.headline(histories, config.rollout.engine.name)
    return [Card("mismatch", headline.value, headline.note)] if headline else []


def _ledger(history: History) -> list[LedgerRow]:
    """Sequences of a policy by fate; of a sampled history only those of the sampled steps."""
    fates = dict(sorted(history.fates().items(), key=lambda item: -item[1]))
    if history.steps:
        fates["waiting"] = history.steps[-1].waiting
    total = sum(fates.values())
    return [
        LedgerRow(history.policy, fate, count, count / total if total else 0.0)
        for fate, count in fates.items()
    ]


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
