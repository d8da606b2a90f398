import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prefect.exceptions import ParameterTypeError
from prefect.logging import disable_run_logger

from flows import run_gc
from rollout.config import RegionConfig
from storage import layout
from storage.errors import ConfigError, CorruptError, NotFoundError, TransientError
from storage.formats import json_objects
from storage.records.control import Stop
from storage.records.weights import HostTensor
from storage.run import evaluations, runs
from storage.store.local import LocalFiles
from storage.store.object_store import ObjectStore, open_store
from storage.weights import manifests, publisher, reader, replication, retention
from storage.weights.manifests import LoadedWeights
from storage.weights.retention import Retention
from tasks.maintenance import garbage_collection
from tasks.recipes import loader
from tasks.recipes.run_config import RunConfig
from tests.support.runs import builders
from tests.support.runs.builders import mirror_next
from tests.support.runs.evaluations import evaluation
from tests.support.stores.strange_objects import strange, take_place
from trainer.losses.reference_kl import ReferenceKl

LAST = 9
WANTED = Retention(last=2, every=0, grace_s=0.0)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "home"))


def make_run(
    store: ObjectStore, run_id: str, mirror: Path | None = None
) -> tuple[ObjectStore, RunConfig]:
    """Versions 0 to `LAST` of a solver, each an anchor, of which the first is evaluated."""
    overrides = {} if mirror is None else {"rollout.regions.eu-west.mirror": str(mirror)}
    config = loader.load("single_policy_tiny", {"evaluation": None, **overrides})
    run = runs.create_run(store, run_id, config.model_dump(mode="json"))
    for version in range(LAST + 1):
        publisher.publish(run, "solver", version, builders.tensors(version))
    return run, config


def copy_all(run: ObjectStore, mirror: Path) -> ObjectStore:
    copy = replication.of_run(run, str(mirror))
    while mirror_next(run, copy) is not None:
        pass
    return copy


def data(store: ObjectStore) -> list[int]:
    """Versions whose data exist."""
    keys = store.list("weights/solver")
    return sorted({int(key.split("/")[2]) for key in keys if key.endswith(".safetensors")})


def test_a_dry_run_changes_nothing_and_its_plan_is_executed_at_home_then_in_the_mirror(
    store: ObjectStore, tmp_path: Path
) -> None:
    run, config = make_run(store, "one", tmp_path / "eu")
    mirror = copy_all(run, tmp_path / "eu")
    result = garbage_collection.survey(run, "one", config, WANTED)
    assert data(run) == data(mirror) == list(range(LAST + 1))
    assert result.mirrors[0].name == "eu-west"
    assert result.num_bytes == 2 * result.home.num_bytes > 0
    assert garbage_collection.remove(result) == {}
    assert data(run) == data(mirror) == [0, LAST - 1, LAST]
    key = layout.retired("solver", 3)
    assert mirror.get(key) == run.get(key)
    assert manifests.exists(mirror, "solver", 3)  # manifests stay
    again = garbage_collection.survey(run, "one", config, WANTED)
    assert (again.num_bytes, again.home.plans[0].retired, again.mirrors[0].plans[0].retired) == (
        0,
        {},
        {},
    )


def test_a_named_version_whose_data_is_deleted_is_said(
    store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    make_run(store, "one")
    garbage_collection.collect(store, ["one"], WANTED, [], apply=True)
    assert "cannot be kept" not in caplog.text
    keep = ["solver@3", f"solver@{LAST}"]
    collected = garbage_collection.collect(store, ["one"], WANTED, keep, apply=True)
    assert collected.surveys[0].lost == ["solver@3 cannot be kept: an earlier gc deleted its data"]
    assert "one: solver@3 cannot be kept: an earlier gc deleted its data" in caplog.text


def test_the_reference_of_a_trainer_is_kept(store: ObjectStore) -> None:
    run, config = make_run(store, "one")
    policy = config.policies["solver"]
    train = policy.train.model_copy(update={"reference": ReferenceKl(version=3)})
    policies = {"solver": policy.model_copy(update={"train": train})}
    referring = config.model_copy(update={"policies": policies})
    garbage_collection.remove(garbage_collection.survey(run, "one", referring, WANTED))
    assert data(run) == [0, 3, LAST - 1, LAST]


def test_versions_that_are_still_to_be_evaluated_are_kept(store: ObjectStore) -> None:
    run, _ = make_run(store, "one")
    config = loader.load("single_policy_tiny", {"steps": LAST, "evaluation.every": 3})
    evaluations.create(run, evaluation({"solver": 3}))
    garbage_collection.remove(garbage_collection.survey(run, "one", config, WANTED))
    assert data(run) == [0, 6, LAST - 1, LAST]


@pytest.mark.parametrize(("steps", "due"), [(1_000_000, LAST + 17), (LAST, LAST + 1), (3, 4)])
def test_evaluations_are_looked_for_of_versions_that_exist_or_will_soon(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, steps: int, due: int
) -> None:
    run, _ = make_run(store, "one")
    config = loader.load("single_policy_tiny", {"steps": steps, "evaluation.every": 1})
    looked_for: list[Mapping[str, int]] = []
    monkeypatch.setattr(evaluations, "exists", lambda _, vector: looked_for.append(vector))
    garbage_collection.survey(run, "one", config, WANTED)
    assert looked_for == [{"solver": version} for version in range(due)]


def test_stray_versions_of_high_numbers_make_no_long_search_for_evaluations(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = make_run(store, "one")
    config = loader.load("single_policy_tiny", {"steps": 1_000_000, "evaluation.every": 1})
    for exponent in range(21):  # where a search that doubles its stride looks
        run.put(layout.manifest(layout.weights("solver", 2**exponent - 1)), b"{}")
    looked_for: list[Mapping[str, int]] = []
    monkeypatch.setattr(evaluations, "exists", lambda _, vector: looked_for.append(vector))
    with pytest.raises(CorruptError, match="is missing, version 1048575 exists"):
        garbage_collection.survey(run, "one", config, WANTED)
    assert len(looked_for) < 100


def test_an_unreachable_mirror_is_reported_and_the_next_gc_finishes_it(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, config = make_run(store, "one", tmp_path / "eu")
    mirror = copy_all(run, tmp_path / "eu")
    listing = LocalFiles.list

    def away(self: LocalFiles, prefix: str, start_after: str) -> list[str]:
        if self.root == tmp_path / "eu":
            raise TransientError("no route to eu")
        return listing(self, prefix, start_after)

    monkeypatch.setattr(garbage_collection, "MIRROR_PATIENCE_S", 1e-6)
    monkeypatch.setattr(LocalFiles, "list", away)
    assert garbage_collection.remove(garbage_collection.survey(run, "one", config, WANTED)) == {
        "eu-west": "no route to eu"
    }
    assert data(run) == [0, LAST - 1, LAST]
    monkeypatch.undo()
    assert data(mirror) == list(range(LAST + 1))
    later = garbage_collection.survey(
        run, "one", config, Retention(last=LAST, grace_s=0.0)
    )  # nothing more is deleted at home
    assert later.home.num_bytes == 0 < later.mirrors[0].num_bytes
    assert garbage_collection.remove(later) == {}
    assert data(mirror) == [0, LAST - 1, LAST]


def test_the_home_of_another_run_is_no_mirror_and_loses_nothing(
    store: ObjectStore, tmp_path: Path
) -> None:
    other, _ = make_run(open_store(str(tmp_path / "other")), "one")
    run, config = make_run(store, "one", tmp_path / "other")
    surveyed = garbage_collection.survey(run, "one", config, WANTED)
    (reason,) = garbage_collection.remove(surveyed).values()
    assert reason.startswith(f"{other.address} has a run.json: it is the home of a run")
    assert data(other) == list(range(LAST + 1))


def test_a_mirror_that_fails_during_gc_is_reported(store: ObjectStore, tmp_path: Path) -> None:
    run, config = make_run(store, "one", tmp_path / "eu")
    copy_all(run, tmp_path / "eu")
    result = garbage_collection.survey(run, "one", config, WANTED)
    (tmp_path / "eu").rename(tmp_path / "moved")
    (tmp_path / "eu").write_text("no folder")
    assert list(garbage_collection.remove(result)) == ["eu-west"]
    assert data(run) == [0, LAST - 1, LAST]


def test_a_version_that_fails_in_a_mirror_does_not_keep_the_others(
    store: ObjectStore, tmp_path: Path
) -> None:
    run, config = make_run(store, "one", tmp_path / "eu")
    mirror = copy_all(run, tmp_path / "eu")
    (tmp_path / "home/runs/one" / layout.retired("solver", 1)).mkdir()
    result = garbage_collection.survey(run, "one", config, WANTED)
    assert "is a folder where an object belongs" in garbage_collection.remove(result)["eu-west"]
    assert data(run) == [0, LAST - 1, LAST]
    assert data(mirror) == [0, 1, LAST - 1, LAST]


def test_a_mirror_keeps_versions_that_home_has_not_retired(
    store: ObjectStore, tmp_path: Path
) -> None:
    run, config = make_run(store, "one", tmp_path / "eu")
    mirror = copy_all(run, tmp_path / "eu")
    (place,) = garbage_collection.survey(run, "one", config, WANTED).mirrors
    with pytest.raises(NotFoundError):
        retention.retire_mirror(run, place.store, place.plans[0])
    assert data(mirror) == list(range(LAST + 1))


def test_a_mirror_shared_by_two_regions_is_counted_once(store: ObjectStore, tmp_path: Path) -> None:
    run, _ = make_run(store, "one")
    config = loader.load("single_policy_tiny")
    shared = RegionConfig(
        mirror=str(tmp_path / "eu")
    )  # a run started when recipes still accepted it
    regions = config.rollout.model_copy(update={"regions": {"us-east": shared, "eu-west": shared}})
    config = config.model_copy(update={"rollout": regions})
    copy_all(run, tmp_path / "eu")
    assert [
        place.name for place in garbage_collection.survey(run, "one", config, WANTED).mirrors
    ] == ["us-east, eu-west"]


def test_orphans_are_counted_and_deleted(store: ObjectStore, tmp_path: Path) -> None:
    run, config = make_run(store, "one")
    temporary = tmp_path / "home/runs/one/weights/solver/.tmp-1"
    temporary.write_bytes(b"half")
    os.utime(temporary, (0, 0))
    orphan = f"{layout.weights('solver', LAST)}/{'0' * 32}.model-00000.safetensors"
    retired = f"{layout.weights('solver', 3)}/{'0' * 32}.model-00000.safetensors"
    for key in (orphan, retired):
        run.put(key, b"cut off")
    runs.request_stop(run, Stop("completed", "all steps done", time.time()))
    result = garbage_collection.survey(run, "one", config, WANTED, now_s=time.time() + 2 * 86400.0)
    assert result.home.orphans == (orphan,)  # the other is deleted with its version
    assert [(row.what, row.goes, row.num_bytes) for row in garbage_collection.rows(result)][1:] == [
        ("files that nothing names", "1 file", 0),
        ("unfinished files", "1 file", 4),
    ]
    assert temporary.exists()
    garbage_collection.remove(result)
    assert not temporary.exists()
    assert not run.exists(orphan)
    assert not run.exists(retired)


def test_unreadable_runs_are_reported_and_the_others_are_processed(store: ObjectStore) -> None:
    messages: list[str] = []
    made = {
        run_id: make_run(store, run_id)[0]
        for run_id in ("sound", "torn", "strange", "damaged", "frozen")
    }
    made["torn"].put(layout.RUN, b"{}")
    made["damaged"].put(layout.manifest(layout.weights("solver", 4)), b"torn")
    made["strange"].delete(layout.RUN)
    runs.create_run(store, "strange", {"no": "recipe"})
    retention.freeze(made["frozen"])
    store.put("runs/no-run/notes.txt", b"")
    store.put("runs/lost+found/notes.txt", b"")
    done = garbage_collection.collect(store, [], WANTED, [], apply=True, say=messages.append)
    assert [found.run_id for found in done.surveys] == ["sound"]
    assert sorted(done.skipped) == ["damaged", "strange", "torn"]
    assert "weights/solver/00000004/manifest.json" in done.skipped["damaged"]
    assert "does not fit this release" in done.skipped["strange"]
    assert data(made["sound"]) == [0, LAST - 1, LAST]
    assert data(made["frozen"]) == list(range(LAST + 1))
    (words,) = messages
    assert words.startswith(
        "sound solver: keeps 0 (the base model), 8–9 (one of the newest 2); deletes 1–7, "
    )
    page = garbage_collection.markdown(done)
    assert "| sound | solver | 0: the base model; 8–9: one of the newest 2 | 1–7 | " in page
    assert "- damaged: " in page


class ShortOfMemory(LocalFiles):
    """A backend that raises an error of Python at the objects of one run."""

    def read(self, path: str) -> bytes:
        if path in ("runs/config/run.json", "runs/manifest/weights/solver/00000004/manifest.json"):
            raise MemoryError(path)
        return super().read(path)


def test_an_unexpected_error_of_one_run_is_reported_and_the_others_are_processed(
    store: ObjectStore, tmp_path: Path
) -> None:
    made = {run_id: make_run(store, run_id)[0] for run_id in ("config", "manifest", "sound")}
    short = replace(store, backend=ShortOfMemory(tmp_path / "home"))
    done = garbage_collection.collect(short, [], WANTED, [], apply=True)
    assert done.skipped == {
        "config": "MemoryError: runs/config/run.json",
        "manifest": "MemoryError: runs/manifest/weights/solver/00000004/manifest.json",
    }
    assert data(made["sound"]) == [0, LAST - 1, LAST]
    assert data(made["config"]) == data(made["manifest"]) == list(range(LAST + 1))


def test_a_base_out_of_range_skips_its_run_alone(store: ObjectStore) -> None:
    other, _ = make_run(store, "other")
    sound, _ = make_run(store, "sound")
    key = layout.manifest(layout.weights("solver", LAST))
    manifest = manifests.read_manifest(other, "solver", LAST)
    other.put(key, json_objects.seal(replace(manifest, kind="delta", base=10**9)))
    done = garbage_collection.collect(store, [], WANTED, [], apply=True)
    assert done.skipped == {
        "other": f"{key}: version {LAST} of solver is a delta to version 1000000000, which is not "
        "the one before; put a good copy of it back"
    }
    assert (data(other), data(sound)) == (list(range(LAST + 1)), [0, LAST - 1, LAST])


def test_an_anchor_is_verified_before_the_versions_below_it_are_deleted(
    store: ObjectStore,
) -> None:
    run, _ = make_run(store, "one")
    loaded: LoadedWeights | None = None
    for version in (LAST + 1, LAST + 2):
        large = {"w": HostTensor("U8", (4000,), np.full(4000, version % 2, np.uint8))}
        large["w"].bits[version:] = 7
        manifest = publisher.publish(run, "solver", version, large, base=loaded, anchor=True)
        loaded = LoadedWeights(manifest, large)
    assert manifest.step is not None
    key = f"{layout.weights('solver', LAST + 2)}/{manifest.files[0].name}"
    body = run.get(key)
    run.put(key, body[:-1] + bytes([body[-1] ^ 1]))
    newest = Retention(last=1, every=0, grace_s=0.0)
    for apply, last_retired in ((False, LAST + 1), (True, LAST)):
        done = garbage_collection.collect(store, ["one"], newest, [], apply=apply)
        retired = done.surveys[0].home.plans[0].retired
        assert list(retired) == list(range(1, last_retired + 1))
    assert data(run) == [0, LAST + 1, LAST + 2]
    assert reader.fetch(run, "solver", LAST + 2)["w"].bits.tolist() == large["w"].bits.tolist()


def test_a_dry_run_deletes_nothing_and_is_marked_as_such(store: ObjectStore) -> None:
    run, _ = make_run(store, "one")
    done = garbage_collection.collect(store, [], WANTED, [], apply=False)
    assert data(run) == list(range(LAST + 1))
    assert "nothing was deleted" in garbage_collection.markdown(done)
    assert (
        next(garbage_collection.rows(done.surveys[0]))
        .words(applied=False)
        .startswith("one solver: keeps 0 (the base model), 8–9 ")
    )


def test_a_frozen_run_given_by_name_is_refused(store: ObjectStore) -> None:
    run, _ = make_run(store, "one")
    retention.freeze(run)
    done = garbage_collection.collect(store, ["one", "unknown"], WANTED, [], apply=True)
    assert "is frozen; thaw it first" in done.skipped["one"]
    assert "there is no run 'unknown'" in done.skipped["unknown"]
    assert data(run) == list(range(LAST + 1))


def test_a_version_to_keep_applies_to_every_run_with_its_policy_and_an_unknown_one_stops_gc(
    store: ObjectStore,
) -> None:
    item, _ = make_run(store, "one")
    two, _ = make_run(store, "two")
    with pytest.raises(ConfigError, match="'slover@4' names no version"):
        garbage_collection.collect(store, [], WANTED, ["slover@4"], apply=True)
    assert data(item) == data(two) == list(range(LAST + 1))
    garbage_collection.collect(store, [], WANTED, ["solver@4"], apply=True)
    assert data(item) == data(two) == [0, 4, LAST - 1, LAST]


def test_a_version_to_keep_that_some_runs_lack_stops_none_of_them(
    store: ObjectStore,
) -> None:
    short, _ = make_run(store, "short")
    long, _ = make_run(store, "long")
    publisher.publish(long, "solver", LAST + 1, builders.tensors(LAST + 1))
    publisher.publish(long, "solver", LAST + 2, builders.tensors(LAST + 2))
    done = garbage_collection.collect(
        store, [], Retention(last=1, every=0, grace_s=0.0), [f"solver@{LAST + 1}"], apply=True
    )
    assert done.skipped == {}
    assert data(short) == [0, LAST]
    assert data(long) == [0, LAST + 1, LAST + 2]


def test_the_flow_writes_its_table_and_fails_with_the_skipped_runs(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = make_run(store, "sound")
    torn, _ = make_run(store, "torn")
    torn.put(layout.RUN, b"{}")
    pages: list[str] = []
    monkeypatch.setenv("ASTRAFLOW_STORE", store.url)
    monkeypatch.setattr(
        run_gc, "create_markdown_artifact", lambda markdown, **_: pages.append(markdown)
    )
    with disable_run_logger():
        ended = run_gc.gc.fn(last=2, every=0, grace_h=0.0)
    assert ended is not None
    assert ended.is_failed()
    assert str(ended.message).startswith("torn is skipped: ")
    assert "| sound | solver |" in pages[0]
    assert data(run) == list(range(LAST + 1))
    with disable_run_logger():
        assert run_gc.gc.fn(run_ids=["sound"], last=2, every=0, grace_h=0.0, apply=True) is None
    assert data(run) == [0, LAST - 1, LAST]


@pytest.mark.parametrize("given", [{"last": 0}, {"every": -1}, {"grace_h": -0.5}])
def test_the_flow_refuses_invalid_numbers(given: dict[str, float]) -> None:
    with pytest.raises(ParameterTypeError):
        run_gc.gc.validate_parameters(given)


@pytest.mark.parametrize("grace_h", [1e306, float("inf")])
def test_the_flow_ends_as_failed_for_a_grace_period_without_end(grace_h: float) -> None:
    with disable_run_logger():
        ended = run_gc.gc.fn(grace_h=grace_h)
    assert ended is not None
    assert ended.is_failed()
    assert "younger than inf s" in str(ended.message)


def test_versions_of_a_finished_run_are_retired(store: ObjectStore) -> None:
    run, config = make_run(store, "one")
    runs.request_stop(run, Stop("completed", "all steps done", 1.0))
    garbage_collection.remove(garbage_collection.survey(run, "one", config, WANTED))
    assert data(run) == [0, LAST - 1, LAST]


def test_a_reason_in_the_artifact_is_text_and_not_markdown() -> None:
    done = garbage_collection.Collected(
        applied=True, skipped={"tiny-1": "![x](http://evil) | <img src=x>\n# forged"}
    )
    assert (
        garbage_collection.markdown(done).splitlines()[-1]
        == r"- tiny-1: \!\[x\]\(http://evil\) \| \<img src=x\> \# forged"
    )


PROTECTING = {
    "tags/best.json": r"tags/best\.json .*; what it keeps is not known: put it back, or remove it with `astraflow tag RUN",
    "tags": "tags .*; which versions are tagged is not known",
    "heartbeats/rollout/rollout-0.json": r"rollout-0\.json .*; which versions its writer has loaded is not known",
    "heartbeats/evaluation": "heartbeats/evaluation is not a folder, .*; which versions its writer has loaded is not known",
    "heartbeats": "heartbeats .*; which versions are loaded is not known",
    "frozen.json": "is frozen; thaw it first",
}


@pytest.mark.parametrize(("key", "make"), strange(PROTECTING))
def test_an_unreadable_tag_or_heartbeat_keeps_all_versions_of_its_run_only(
    store: ObjectStore, tmp_path: Path, key: str, make: Callable[[Path], None]
) -> None:
    hidden, _ = make_run(store, "hidden")
    sound, _ = make_run(store, "sound")
    take_place(tmp_path / "home/runs/hidden" / key, make)
    done = garbage_collection.collect(store, ["hidden", "sound"], WANTED, [], apply=True)
    assert data(hidden) == list(range(LAST + 1))
    assert data(sound) == [0, LAST - 1, LAST]
    assert list(done.skipped) == ["hidden"]
    assert re.search(PROTECTING[key], done.skipped["hidden"])
    assert (
        garbage_collection.collect(store, [], WANTED, [], apply=True).surveys[-1].run_id == "sound"
    )
    assert data(hidden) == list(range(LAST + 1))
