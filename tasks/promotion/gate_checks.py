"""Checks of the section `gate` of a recipe, so that no contest is played that cannot be judged.

They are repeated when a stored run is compared, whose recipe may have no section `gate`.
"""

from collections.abc import Iterator

from data_ops.prompts.window import WindowPrompts
from storage import layout, plain_names
from storage.errors import ConfigError
from storage.promotion.outcomes import EPISODES_MAX
from tasks.promotion.gate.custom import CustomGateTest
from tasks.promotion.gate.mcnemar import McNemar
from tasks.promotion.gate.outcomes import POOLED
from tasks.recipes.run_config import HELD_OUT_MAX, ContestConfig, EvaluationConfig, RunConfig
from tasks.recipes.yaml_file import KeyPath


def faults(config: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yield what is wrong with the section `gate`, and where."""
    if config.gate is None:
        return
    if config.evaluation is None:
        yield (
            ("gate",),
            "compares the best evaluated version, and the recipe has no evaluation; add the "
            "section evaluation, or remove gate",
        )
        return
    yield from _names(config.gate, config.evaluation)
    yield from _sizes(config.gate, config.evaluation)
    if isinstance(config.gate.test, McNemar) and config.gate.samples > 1:
        yield (
            ("gate", "samples"),
            f"the test mcnemar compares right and wrong answers, and {config.gate.samples} samples "
            "of a problem have a mean; set samples: 1, or test: paired_bootstrap",
        )
    if isinstance(config.gate.test, CustomGateTest):
        try:
            config.gate.test.find()
        except ConfigError as error:
            yield ("gate", "test"), str(error)


def without_effect(config: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yield the limits of losses that limit nothing: a data set that must gain has none."""
    gate = config.gate
    if gate is None or config.evaluation is None:
        return
    names = list(gate.datasets) or [config.evaluation.dataset]
    gaining = gate.gaining(names)
    if gaining in gate.max_loss_on:
        yield (
            ("gate", "max_loss_on", gaining),
            f"has no effect: {gaining} must gain, by min_gain; leave it out, or name another data "
            "set in gain_on",
        )
    if {gaining, *gate.max_loss_on}.issuperset(names):
        yield (
            ("gate", "max_loss"),
            "has no effect: each data set must gain, by min_gain, or has its own in max_loss_on; "
            "leave it out",
        )


def _names(gate: ContestConfig, evaluation: EvaluationConfig) -> Iterator[tuple[KeyPath, str]]:
    for name, source in gate.datasets.items():
        if isinstance(source, WindowPrompts):
            yield (
                ("gate", "datasets", name),
                "is a data window, which is frozen with a run, and the champion is of another one; "
                "name a file",
            )
        if not layout.NAME.fullmatch(name):
            yield (
                ("gate", "datasets", name),
                "a data set has a name of up to 100 letters, digits, - and _, a letter or digit "
                "first; rename it",
            )
    names = list(gate.datasets) or [evaluation.dataset]
    if POOLED in names:
        yield (
            ("gate", "datasets", POOLED) if gate.datasets else ("evaluation", "dataset"),
            f"{POOLED} names all data sets of the gate together; choose another name",
        )
    settings: list[tuple[KeyPath, str]] = [
        (("gate", "max_loss_on", name), name) for name in gate.max_loss_on
    ]
    if gate.gain_on != POOLED:
        settings.append((("gate", "gain_on"), gate.gain_on))
    for path, name in settings:
        if name not in names:
            yield path, f"the gate has no data set {name!r}; it has {plain_names.listed(names)}"


def _sizes(gate: ContestConfig, evaluation: EvaluationConfig) -> Iterator[tuple[KeyPath, str]]:
    """Check the numbers of problems that are known without reading them: limits of sources."""
    sources: dict[KeyPath, int | None] = {
        ("gate", "datasets", name): source.limit for name, source in gate.datasets.items()
    }
    for path, limit in (sources or {("evaluation", "prompts"): evaluation.prompts.limit}).items():
        if limit is None:
            continue
        if limit < gate.min_problems:
            yield (
                (*path, "limit"),
                f"{limit} problems are fewer than gate.min_problems, {gate.min_problems}, so that "
                "nothing would be promoted; raise limit, or lower min_problems",
            )
        if limit * gate.samples > EPISODES_MAX:
            yield (
                ("gate", "samples") if gate.samples > 1 else (*path, "limit"),
                f"{limit:,} problems with {gate.samples:,} samples each are "
                f"{limit * gate.samples:,} episodes of each team, and at most {EPISODES_MAX:,} are "
                "played; lower limit or samples",
            )
    if (total := sum(limit or 0 for limit in sources.values())) > HELD_OUT_MAX:
        yield (
            ("gate", "datasets"),
            f"have {total:,} problems together, and at most {HELD_OUT_MAX:,} are played; lower "
            "limits, or name fewer data sets",
        )
