"""The figures of a report: which numbers of a run are drawn, how, and what a reader should see in
them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from storage.records.control import Heartbeat
from tasks import evals
from tasks.evals import Evaluation
from tasks.monitoring.training_curves import History
from tasks.reports import plots
from tasks.reports.plot_parts import NUM_COLORS, smooth
from tasks.reports.plots import Bar, Lane, Line
from tasks.reports.shard_log import ShardLog, by_worker, throughput

TEAM_COLOR = 2
"""Policies take the colours from 0 on in the recipe's order, and skip the team's."""
LANE_BARS_MAX = 400
"""Bars drawn in one worker's lane."""
SMOOTHING_SHARE = 0.06
"""A smoothed line is the mean over this share of its steps."""
COMPONENT_COLORS = {
    "generate": 0, "step": 0, "evaluate": 0, "algorithms": 4, "reward": 4, "publish": 3, "checkpoint": 6,
    "store": 1, "refresh": 5, "wait": 7,
}  # fmt: skip
"""Components that services report → colour; whatever else they report takes the others in turn.
Waiting is grey.
"""


@dataclass(frozen=True)
class Figure:
    title: str
    note: str
    """One sentence: what is drawn and what to look for."""
    svg: str
    wide: bool = False


def policy_colors(policies: Iterable[str]) -> dict[str, int]:
    free = (color for color in range(NUM_COLORS) if color != TEAM_COLOR)
    return dict(zip(policies, free, strict=False))


def learning(
    histories: Sequence[History], evaluations: Sequence[Evaluation], colors: Mapping[str, int]
) -> list[Figure]:
    return [
        Figure(
            "Held-out accuracy",
            "Each evaluation plays the same fixed problems; solver alone and team share the same "
            "first attempts.",
            plots.line_chart(
                _evaluation_lines(evaluations),
                x_label="version",
                y_label="accuracy",
                y_range=(0, 1),
                percent=True,
            ),
        ),
        Figure(
            "Reward per policy",
            "Mean reward of all sequences played since the step before, before any filter; bold is "
            "smoothed.",
            _per_policy(histories, "dataflow/reward/mean", colors, "reward", smoothed=True),
        ),
        Figure(
            "Right answers while training",
            "Share of right first attempts and of right final answers among the episodes that were "
            "played.",
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
            "When each version was published; parallel lines mean that no policy holds up another.",
            _versions_over_time(histories, colors),
        ),
    ]


def staleness(
    histories: Sequence[History], max_staleness: int, colors: Mapping[str, int]
) -> list[Figure]:
    lines = [
        Line(name=f"{history.policy} {stat}", xs=history.numbers, ys=history.series(f"dataflow/staleness/{stat}").tolist(),
             color=colors[history.policy], style="solid" if stat == "mean" else "dashed")
        for history in histories for stat in ("mean", "max")
    ]  # fmt: skip
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
            "Trainer's version minus the oldest version in a sequence; mean and worst.",
            chart,
        ),
        Figure(
            "How old the data was",
            "Sequences trained on, by how many versions old they were.",
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
            "Tokens that the region's workers sampled, spread over the time each order was played.",
            plots.line_chart(
                regions, x_label="minutes since start", y_label="tokens / s", y_range=(0, None)
            ),
        ),
        Figure(
            "Trainers waiting for data",
            "Share of the time between two versions that the trainer waited for its batch.",
            _per_policy(
                histories, "trainer/wait_fraction", colors, "waiting", smoothed=True, percent=True
            ),
        ),
        Figure(
            "From shard to batch",
            "Median time from the end of an order's play to the batch its sequences are in.",
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
    """Every member's seconds by component; the process's CPU time is no component of its
    wall-clock.
    """
    rows = {
        beat.id: {
            name: spent for name, spent in beat.seconds.items() if name != "cpu" and spent > 0
        }
        for beat in beats
    }
    rows = {member: parts for member, parts in rows.items() if parts}
    return Figure(
        "Where the wall-clock went",
        "Seconds each member spent in each component since it was last launched; parts that "
        "overlap in time add up.",
        plots.stacked_bars(rows, unit="seconds", colors=_component_colors(rows.values())),
        wide=True,
    )


def worker_timeline(
    log: ShardLog, histories: Sequence[History], start_s: float, colors: Mapping[str, int]
) -> Figure:
    """One lane for each worker, and one for the versions of each policy."""
    regions = {
        one.region: index
        for index, one in enumerate(sorted(log.played, key=lambda one: one.region))
    }
    shades = {region: index for index, region in enumerate(regions)}
    lanes = []
    for worker, played in by_worker(log.played).items():
        bars = [
            Bar(
                (one.started_s - start_s) / 60,
                (one.finished_s - start_s) / 60,
                shades[one.region],
                f"order {one.order}: {one.episodes} episodes, {one.tokens} tokens in "
                f"{one.finished_s - one.started_s:.1f} s"
                + "".join(f", {count} failed ({kind})" for kind, count in one.failed.items())
                + "".join(f", {policy} ≤ v{version}" for policy, version in one.newest.items()),
            )
            for one in played[:: max(1, len(played) // LANE_BARS_MAX)]
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
        "Each bar is an order from lease to shard (orders overlap on purpose); each tick a "
        "published version.",
        plots.lanes(lanes, x_label="minutes since start", legend=list(shades.items())),
        wide=True,
    )


def health(histories: Sequence[History], colors: Mapping[str, int]) -> list[Figure]:
    wanted = (
        (
            "Loss",
            "trainer/loss",
            "loss",
            "Policy-gradient loss; its level means little, jumps mean trouble.",
        ),
        (
            "Gradient norm",
            "trainer/grad_norm",
            "norm",
            "Before clipping; a steep rise comes before a collapse.",
        ),
        (
            "Policy shift",
            "trainer/kl/mean",
            "KL",
            "Estimated KL between the policy and the sampler of its data.",
        ),
        (
            "Second moment",
            "trainer/m2/mean",
            "mean (log ratio)²",
            "What M2PO bounds: how far the data is off-policy.",
        ),
        (
            "Entropy",
            "trainer/entropy/mean",
            "nats",
            "Falls as a policy becomes sure; near zero it stops exploring.",
        ),
        (
            "Ratio",
            "trainer/ratio/mean",
            "π / b",
            "Mean probability ratio of policy and sampler; 1 is on-policy.",
        ),
        (
            "Silenced tokens",
            "trainer/masked_share",
            "share",
            "Tokens that clipping or masking took out of the loss.",
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
        for title, name, unit, note in wanted
        if any(history.has(name) for history in histories)
    ]


def _evaluation_lines(evaluations: Sequence[Evaluation]) -> list[Line]:
    """One line for each (data set, workflow); data sets are named only where there are several."""
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for one in evaluations:
        for score in evals.scores(one):
            versions = max(one.versions.values(), default=0)
            points.setdefault((one.dataset, score.workflow), []).append((versions, score.accuracy))
    several = len({dataset for dataset, _ in points}) > 1
    lines = []
    for index, ((dataset, workflow), at) in enumerate(points.items()):
        alone = workflow == evals.SOLO_WORKFLOW
        name = "solver alone" if alone else f"team ({workflow})"
        color = (0 if alone else TEAM_COLOR) + (3 * (index // 2) if several else 0)
        lines.append(
            Line(
                name=f"{name}, {dataset}" if several else name,
                xs=[x for x, _ in at],
                ys=[y for _, y in at],
                color=color,
                dots=True,
            )
        )
    return lines


def _per_policy(
    histories: Sequence[History], name: str, colors: Mapping[str, int], unit: str, smoothed: bool = False,
    percent: bool = False,
) -> str:  # fmt: skip
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
    """The episodes are the same for every policy; the first policy that measured them speaks for
    all.
    """
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
    born = [
        step.created_s
        for history in histories
        for step in history.steps
        if step.number == 0 and step.created_s
    ]
    start_s = min(born, default=0.0)
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
    found = {name for row in rows for name in row}
    known = [name for name in COMPONENT_COLORS if name in found and name != "wait"]
    others = sorted(found - COMPONENT_COLORS.keys())
    free = [
        color
        for color in range(NUM_COLORS - 1)
        if color not in {COMPONENT_COLORS[name] for name in known}
    ]
    colors = {name: COMPONENT_COLORS[name] for name in known}
    colors |= {name: (free or [6])[index % len(free or [6])] for index, name in enumerate(others)}
    return colors | ({"wait": COMPONENT_COLORS["wait"]} if "wait" in found else {})
