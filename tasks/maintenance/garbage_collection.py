"""Garbage collection of runs, for the command and for the flow: weights that no kept version needs
are deleted at home, then in the regions' mirrors, then what killed writers left.

    survey   what is kept and why, what is to be deleted ──▶ remove   deletes it
    collect  both for many runs; one that is damaged is reported and skipped

A mirror that does not answer is reported, and finished by the next gc.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from storage import layout
from storage.errors import AstraFlowError, NotFoundError
from storage.plain_names import RUN_ID
from storage.run import evaluations, runs
from storage.store.object_store import ObjectStore
from storage.weights import manifests, orphans, replication, retention
from storage.weights.retention import Retention, RetirementPlan
from tasks import sizes, terminal_text
from tasks.recipes.run_config import RunConfig
from tasks.recipes.stored_config import read_config

log = logging.getLogger(__name__)

HOME = "home"
VERSIONS_AHEAD = 16
"""Evaluations of versions that do not exist yet, which count as missing: some may appear meanwhile.
"""
MIRROR_PATIENCE_S = 10.0
"""A call on a mirror gives up after this time."""


@dataclass(frozen=True, kw_only=True)
class SurveyedStore:
    """One store of a run, home or a mirror, and what is to be deleted there."""

    name: str
    """`home`, or the regions of the mirror."""
    store: ObjectStore
    plans: tuple[RetirementPlan, ...]
    """One of each policy."""
    orphans: tuple[str, ...]
    """Keys of data files that nothing names."""
    unfinished: Mapping[str, int]
    """The store's path → bytes of killed writers' temporary files."""

    @property
    def num_bytes(self) -> int:
        """Bytes to delete, as far as they are known without a request for each file."""
        return sum(plan.num_bytes for plan in self.plans) + sum(self.unfinished.values())


@dataclass(frozen=True)
class Survey:
    """What is kept and what is to be deleted of one run."""

    run_id: str
    home: SurveyedStore
    mirrors: tuple[SurveyedStore, ...]
    unreachable: Mapping[str, str]
    """Regions of mirrors that do not answer → why."""

    @property
    def stores(self) -> tuple[SurveyedStore, ...]:
        """Home, then the mirrors."""
        return self.home, *self.mirrors

    @property
    def lost(self) -> list[str]:
        """Why versions that a person names are not kept."""
        return [
            f"{plan.policy}@{version} cannot be kept: an earlier gc deleted its data"
            for plan in self.home.plans
            for version in plan.lost
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes to delete in all stores."""
        return sum(surveyed.num_bytes for surveyed in self.stores)


@dataclass
class Collected:
    """The result of `collect`."""

    applied: bool
    """Whether anything was deleted, not only surveyed."""
    surveys: list[Survey] = field(default_factory=list)
    unreachable: dict[str, str] = field(default_factory=dict)
    """Run and regions of mirrors that are not finished → why."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Runs that could not be surveyed or cleaned → why."""


def survey(
    run: ObjectStore,
    run_id: str,
    config: RunConfig,
    settings: Retention,
    now_s: float | None = None,
    *,
    verify: bool = True,
) -> Survey:
    """Survey home and every mirror, without a change.

    Versions that are still to be evaluated are kept, and those that a trainer reads as its
    reference when it starts (`train.reference`). A survey for `remove` needs `verify`, which
    reads anchors (`manifests.with_bases`). Raises what `retention.plan` raises.
    """
    now = time.time() if now_s is None else now_s
    versions = {policy: set(named) for policy, named in (settings.versions or {}).items()}
    for vector in _to_evaluate(run, config):
        for policy, version in vector.items():
            versions.setdefault(policy, set()).add(version)
    for policy, spec in config.policies.items():
        if spec.train.reference is not None:
            versions.setdefault(policy, set()).add(spec.train.reference.version)
    plans = tuple(
        retention.plan(run, policy, replace(settings, versions=versions), now, verify=verify)
        for policy in config.policies
    )
    retired_keys = {key for plan in plans for keys in plan.retired.values() for key in keys}
    orphan_keys = [key for policy in config.policies for key in orphans.orphans(run, policy, now)]
    home = SurveyedStore(
        name=HOME,
        store=run,
        plans=plans,
        orphans=tuple(key for key in orphan_keys if key not in retired_keys),
        unfinished=orphans.unfinished(run, now),
    )
    mirrors: list[SurveyedStore] = []
    unreachable: dict[str, str] = {}
    for name, url in _mirrors(config):
        try:
            mirror = replication.of_run(run, url)
            mirror = replace(mirror, patience_s=min(mirror.patience_s, MIRROR_PATIENCE_S))
            replication.refuse_home(run, mirror)
            mirror_plans = tuple(retention.plan_mirror(run, mirror, plan) for plan in plans)
            mirrors.append(
                SurveyedStore(
                    name=name,
                    store=mirror,
                    plans=mirror_plans,
                    orphans=(),
                    unfinished=orphans.unfinished(mirror, now),
                )
            )
        except AstraFlowError as error:
            unreachable[name] = str(error)
    return Survey(run_id, home, tuple(mirrors), unreachable)


def _to_evaluate(run: ObjectStore, config: RunConfig) -> Iterator[Mapping[str, int]]:
    """Yield the version vectors without an evaluation, up to VERSIONS_AHEAD that do not exist. The
    newest version is not searched for: a stray one of a high number would make a million of them.
    """
    absent = 0
    for vector in config.evaluated_versions():
        if evaluations.exists(run, vector):
            continue
        yield vector
        absent += not any(manifests.exists(run, *version) for version in vector.items())
        if absent == VERSIONS_AHEAD:
            return


def remove(surveyed: Survey) -> dict[str, str]:
    """Delete what the survey lists.

    Returns:
        Regions of mirrors that are not finished → why.

    Raises:
        ConfigError: the run is frozen.
        AstraFlowError: home failed in any other way.
    """
    home, unfinished = surveyed.home, dict(surveyed.unreachable)
    for plan in home.plans:
        retention.retire(home.store, plan)
    for key in home.orphans:
        home.store.delete(key)
    orphans.remove_unfinished(home.store, home.unfinished)
    for mirror in surveyed.mirrors:
        try:
            for plan in mirror.plans:
                retention.retire_mirror(home.store, mirror.store, plan)
            orphans.remove_unfinished(mirror.store, mirror.unfinished)
        except AstraFlowError as error:
            unfinished[mirror.name] = str(error)
    return unfinished


def collect(
    store: ObjectStore,
    run_ids: Sequence[str],
    settings: Retention,
    keep: Iterable[str],
    *,
    apply: bool,
    say: Callable[[str], None] = log.info,
) -> Collected:
    """Survey runs and, with `apply`, delete what the surveys list.

    A run that cannot be surveyed or cleaned is reported and skipped.

    Args:
        run_ids: all runs that are not frozen, where it is empty.
        keep: versions to keep, as POLICY@VERSION, in every run that has them.
        say: receives a line of text for each policy.

    Raises:
        ConfigError: no run has a policy of `keep`; nothing was done then.
    """
    collected = Collected(apply)
    configs = dict(_configs(store, run_ids, collected))
    policies = dict.fromkeys(policy for config in configs.values() for policy in config.policies)
    named = retention.named(keep, policies) if configs else {}
    for run_id, config in configs.items():
        try:
            surveyed = survey(
                store.sub(layout.run_prefix(run_id)),
                run_id,
                config,
                replace(settings, versions=named),
                verify=apply,
            )
            unreachable = remove(surveyed) if apply else surveyed.unreachable
        except Exception as error:  # whatever a damaged run causes: the others are still cleaned
            _skip(collected, run_id, error)
            continue
        for row in rows(surveyed):
            say(row.words(apply))
        for reason in surveyed.lost:
            log.warning("%s: %s", run_id, reason)
        for region, why in unreachable.items():
            log.warning("the mirror of %s in %s is left for the next time: %s", run_id, region, why)
            collected.unreachable[f"{run_id}, {region}"] = why
        collected.surveys.append(surveyed)
    return collected


@dataclass(frozen=True, kw_only=True)
class SummaryRow:
    """A row of the summary: a policy's weights in one store, or what killed writers left there."""

    run_id: str
    what: str
    keeps: Sequence[tuple[str, str]]
    """Versions, and why they are kept."""
    goes: str
    """Versions or files to delete; empty: none."""
    num_bytes: int

    @property
    def size(self) -> str:
        """`num_bytes` as text."""
        return sizes.spelled(self.num_bytes)

    def words(self, applied: bool) -> str:
        """Return the row as a line of text. Example: `tiny-1 solver: keeps 0 (the base model),
        76–80 (one of the newest 5); deletes 1–75, 3.2 MB`.
        """
        keeps = ", ".join(f"{versions} ({why})" for versions, why in self.keeps)
        goes = (
            f"{'deletes' if applied else 'would delete'} {self.goes}, {self.size}"
            if self.goes
            else "deletes nothing"
        )
        return f"{self.run_id} {self.what}: {f'keeps {keeps}; ' if keeps else ''}{goes}"


def rows(surveyed: Survey) -> Iterator[SummaryRow]:
    """Return a row of every policy at home, and rows of mirrors and leftovers to delete."""
    for store in surveyed.stores:
        is_home = store is surveyed.home
        where = "" if is_home else f", mirror in {store.name}"
        for plan in store.plans:
            keeps = [
                (ranges([version for version, each in plan.kept.items() if each == why]), why)
                for why in dict.fromkeys(plan.kept.values())
            ]
            versions = [version for version, keys in plan.retired.items() if is_home or keys]
            if is_home or versions:
                yield SummaryRow(
                    run_id=surveyed.run_id,
                    what=f"{plan.policy}{where}",
                    keeps=keeps,
                    goes=ranges(sorted(versions)),
                    num_bytes=plan.num_bytes,
                )
        for what, keys, num_bytes in (
            ("files that nothing names", store.orphans, 0),
            ("unfinished files", store.unfinished, sum(store.unfinished.values())),
        ):
            if keys:
                yield SummaryRow(
                    run_id=surveyed.run_id,
                    what=f"{what}{where}",
                    keeps=[],
                    goes="1 file" if len(keys) == 1 else f"{len(keys):,} files",
                    num_bytes=num_bytes,
                )


def markdown(collected: Collected) -> str:
    """Return a table for Prefect's artifact page."""
    title = "Deleted by gc" if collected.applied else "What gc would delete (nothing was deleted)"
    lines = [
        f"# {title}",
        "",
        f"| run | of | keeps | {'deleted' if collected.applied else 'would delete'} | bytes |",
        "|---|---|---|---|---:|",
    ]
    for row in (row for surveyed in collected.surveys for row in rows(surveyed)):
        keeps = "; ".join(f"{versions}: {why}" for versions, why in row.keeps)
        texts = map(terminal_text.markdown, (row.run_id, row.what, keeps, row.goes or "–"))
        lines.append(f"| {' | '.join(texts)} | {row.num_bytes:,} |")
    if not collected.surveys:
        lines += ["", "No run was surveyed."]
    lines += _reasons("Mirrors that are left for the next time", collected.unreachable)
    lines += _reasons("Runs that were skipped", collected.skipped)
    return "\n".join(lines)


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text. Example: `[0, 5, 6, 7]` → `0, 5–7`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ", ".join("–".join(map(str, span)) for span in spans)


def _configs(
    store: ObjectStore, run_ids: Sequence[str], collected: Collected
) -> Iterator[tuple[str, RunConfig]]:
    """Read the configurations of the runs; one that cannot be read is skipped. A folder whose name
    is no run id is not a run.
    """
    for run_id in run_ids or filter(RUN_ID.fullmatch, store.folders(layout.RUNS)):
        try:
            run = runs.open_run(store, run_id) if run_ids else store.sub(layout.run_prefix(run_id))
            if not run_ids and retention.is_frozen(run):
                log.info("%s is frozen", run_id)
                continue
            yield run_id, read_config(run)
        except NotFoundError:
            continue  # a folder without run.json is no run
        except Exception as error:  # as in `collect`
            _skip(collected, run_id, error)


def _skip(collected: Collected, run_id: str, error: Exception) -> None:
    is_expected = isinstance(error, AstraFlowError)
    why = str(error) if is_expected else f"{type(error).__name__}: {error}"
    log.error("%s is skipped: %s", run_id, why, exc_info=None if is_expected else error)
    collected.skipped[run_id] = why


def _mirrors(config: RunConfig) -> list[tuple[str, str]]:
    """Names of regions, joined by commas, and the address of the mirror they share."""
    urls = {name: spec.mirror for name, spec in config.rollout.regions.items() if spec.mirror}
    return [
        (", ".join(name for name, each in urls.items() if each == url), url)
        for url in dict.fromkeys(urls.values())
    ]


def _reasons(title: str, reasons: Mapping[str, str]) -> list[str]:
    """A titled Markdown list of names and reasons; nothing for none."""
    if not reasons:
        return []
    items = (
        f"- {terminal_text.markdown(name)}: {terminal_text.markdown(why)}"
        for name, why in reasons.items()
    )
    return ["", f"**{title}**", "", *items]
