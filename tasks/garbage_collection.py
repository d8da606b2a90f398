"""What `gc` does with a run, for the command and for the flow: weights that no kept version needs
go at home, then in the regions' mirrors, then what killed writers left.

    survey   what stays and why, what would go ──▶ remove   it goes
    collect  both for many runs; one that is damaged is told, and the others go on

A mirror that is away holds up nobody: it is told, and the next gc finishes it.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from storage import layout
from storage.errors import AstraFlowError, NotFoundError
from storage.run import evaluations, runs
from storage.store.object_store import ObjectStore
from storage.weights import orphans, replication, retention
from storage.weights.retention import Retention, RetirementPlan
from tasks import sizes, terminal_text
from tasks.recipes.run_config import RunConfig
from tasks.recipes.stored_config import read_config

log = logging.getLogger(__name__)

HOME = "home"
MIRROR_PATIENCE_S = 10.0
"""A call on a mirror gives up after so long."""


@dataclass(frozen=True, kw_only=True)
class SurveyedStore:
    """One store of a run: its own, or a mirror."""

    name: str
    """`home`, or the regions that the mirror serves."""
    store: ObjectStore
    plans: tuple[RetirementPlan, ...]
    """One for each policy."""
    orphans: tuple[str, ...]
    """Keys of data files that nothing names."""
    unfinished: Mapping[str, int]
    """The store's path → bytes of killed writers' temporary files."""

    @property
    def num_bytes(self) -> int:
        """Of all that goes, as far as that is known without asking for each file."""
        return sum(plan.num_bytes for plan in self.plans) + sum(self.unfinished.values())


@dataclass(frozen=True)
class Survey:
    """What of one run stays, and what would go."""

    run_id: str
    home: SurveyedStore
    mirrors: tuple[SurveyedStore, ...]
    away: Mapping[str, str]
    """Mirrors that do not answer: their regions → why."""

    @property
    def places(self) -> tuple[SurveyedStore, ...]:
        return self.home, *self.mirrors

    @property
    def num_bytes(self) -> int:
        return sum(place.num_bytes for place in self.places)


@dataclass
class Collected:
    """What `collect` found in the runs of a store, and did where it was told to."""

    applied: bool
    surveys: list[Survey] = field(default_factory=list)
    away: dict[str, str] = field(default_factory=dict)
    """Mirrors that do not answer: the run and their regions → why."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Runs that could not be worked on → why."""


def survey(
    run: ObjectStore, run_id: str, config: RunConfig, wanted: Retention, now_s: float | None = None
) -> Survey:
    """Look at home and at every mirror; changes nothing. Versions that are still to be evaluated
    stay. Raises what `storage.weights.retention.plan` raises.
    """
    now = time.time() if now_s is None else now_s
    versions = {policy: set(named) for policy, named in (wanted.versions or {}).items()}
    for vector in evaluations.missing(run, config.evaluated_versions()):
        for policy, version in vector.items():
            versions.setdefault(policy, set()).add(version)
    plans = tuple(
        retention.plan(run, policy, replace(wanted, versions=versions), now)
        for policy in config.policies
    )
    going = {key for plan in plans for keys in plan.retired.values() for key in keys}
    unlisted = [key for policy in config.policies for key in orphans.orphans(run, policy, now)]
    home = SurveyedStore(
        name=HOME,
        store=run,
        plans=plans,
        orphans=tuple(key for key in unlisted if key not in going),
        unfinished=orphans.unfinished(run, now),
    )
    found: list[SurveyedStore] = []
    away: dict[str, str] = {}
    for name, url in _mirrors(config):
        try:
            mirror = replication.of_run(run, url)
            mirror = replace(mirror, patience_s=min(mirror.patience_s, MIRROR_PATIENCE_S))
            there = tuple(retention.plan_mirror(run, mirror, plan) for plan in plans)
            found.append(
                SurveyedStore(
                    name=name,
                    store=mirror,
                    plans=there,
                    orphans=(),
                    unfinished=orphans.unfinished(mirror, now),
                )
            )
        except AstraFlowError as error:
            away[name] = str(error)
    return Survey(run_id, home, tuple(found), away)


def remove(found: Survey) -> dict[str, str]:
    """Let go of what the survey says may go. Returns the mirrors that are not finished: their
    regions → why. ConfigError when the run is frozen; whatever else fails at home is raised too.
    """
    home, unfinished = found.home, dict(found.away)
    for plan in home.plans:
        retention.retire(home.store, plan)
    for key in home.orphans:
        home.store.delete(key)
    orphans.remove_unfinished(home.store, home.unfinished)
    for place in found.mirrors:
        try:
            for plan in place.plans:
                retention.retire_mirror(home.store, place.store, plan)
            orphans.remove_unfinished(place.store, place.unfinished)
        except AstraFlowError as error:
            unfinished[place.name] = str(error)
    return unfinished


def collect(
    store: ObjectStore,
    run_ids: Sequence[str],
    wanted: Retention,
    keep: Iterable[str],
    *,
    apply: bool,
    say: Callable[[str], None] = log.info,
) -> Collected:
    """Survey the runs named, or all that are not frozen, and where `apply` says so let go. A line
    for each policy is said.

    A word of `keep` (POLICY@VERSION) speaks of every run that has the policy, and to one that lacks
    the version it says nothing; ConfigError, before anything is done, when no run has the policy.
    Runs that cannot be worked on are told and skipped.
    """
    done = Collected(apply)
    configs = dict(_configs(store, run_ids, done))
    policies = dict.fromkeys(policy for config in configs.values() for policy in config.policies)
    named = retention.named(keep, policies) if configs else {}
    for run_id, config in configs.items():
        try:
            found = survey(
                store.sub(layout.run_prefix(run_id)),
                run_id,
                config,
                replace(wanted, versions=named),
            )
            away = remove(found) if apply else found.away
        except AstraFlowError as error:
            _skip(done, run_id, error)
            continue
        for row in rows(found):
            say(row.words(apply))
        for region, why in away.items():
            log.warning("the mirror of %s in %s is left for the next time: %s", run_id, region, why)
            done.away[f"{run_id}, {region}"] = why
        done.surveys.append(found)
    return done


@dataclass(frozen=True, kw_only=True)
class SummaryRow:
    """A line of what is shown: one policy's weights in one store, or what killed writers left
    there.
    """

    run_id: str
    what: str
    keeps: Sequence[tuple[str, str]]
    """Versions, and why these stay."""
    goes: str
    num_bytes: int

    @property
    def size(self) -> str:
        return sizes.spelled(self.num_bytes)

    def words(self, applied: bool) -> str:
        """Example: `tiny-1 solver: keeps 0 (the base model), 76–80 (one of the newest 5); lets go
        of 1–75, 3.2 MB`.
        """
        keeps = ", ".join(f"{versions} ({why})" for versions, why in self.keeps)
        goes = (
            f"{'lets go' if applied else 'would let go'} of {self.goes}, {self.size}"
            if self.goes
            else "lets go of nothing"
        )
        return f"{self.run_id} {self.what}: {f'keeps {keeps}; ' if keeps else ''}{goes}"


def rows(found: Survey) -> Iterator[SummaryRow]:
    """Every policy at home; of mirrors and leftovers those that are there."""
    for place in found.places:
        for plan in place.plans:
            whys = dict.fromkeys(plan.kept.values())
            keeps = [
                (ranges([v for v, own in plan.kept.items() if own == why]), why) for why in whys
            ]
            going = (
                sorted(plan.retired)
                if place is found.home
                else [version for version, keys in plan.retired.items() if keys]
            )
            if place is found.home or going:
                yield SummaryRow(
                    run_id=found.run_id,
                    what=f"{plan.policy}{_where(found, place)}",
                    keeps=keeps,
                    goes=ranges(going),
                    num_bytes=plan.num_bytes,
                )
        if place.orphans:
            yield SummaryRow(
                run_id=found.run_id,
                what=f"files that nothing names{_where(found, place)}",
                keeps=[],
                goes=_files(place.orphans),
                num_bytes=0,
            )
        if place.unfinished:
            num_bytes = sum(place.unfinished.values())
            yield SummaryRow(
                run_id=found.run_id,
                what=f"unfinished files{_where(found, place)}",
                keeps=[],
                goes=_files(place.unfinished),
                num_bytes=num_bytes,
            )


def markdown(done: Collected) -> str:
    """A table for Prefect's artifact page."""
    lines = [
        f"# {'What gc let go' if done.applied else 'What gc would let go (nothing was deleted)'}",
        "",
        f"| run | of | keeps | {'let go' if done.applied else 'would let go'} | bytes |",
        "|---|---|---|---|---:|",
    ]
    for row in (row for found in done.surveys for row in rows(found)):
        keeps = "; ".join(f"{versions}: {why}" for versions, why in row.keeps)
        texts = map(terminal_text.markdown, (row.run_id, row.what, keeps, row.goes or "–"))
        lines.append(f"| {' | '.join(texts)} | {row.num_bytes:,} |")
    if not done.surveys:
        lines += ["", "There was no run to look at."]
    lines += _told("Mirrors that are left for the next time", done.away)
    lines += _told("Runs that were skipped", done.skipped)
    return "\n".join(lines)


def ranges(numbers: Sequence[int]) -> str:
    """`[0, 5, 6, 7]` → `0, 5–7`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ", ".join("–".join(map(str, span)) for span in spans)


def _configs(
    store: ObjectStore, run_ids: Sequence[str], done: Collected
) -> Iterator[tuple[str, RunConfig]]:
    """Of the runs named; else of all but the frozen ones. Those that cannot be read are skipped."""
    for run_id in run_ids or store.folders(layout.RUNS):
        try:
            run = runs.open_run(store, run_id) if run_ids else store.sub(layout.run_prefix(run_id))
            if not run_ids and retention.is_frozen(run):
                log.info("%s is frozen", run_id)
                continue
            yield run_id, read_config(run)
        except NotFoundError:
            continue  # a folder without run.json is no run
        except AstraFlowError as error:
            _skip(done, run_id, error)


def _skip(done: Collected, run_id: str, error: AstraFlowError) -> None:
    log.error("%s is skipped: %s", run_id, error)
    done.skipped[run_id] = str(error)


def _mirrors(config: RunConfig) -> list[tuple[str, str]]:
    """Names of regions, and the mirror they share."""
    urls = {name: spec.mirror for name, spec in config.rollout.regions.items() if spec.mirror}
    return [
        (", ".join(name for name, own in urls.items() if own == url), url)
        for url in dict.fromkeys(urls.values())
    ]


def _where(found: Survey, place: SurveyedStore) -> str:
    return "" if place is found.home else f", mirror in {place.name}"


def _files(keys: Collection[str]) -> str:
    return "1 file" if len(keys) == 1 else f"{len(keys):,} files"


def _told(title: str, troubles: Mapping[str, str]) -> list[str]:
    return (
        [
            "",
            f"**{title}**",
            "",
            *(
                f"- {terminal_text.markdown(name)}: {terminal_text.markdown(why)}"
                for name, why in troubles.items()
            ),
        ]
        if troubles
        else []
    )
