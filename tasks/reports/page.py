"""The report of a run: one self-contained HTML page, made from the store alone, whether the run is
over or not.

    status, history, shard log, evaluations, episode samples ──▶ figures ──▶ report.html.j2 ──▶ report.html

This module gathers and words; `plots.py` draws, `figures.py` chooses the figures, the template has
the looks.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from storage import layout
from storage.coordination import heartbeats
from storage.records.control import Heartbeat
from storage.store.object_store import ObjectStore
from tasks import evals
from tasks.evals import Evaluation
from tasks.monitoring.mlflow_client import flatten
from tasks.monitoring.status import status_of
from tasks.monitoring.status_schema import Status
from tasks.monitoring.training_curves import History, read_history
from tasks.recipes.run_config import RunConfig
from tasks.recipes.stored_config import read_config
from tasks.reports import figures
from tasks.reports.episode_samples import EpisodeSample, sample_episodes
from tasks.reports.figures import Figure
from tasks.reports.shard_log import ShardLog, read_shard_log
from tasks.terminal_text import plain

TEMPLATE = Path(__file__).with_name("report.html.j2")
SURPRISE_NATS = (0.1, 0.7, 2.3)
"""−log p from which a token is shaded one step more: p = 0.9, 0.5, 0.1."""


@dataclass(frozen=True)
class Card:
    """A headline number. Example:
    `Card("solver alone", "33 % → 92 %", "held out, 500 problems")`.
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
class BookRow:
    """One line of a policy's books."""

    policy: str
    fate: str
    sequences: int
    share: float


def write_report(run: ObjectStore, run_id: str) -> str:
    """Makes the page, stores it and returns it."""
    page = render_report(run, run_id)
    store_report(run, page)
    return page


def store_report(run: ObjectStore, page: str) -> None:
    """Stores the page as the run's `report.html`, replacing an older one."""
    run.put(layout.REPORT, page.encode())


def render_report(run: ObjectStore, run_id: str) -> str:
    """The page as text. Works for runs of any state, also before their first step."""
    config = read_config(run)
    status = status_of(run)
    beats = heartbeats.look(run).beats
    colors = figures.policy_colors(config.policies)
    histories = [
        read_history(run, policy, max(one.version or 0, one.batches))
        for policy, one in status.policies.items()
    ]
    log = read_shard_log(run)
    evaluations = evals.read_all(run).readable
    episodes = sample_episodes(run, log.num_orders, next(iter(config.policies)))
    page: str = _template().render(
        run_id=run_id,
        status=status,
        started=_clock_time(status.started),
        made=_clock_time(time.time()),
        duration=_duration(status.elapsed_s),
        cards=_cards(status, log),
        sections=_sections(config, histories, evaluations, log, beats, status),
        books=[row for history in histories for row in _books(history)],
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
    config: RunConfig, histories: Sequence[History], evaluations: Sequence[Evaluation], log: ShardLog,
    beats: Sequence[Heartbeat], status: Status,
) -> list[Section]:  # fmt: skip
    colors = figures.policy_colors(config.policies)
    start_s = min([one.started_s for one in log.played], default=status.started)
    return [
        Section("learning", "Learning", figures.learning(histories, evaluations, colors)),
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
        Section("health", "Training health", figures.health(histories, colors)),
    ]


def _cards(status: Status, log: ShardLog) -> list[Card]:
    cards = []
    for workflow in dict.fromkeys(score.workflow for score in status.evals):
        scores = [score for score in status.evals if score.workflow == workflow]
        first, last = scores[0], scores[-1]
        gain = f"{(last.accuracy - first.accuracy) * 100:+.1f} points, " if len(scores) > 1 else ""
        alone = workflow == evals.SOLO_WORKFLOW
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
    steps = ", ".join(f"{policy} {one.step}" for policy, one in status.policies.items())
    trained = sum(one.tokens_trained for one in status.policies.values())
    sampled = round(sum(one.tokens for one in log.played) / log.share)
    cards.append(
        Card(
            "steps",
            f"{min((p.step for p in status.policies.values()), default=0)} / {status.steps}",
            steps,
        )
    )
    cards.append(
        Card("wall-clock", _duration(status.elapsed_s), f"started {_clock_time(status.started)}")
    )
    cards.append(Card("tokens", f"{sampled:,}", f"sampled; {trained:,} trained on"))
    return cards


def _books(history: History) -> list[BookRow]:
    """What became of every sequence of a policy; of a sampled history, of the sequences in the
    sampled steps.
    """
    fates = dict(sorted(history.fates().items(), key=lambda item: -item[1]))
    if history.steps:
        fates["waiting"] = history.steps[-1].waiting
    total = sum(fates.values())
    return [
        BookRow(history.policy, fate, count, count / total if total else 0.0)
        for fate, count in fates.items()
    ]


def _counts(episodes: Iterable[EpisodeSample]) -> dict[str, int]:
    """How many there are of each phase and outcome, for the filter's buttons."""
    counts: dict[str, int] = {}
    for episode in episodes:
        for kind in (episode.phase, episode.outcome):
            counts[kind] = counts.get(kind, 0) + 1
    return counts


def _surprise(logprob: float) -> int:
    """0 for an expected token, up to 3 for a surprising one."""
    return sum(-logprob >= bound for bound in SURPRISE_NATS)


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


def _shown(value: Any) -> Any:
    """What is put into the page: of text and markup, only what a page can show. jinja2 escapes the
    text after this.
    """
    return type(value)(plain(value)) if isinstance(value, str) else value


def _clock_time(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_s))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes:02d} min"
        if hours
        else f"{minutes} min {rest:02d} s"
        if minutes
        else f"{rest} s"
    )
