import re

from storage import layout
from tasks.reports.page import SeenObjects, render_report
from tests.support.runs.small_run import RUN_ID, SmallRun


def failures(small_run: SmallRun, seen: SeenObjects | None = None) -> list[str]:
    page = render_report(small_run.run, RUN_ID, seen)
    return re.findall(r'<p class="failed">([^<]*)</p>', page)


def trained_run(name: str, steps: int = 3) -> SmallRun:
    """A run whose solver has made `steps` steps, and has the next batch."""
    small_run = SmallRun(name)
    small_run.version("solver", 0)
    for step in range(1, steps + 1):
        small_run.batch("solver", step)
        small_run.version("solver", step)
    small_run.batch("solver", steps + 1)
    for number in range(7):
        small_run.order(number)
        small_run.shard(number)
    return small_run


def test_an_undamaged_run_leaves_out_nothing_before_its_first_version_and_while_it_goes_on() -> (
    None
):
    assert failures(SmallRun("left-out-new")) == []
    assert failures(trained_run("left-out-none")) == []


def test_a_report_names_the_shards_and_the_steps_that_it_leaves_out() -> None:
    small_run, seen = trained_run("left-out-some"), SeenObjects()
    assert failures(small_run, seen) == []
    small_run.run.put(layout.shard(4), b"x")
    small_run.run.put(layout.batch("solver", 2), b"x")
    small_run.run.put(layout.manifest(layout.weights("solver", 0)), b"x")
    expected = [
        f"this page leaves out the unreadable shard 4: see `astraflow verify {RUN_ID}`",
        "this page leaves out the batch or the version of steps 0, 2 of solver, which is "
        f"unreadable or missing: see `astraflow verify {RUN_ID}`",
    ]
    assert failures(small_run) == expected
    assert failures(small_run, seen) == [], "it has read them before they were damaged"


def test_a_report_names_few_of_many_damaged_shards() -> None:
    small_run = trained_run("left-out-many")
    for number in range(7):
        small_run.run.put(layout.shard(number), b"x")
    assert failures(small_run) == [
        "this page leaves out the unreadable shards 0, 1, 2, 3, 4 and 2 more: see `astraflow "
        f"verify {RUN_ID}`"
    ]
