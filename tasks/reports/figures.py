"""The figures of a report: selection, drawing and explanation of a run's metrics."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

from storage.records.control import Heartbeat
from storage.run.evaluations import SOLO_WORKFLOW, Evaluation, scores
from tasks.monitoring.training_curves import History
from tasks.reports import plots
from tasks.reports.plot_parts import NUM_COLORS, smooth
from tasks.reports.plots import Bar, Lane, Line
from tasks.reports.shard_log import PlayedShard, ShardLog, by_worker, throughput
from tasks.reports.words import ScoreNames

TEAM_COLOR = 2
"""Colour of the team; policies take the other colours in the recipe's order."""
LANE_BARS_MAX = 400
"""Maximum number of bars in one worker's lane."""
SMOOTHING_SHARE = 0.06
"""Window of a smoothed line, as a share of its steps."""
COMPONENT_COLORS = {
    "generate": 0, "step": 0, "evaluate": 0, "algorithms": 4, "reward": 4, "publish": 3,
    "checkpoint": 6, "store": 1, "refresh": 5, "wait": 7,
}  # fmt: skip
"""Component of a service's time → colour; other components take the remaining colours in turn.

Waiting is grey.
"""


@dataclass(frozen=True)
class Figure:
    title: str
    note: str
    """One sentence: the content, and how to read it."""
    svg: str
    wide: bool = False


def policy_colors(policies: Iterable[str]) -> dict[str, int]:
    free = (color for color in range(NUM_COLORS) if color != TEAM_COLOR)
    return dict(zip(policies, cycle(free), strict=False))


def score_color(workflow: str, colors: Mapping[str, int], names: ScoreNames) -> int:
    """Return the color of an accuracy: that of the policy whose accuracy it is, or of the team."""
    own = names.answering if workflow == SOLO_WORKFLOW else ""
    return colors.get(own, 0 if workflow == SOLO_WORKFLOW else TEAM_COLOR)


def learning(
    histories: Sequence[History], evaluations: Sequence[Evaluation], colors: Mapping[str, int],
    names: ScoreNames,
) -> list[Figure]:  # fmt: skip
    return [
        Figure(
            "Held-out accuracy",
            "All evaluations play the same problems; accuracies at one version are of the same "
            "episodes.",
            plots.line_chart(
                _evaluation_lines(evaluations, colors, names),
                x_label="version",
                y_label="accuracy",
                y_range=(0, 1),
                percent=True,
            ),
        ),
        Figure(
            "Reward per policy",
            "Mean reward of all sequences since the step before, before any filter; the bold line "
            "is smoothed.",
            _per_policy(histories, "dataflow/reward/mean", colors, "reward", smoothed=True),
        ),
        Figure(
            "Right answers while training",
            "Share of right first attempts and of right final answers among all episodes.",
            plots.line_chart(
                _played_accuracy(histories),
                x_label="step",
                y_label="accuracy",
                y_range=(0, 1),
                percent=True,
            ),
        ),
        Figure(
            "Versions over time",
            "Time of each version; parallel lines mean that no policy delays another.",
            _versions_over_time(histories, colors),
        ),
    ]


def staleness(
    histories: Sequence[History], max_staleness: int, colors: Mapping[str, int]
) -> list[Figure]:
    lines = [
        Line(
            name=f"{history.policy} {stat}",
            xs=history.numbers,
            ys=history.series(f"dataflow/staleness/{stat}").tolist(),
            color=colors[history.policy],
            style="solid" if stat == "mean" else "dashed",
        )
        for history in histories
        for stat in ("mean", "max")
    ]
    chart = plots.line_chart(
        lines,
        x_label="step",
        y_label="versions behind",
        y_range=(0, max_staleness * 1.05 + 0.5),
        limit=(max_staleness, f"max_staleness {max_staleness}"),
    )
    counts = {history.policy: dict(history.staleness()) for history in histories}
    ages = plots.histogram(
        counts,
        x_label="versions behind",
        y_label="sequences",
        colors=[colors[h.policy] for h in histories],
    )
    return [
        Figure(
            "Staleness per step",
            "Trainer's version minus the oldest version in a sequence: mean and maximum.",
            chart,
        ),
        Figure(
            "Staleness of the data",
            "Trained sequences by their staleness in versions.",
            ages,
        ),
    ]


def flow(
    histories: Sequence[History], log: ShardLog, start_s: float, colors: Mapping[str, int]
) -> list[Figure]:
    minutes, rates = throughput(log, start_s)
    regions = [
        Line(name=region, xs=minutes, ys=values, color=index)
        for index, (region, values) in enumerate(rates.items())
    ]
    return [
        Figure(
            "Sampled tokens per region",
            "Tokens that the region's workers sampled, spread over the time of each order.",
            plots.line_chart(
                regions, x_label="minutes since start", y_label="tokens / s", y_range=(0, None)
            ),
        ),
        Figure(
            "Trainers waiting for data",
            "Share of the time between two versions in which the trainer waited for its batch.",
            _per_policy(
                histories, "trainer/wait_fraction", colors, "waiting", smoothed=True, percent=True
            ),
        ),
        Figure(
            "From shard to batch",
            "Median time from the end of an order's rollout to the batch with its sequences.",
            _per_policy(
                histories, "dataflow/shard_to_batch_s/p50", colors, "seconds", smoothed=True
            ),
        ),
        Figure(
            "Tokens trained on per step",
            "Sampled tokens in the loss of each step.",
            _per_policy(histories, "trainer/tokens", colors, "tokens"),
        ),
    ]


def wall_clock(beats: Sequence[Heartbeat]) -> Figure:
    """Seconds of every member by component, without the CPU time of its process."""
    rows = {
        beat.id: {
            name: seconds for name, seconds in beat.seconds.items() if name != "cpu" and seconds > 0
        }
        for beat in beats
    }
    rows = {member: components for member, components in rows.items() if components}
    return Figure(
        "Wall-clock time",
        "Seconds of each member in each component since its last launch; components that overlap "
        "in time are added.",
        plots.stacked_bars(rows, unit="seconds", colors=_component_colors(rows.values())),
        wide=True,
    )


def worker_timeline(
    log: ShardLog, histories: Sequence[History], start_s: float, colors: Mapping[str, int]
) -> Figure:
    """A lane for each worker, and one for the versions of each policy."""
    regions = sorted({shard.region for shard in log.played})
    shades = {region: index for index, region in enumerate(regions)}
    lanes = []
    for worker, shards in by_worker(log.played).items():
        bars = [
            Bar(
                (shard.started_s - start_s) / 60,
                (shard.finished_s - start_s) / 60,
                shades[shard.region],
                _bar_text(shard),
            )
            for shard in shards[:: max(1, len(shards) // LANE_BARS_MAX)]
        ]
        lanes.append(Lane(worker, bars))
    for history in histories:
        marks = [
            ((step.created_s - start_s) / 60, f"{history.policy} version {step.number}")
            for step in history.steps[:: max(1, len(history.steps) // LANE_BARS_MAX)]
            if step.created_s >= start_s
        ]
        lanes.append(Lane(f"{history.policy} versions", (), marks, colors[history.policy]))
    return Figure(
        "Worker timeline",
        "Each bar is an order from lease to shard (a worker plays several at once); each tick is a "
        "published version.",
        plots.lanes(lanes, x_label="minutes since start", legend=list(shades.items())),
        wide=True,
    )


def _bar_text(shard: PlayedShard) -> str:
    """The text of a worker's bar: episodes, tokens and seconds of one order."""
    failed = "".join(f", {count} failed ({kind})" for kind, count in shard.failed.items())
    versions = "".join(f", {policy} ≤ v{version}" for policy, version in shard.newest.items())
    return (
        f"order {shard.order}: {shard.episodes} episodes, {shard.tokens} tokens in "
        f"{shard.finished_s - shard.started_s:.1f} s{failed}{versions}"
    )


def health(histories: Sequence[History], colors: Mapping[str, int]) -> list[Figure]:
    charts = (
        (
            "Loss",
            "trainer/loss",
            "loss",
            "Policy-gradient loss; its level has no meaning, jumps are a warning.",
        ),
        (
            "Gradient norm",
            "trainer/grad_norm",
            "norm",
            "Norm before clipping; a steep rise precedes a collapse.",
        ),
        (
            "Policy shift",
            "trainer/kl/mean",
            "KL",
            "Estimated KL between the policy and the behaviour policy of its data.",
        ),
        (
            "Second moment",
            "trainer/m2/mean",
            "mean (log ratio)²",
            "How far the data is off-policy; bounded by M2PO.",
        ),
        (
            "Entropy",
            "trainer/entropy/mean",
            "nats",
            "Falls as a policy becomes certain; near zero it stops exploring.",
        ),
        (
            "Ratio",
            "trainer/ratio/mean",
            "π / b",
            "Mean probability ratio of policy and behaviour policy; 1 is on-policy.",
        ),
        (
            "Clipped tokens",
            "trainer/masked_share",
            "share",
            "Share of tokens without gradient, by clipping or masking.",
        ),
        (
            "Answer length",
            "dataflow/length/mean",
            "tokens",
            "Mean sampled tokens of a trained sequence.",
        ),
    )
    return [
        Figure(title, note, _per_policy(histories, name, colors, unit, smoothed=True))
        for title, name, unit, note in charts
        if any(history.has(name) for history in histories)
    ]


def _evaluation_lines(
    evaluations: Sequence[Evaluation], colors: Mapping[str, int], names: ScoreNames
) -> list[Line]:
    """A line for each (data set, workflow); data sets are named only if there are several."""
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for evaluation in evaluations:
        version = max(evaluation.versions.values(), default=0)
        for score in scores(evaluation):
            line = evaluation.dataset, score.workflow
            points.setdefault(line, []).append((version, score.accuracy))
    several = len({dataset for dataset, _ in points}) > 1
    lines = []
    for index, ((dataset, workflow), curve) in enumerate(points.items()):
        name = names.of(workflow)
        color = score_color(workflow, colors, names) + (3 * (index // 2) if several else 0)
        lines.append(
            Line(
                name=f"{name}, {dataset}" if several else name,
                xs=[x for x, _ in curve],
                ys=[y for _, y in curve],
                color=color,
                dots=True,
            )
        )
    return lines


def _per_policy(
    histories: Sequence[History],
    name: str,
    colors: Mapping[str, int],
    unit: str,
    smoothed: bool = False,
    percent: bool = False,
) -> str:
    lines: list[Line] = []
    for history in histories:
        values = history.series(name).tolist()
        color = colors[history.policy]
        window = max(1, round(len(values) * SMOOTHING_SHARE)) if smoothed else 1
        if window > 1:
            lines.append(
                Line(name=history.policy, xs=history.numbers, ys=values, color=color, style="faint")
            )
            values = smooth(values, window)
        lines.append(Line(name=history.policy, xs=history.numbers, ys=values, color=color))
    return plots.line_chart(
        lines,
        x_label="step",
        y_label=unit,
        y_range=(0, 1) if percent else (None, None),
        percent=percent,
    )


def _played_accuracy(histories: Sequence[History]) -> list[Line]:
    """Accuracies of the episodes, from the first policy that has them: they are equal for all."""
    names = (
        ("first attempt", "dataflow/accuracy/first_attempt", 0),
        ("final answer", "dataflow/accuracy/final", TEAM_COLOR),
    )
    lines = []
    for label, name, color in names:
        history = next((history for history in histories if history.has(name)), None)
        if history is not None:
            values = history.series(name).tolist()
            window = max(1, round(len(values) * SMOOTHING_SHARE))
            lines.append(
                Line(name=label, xs=history.numbers, ys=values, color=color, style="faint")
            )
            lines.append(
                Line(name=label, xs=history.numbers, ys=smooth(values, window), color=color)
            )
    return lines


def _versions_over_time(histories: Sequence[History], colors: Mapping[str, int]) -> str:
    base_s = [
        step.created_s
        for history in histories
        for step in history.steps
        if step.number == 0 and step.created_s
    ]
    start_s = min(base_s, default=0.0)
    lines = [
        Line(
            name=history.policy,
            xs=[(step.created_s - start_s) / 60 for step in history.steps if step.created_s],
            ys=[float(step.number) for step in history.steps if step.created_s],
            color=colors[history.policy],
        )
        for history in histories
    ]
    return plots.line_chart(
        lines, x_label="minutes since version 0", y_label="version", y_range=(0, None)
    )


def _component_colors(rows: Iterable[Mapping[str, float]]) -> dict[str, int]:
    """Components in a fixed order, waiting last, each with its colour."""
    names = {name for row in rows for name in row}
    colors = {name: color for name, color in COMPONENT_COLORS.items() if name in names - {"wait"}}
    free = [color for color in range(NUM_COLORS - 1) if color not in colors.values()] or [6]
    others = sorted(names - COMPONENT_COLORS.keys())
    colors |= {name: free[index % len(free)] for index, name in enumerate(others)}
    return colors | ({"wait": COMPONENT_COLORS["wait"]} if "wait" in names else {})
