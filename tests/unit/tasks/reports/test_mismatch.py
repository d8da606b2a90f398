"""The mismatch in the report: from the metrics of manifests to lines and one headline."""

import re

from storage.run import runs
from tasks.monitoring.training_curves import read_history
from tasks.reports import mismatch
from tasks.reports.page import render_report
from tests.support.runs.small_run import RUN_ID, SmallRun
from tests.unit.tasks.reports.test_report import text_of
from trainer.losses.mismatch import REGIONS_MAX

COLORS = {"solver": 0, "verifier": 1}
NAME = "mismatch/mean_abs"


def measured(name: str, regions: tuple[str, ...] = ("us-east", "eu")) -> SmallRun:
    """Steps 1 and 3 of the solver, and step 2 of the verifier, have tokens that are measured."""
    small_run = SmallRun(name)
    values: dict[tuple[str, int], float] = {
        ("solver", 1): 0.25,
        ("solver", 3): 0.5,
        ("verifier", 2): 0.125,
    }
    for policy in COLORS:
        small_run.version(policy, 0)
        for step in (1, 2, 3):
            small_run.batch(policy, step)
            metrics = {"loss": 1.0}
            if value := values.get((policy, step)):
                metrics |= {NAME: value, "mismatch/ratio_max": 2 + value}
                metrics |= {
                    f"{NAME}/{region}": value * index for index, region in enumerate(regions, 1)
                }
            small_run.version(policy, step, **metrics)
    return small_run


def test_each_policy_has_a_line_through_the_steps_that_were_measured() -> None:
    run = measured("mismatch-lines").run
    histories = [read_history(run, policy, 3) for policy in COLORS]
    mean, largest = mismatch.figures(histories, "sglang", COLORS)
    assert "rollout engine (sglang)" in mean.note
    assert re.findall(r"<title>([^<]*)", mean.svg) == [
        "solver at 1: 0.25",
        "solver at 3: 0.5",
        "solver, eu at 1: 0.5",
        "solver, eu at 3: 1",
        "solver, us-east at 1: 0.25",
        "solver, us-east at 3: 0.5",
        "verifier at 2: 0.125",
        "verifier, eu at 2: 0.25",
        "verifier, us-east at 2: 0.125",
    ]
    assert re.findall(r"<title>([^<]*)", largest.svg) == [
        "solver at 1: 2.25",
        "solver at 3: 2.5",
        "verifier at 2: 2.125",
    ]


def test_a_single_region_has_no_line_of_its_own() -> None:
    run = measured("mismatch-alone", regions=("eu",)).run
    mean, _ = mismatch.figures([read_history(run, "solver", 3)], "torch", COLORS)
    assert "eu" not in mean.svg


def test_only_the_regions_with_the_most_steps_have_lines() -> None:
    regions = tuple(f"r{index:02}" for index in range(REGIONS_MAX + 4))
    small_run = measured("mismatch-regions", regions=regions)
    small_run.batch("solver", 4)
    small_run.version("solver", 4, **{f"{NAME}/{region}": 9.0 for region in regions[4:]})
    mean, _ = mismatch.figures([read_history(small_run.run, "solver", 4)], "torch", COLORS)
    shown = set(re.findall(r"<title>solver, (r\d+) at", mean.svg))
    assert shown == set(regions[4:])


def test_the_headline_is_the_newest_mismatch_of_each_policy() -> None:
    run = measured("mismatch-headline").run
    histories = [read_history(run, policy, 3) for policy in COLORS]
    assert mismatch.headline(histories, "torch") == mismatch.Headline(
        "0.5", "mean |Δ log p| of torch and trainer: solver 0.5, verifier 0.125"
    )


def test_a_run_without_measured_tokens_shows_no_mismatch() -> None:
    small_run = SmallRun("mismatch-none")
    small_run.version("solver", 0)
    small_run.version("solver", 1, loss=1.0)
    histories = [read_history(small_run.run, "solver", 1)]
    assert mismatch.figures(histories, "torch", COLORS) == []
    assert mismatch.headline(histories, "torch") is None
    assert "Mismatch of sampler" not in text_of(render_report(small_run.run, RUN_ID))


def test_the_report_has_the_figures_and_the_headline() -> None:
    small_run = measured("mismatch-page")
    assert runs.read_run(small_run.run).run_id == RUN_ID
    text = text_of(render_report(small_run.run, RUN_ID))
    assert "mean |Δ log p| of torch and trainer: solver 0.5, verifier 0.125" in text
    assert "Mismatch of sampler and trainer" in text
    assert "Largest mismatch" in text


def test_no_more_regions_are_drawn_than_a_trainer_measures() -> None:
    small_run = SmallRun("mismatch-many-regions")
    for step in (0, 1, 2):
        # r00 to r39 in step 1; those from r10 on in step 2, too
        metrics = {f"{NAME}/r{index:02d}": 0.5 for index in range(10 * step - 10, 40)}
        small_run.version("solver", step, **{NAME: 0.5, **(metrics if step else {})})
    history = read_history(small_run.run, "solver", 2)
    (mean,) = mismatch.figures([history], "torch", COLORS)
    drawn = re.findall(r"<title>solver, (r\d\d) at 1:", mean.svg)
    assert drawn == [f"r{index}" for index in range(10, 26)]
