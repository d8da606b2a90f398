import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.ocean import __main__ as command
from benchmarks.ocean import figures, link, measurement, services
from benchmarks.ocean.figures import VersionTimes

FAR, HOME = "10.99.0.1", "10.99.0.2"


def step(seconds: float, exact: bool = True, publish_s: float = 0.5) -> VersionTimes:
    stages = {
        "publish": publish_s,
        "mirror": 0.0,
        "wait": 0.0,
        "probe": 0.25,
        "read": seconds - publish_s - 0.25,
    }
    return VersionTimes(
        seconds=seconds,
        stages=stages,
        bytes_crossed=5_000_000,
        requests=7,
        connections=2,
        trainer_cpu_s=0.5,
        worker_cpu_s=0.25,
        busy=0.75,
        bit_exact=exact,
    )


def found(changed: float = 0.01, seconds: float = 1.75) -> Any:
    item = figures.case({"format": "delta", "workers": 4, "mirror": True}, [step(seconds)])
    settings = vars(command.parse(["--changed", str(changed)]))
    machine = {"cpus": 2, "cpu": "a fast one", "kernel": "6", "load_before": 0.5}
    return {
        "cases": [item],
        "target": {"met": [seconds <= 2]},
        "bit_exact": True,
        "settings": settings,
        "machine": machine,
    }


def test_the_stages_of_a_version_add_up_to_the_time_until_it_is_loaded() -> None:
    worker = {"polled_s": 11.25, "noticed_s": 11.5, "loaded_s": 12.0}
    parts = figures.stages(10.0, 11.0, 11.0, worker)
    assert parts == {"publish": 1.0, "mirror": 0.0, "wait": 0.25, "probe": 0.25, "read": 0.5}


def test_a_poll_that_began_before_the_version_existed_is_all_probe() -> None:
    parts = figures.stages(
        10.0, 11.0, 11.0, {"polled_s": 10.9, "noticed_s": 11.5, "loaded_s": 12.0}
    )
    assert parts == {"publish": 1.0, "mirror": 0.0, "wait": 0.0, "probe": 0.5, "read": 0.5}


def test_the_time_of_a_mirror_is_a_separate_stage() -> None:
    worker = {"polled_s": 11.75, "noticed_s": 12.0, "loaded_s": 12.5}
    assert figures.stages(10.0, 11.0, 11.5, worker) == {
        "publish": 1.0,
        "mirror": 0.5,
        "wait": 0.25,
        "probe": 0.25,
        "read": 0.5,
    }


def test_a_worker_that_skips_a_late_mirror_counts_its_wait_as_mirror_time() -> None:
    parts = figures.stages(
        10.0, 11.0, float("inf"), {"polled_s": 20.0, "noticed_s": 21.0, "loaded_s": 22.0}
    )
    assert parts == {"publish": 1.0, "mirror": 10.0, "wait": 0.0, "probe": 0.0, "read": 1.0}


def test_a_case_has_the_numbers_of_its_median_step_and_the_seconds_of_each_step() -> None:
    item = figures.case({"format": "delta"}, [step(3.0), step(1.0), step(2.0, publish_s=0.25)])
    assert (item["format"], item["seconds"], item["every_step_s"]) == (
        "delta",
        2.0,
        [3.0, 1.0, 2.0],
    )
    assert item["stages"]["publish"] == 0.25


def test_a_case_with_an_inexact_step_is_inexact() -> None:
    assert not figures.case({}, [step(1.0), step(2.0, exact=False)])["bit_exact"]


def test_only_requests_of_the_far_side_after_publication_are_counted() -> None:
    served = [
        (1.0, 1.1, 1, FAR, "HEAD", "/b/k", 404, 0),  # a poll before the publication
        (2.1, 2.2, 1, FAR, "HEAD", "/b/k", 200, 0),
        (2.1, 2.2, 2, FAR, "GET", "/b/k", 200, 9),
        (2.1, 2.2, 3, FAR, "GET", "/b/k", 200, 9),
        (2.1, 2.2, 4, HOME, "PUT", "/b/k", 200, 9),
    ]
    counted = {3}
    assert figures.over_the_ocean(served, 2.0, counted) == (3, 1)
    assert counted == {1, 2, 3}


def test_a_short_run_of_the_table_shows_all_numbers_of_a_case() -> None:
    lines = figures.table(found()).splitlines()
    head, row = (
        line for line in lines if ("delta " in line and "=" in line) or line.startswith("format")
    )
    assert head.split() == [
        *("format", "workers", "mirror", "seconds", "="),
        *(
            "publish",
            "+",
            "mirror",
            "+",
            "wait",
            "+",
            "probe",
            "+",
            "read",
            "MB",
            "requests",
            "new",
            "CPU",
            "s",
            "busy",
        ),
    ]
    assert row.split() == [
        *("delta", "4", "yes", "1.75", "="),
        *(
            "0.50",
            "+",
            "0.00",
            "+",
            "0.00",
            "+",
            "0.25",
            "+",
            "1.00",
            "5.0",
            "7",
            "2",
            "0.25",
            "75%",
        ),
    ]
    assert "bit exact: True" in lines


def test_only_the_deltas_of_the_target_are_shown() -> None:
    assert "a delta within 2 s: 1 of 1 settings, 1.75 to 1.75 s" in figures.table(found())
    assert "a delta within 2 s: 0 of 1 settings, 2.50 to 2.50 s" in figures.table(
        found(seconds=2.5)
    )
    assert "a delta within" not in figures.table(found(changed=0.1))


def test_the_defaults_are_the_case_of_the_published_target() -> None:
    settings = command.parse([])
    assert (settings.model_gb, settings.changed, settings.workers) == (1.0, 0.01, [1, 4])
    assert (settings.rtt_ms, settings.gbps, settings.formats) == (
        300.0,
        4.0,
        ["delta", "anchor", "plain"],
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--workers", "0"],
        ["--workers", "x"],
        ["--formats", "zip"],
        ["--changed", "1"],
        ["--rtt-ms", "0"],
        ["--steps", "0"],
    ],
)
def test_settings_without_a_measurement_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.parse(arguments)
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_the_settings_of_a_run_can_be_printed_as_json() -> None:
    assert (
        json.loads(json.dumps(measurement.shown(command.parse(["--wan", "a/b.sh"]))))["wan"]
        == "a/b.sh"
    )


def test_without_root_the_benchmark_exits_with_2_and_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(link.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(command.sys, "argv", ["ocean"])
    with pytest.raises(SystemExit) as stopped:
        command.main()
    assert stopped.value.code == 2
    assert "run this as root" in capsys.readouterr().err


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the commands that would run as root; netem is missing, and no namespace exists."""
    run: list[list[str]] = []

    def record(command: list[str]) -> str:
        run.append(command)
        if command[0] == "tc":
            raise link.LinkError("Specified qdisc kind is unknown")
        return ""

    monkeypatch.setattr(link, "_run", record)
    monkeypatch.setattr(link, "_remove", lambda: run.append(["removed"]))
    monkeypatch.setattr(link.os, "geteuid", lambda: 0)
    return run


def test_without_netem_the_script_creates_and_removes_the_link(
    commands: list[list[str]], tmp_path: Path
) -> None:
    script = tmp_path / "wan.sh"
    script.touch()
    with pytest.raises(KeyboardInterrupt), link.emulated(300, 4, script):
        raise KeyboardInterrupt
    assert commands[-3:] == [
        ["removed"],
        [str(script), "up", "150", "4", "64"],
        [str(script), "down"],
    ]


def test_without_netem_and_script_the_error_names_the_option(
    commands: list[list[str]], tmp_path: Path
) -> None:
    with pytest.raises(link.LinkError, match="--wan"), link.emulated(300, 4, tmp_path / "none.sh"):
        pass
    assert commands[-1] == ["removed"]


def test_existing_namespaces_are_not_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(link, "_run", lambda command: ran.append(command) or "astra-home (id: 1)\n")
    monkeypatch.setattr(link.os, "geteuid", lambda: 0)
    with (
        pytest.raises(link.LinkError, match="astra-home exists already"),
        link.emulated(300, 4, tmp_path),
    ):
        pass
    assert ran == [["ip", "netns", "list"]]


def test_a_flat_model_is_split_into_tensors_and_joined_again() -> None:
    bits = np.arange(10_007, dtype=np.uint16)
    tensors = services.as_tensors(bits)
    assert list(tensors) == list(services.sizes(len(bits)))
    assert (services.as_flat(dict(sorted(tensors.items(), reverse=True))) == bits).all()
