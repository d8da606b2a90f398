import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from storage import layout
from storage.errors import ConfigError, ConflictError, CorruptError, NotFoundError
from storage.formats import tensor_set
from storage.formats.safetensors import weights_digest
from storage.records.weights import HostTensor, TensorInfo
from storage.store.object_store import ObjectStore
from storage.verify.violations import Findings
from storage.verify.weights import WeightsAudit
from storage.weights import manifests, publisher, reader
from storage.weights.manifests import LoadedWeights
from tests.support.runs import builders
from tests.support.stores.damaging_store import damages_first_reads
from tests.support.stores.stranger import sealed


def test_a_published_version_is_fetched_bit_for_bit(memory_store: ObjectStore) -> None:
    publisher.publish(memory_store, "solver", 0, builders.tensors(4))
    loaded = reader.fetch(memory_store, "solver", 0)
    assert loaded["model.weight"].bits.tolist() == [[4, 5, 6], [7, 8, 9]]
    assert weights_digest(loaded) == weights_digest(builders.tensors(4))


def test_the_manifest_names_parent_batch_and_digests(memory_store: ObjectStore) -> None:
    base = publisher.publish(memory_store, "solver", 0, builders.tensors(0))
    assert (base.parent, base.batch, base.kind, base.base) == (None, None, "anchor", None)
    first = publisher.publish(
        memory_store, "solver", 1, builders.tensors(1), metrics={"trainer/loss": float("nan")}
    )
    assert (first.parent, first.batch) == (0, 1)
    assert first.digest == weights_digest(builders.tensors(1))
    read = manifests.read_manifest(memory_store, "solver", 1)
    assert (read.digest, read.write_id, read.tensors) == (
        first.digest,
        first.write_id,
        first.tensors,
    )
    assert (
        json.loads(memory_store.get("weights/solver/00000001/manifest.json"))["metrics"][
            "trainer/loss"
        ]
        == "NaN"
    )


def test_the_manifest_has_the_share_of_changed_elements(memory_store: ObjectStore) -> None:
    def share(policy: str, *sizes: int) -> float:
        """Publish tensors that all change in their first element."""
        old = {
            str(size): HostTensor("BF16", (size,), np.arange(size, dtype=np.uint16))
            for size in sizes
        }
        loaded = LoadedWeights(publisher.publish(memory_store, policy, 0, old), old)
        new = {
            name: HostTensor("BF16", item.shape, item.bits + (item.bits == 0))
            for name, item in old.items()
        }
        return publisher.publish(memory_store, policy, 1, new, base=loaded).metrics[
            "weights/changed"
        ]

    assert share("one", 1000) == 1 / 1000
    assert share("two", 1000, 600) == 2 / 1600
    assert share("none", 0) == 0.0


def test_the_second_writer_of_a_version_loses_and_the_first_version_stays(
    memory_store: ObjectStore,
) -> None:
    publisher.publish(memory_store, "solver", 0, builders.tensors(1))
    with pytest.raises(ConflictError, match="version 0 of solver is published already"):
        publisher.publish(memory_store, "solver", 0, builders.tensors(2))
    assert reader.fetch(memory_store, "solver", 0)["model.scale"].bits.tolist() == 1


def test_a_concurrent_writer_between_data_and_manifest_wins_completely(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = tensor_set.write

    def overtaken(*args: Any, **named: Any) -> object:
        contents = write(*args, **named)
        monkeypatch.setattr(tensor_set, "write", write)
        publisher.publish(memory_store, "solver", 0, builders.tensors(7))
        return contents

    monkeypatch.setattr(tensor_set, "write", overtaken)
    with pytest.raises(ConflictError):
        publisher.publish(memory_store, "solver", 0, builders.tensors(1))
    assert reader.fetch(memory_store, "solver", 0)["model.scale"].bits.tolist() == 7
    listed = [info.name for info in manifests.read_manifest(memory_store, "solver", 0).files]
    assert memory_store.list() == [
        f"weights/solver/00000000/{name}" for name in [*listed, "manifest.json"]
    ]


def test_a_version_without_tensors_is_refused(memory_store: ObjectStore) -> None:
    with pytest.raises(ConfigError, match="version 3 of solver would have no tensors"):
        publisher.publish(memory_store, "solver", 3, {}, extra_files={"config.json": b"{}"})
    assert memory_store.list() == []


def test_an_extra_file_with_the_name_of_a_tensor_file_is_refused(memory_store: ObjectStore) -> None:
    with pytest.raises(
        ConfigError, match=r"model-00000\.safetensors in .* would overwrite the tensors"
    ):
        publisher.publish(
            memory_store,
            "solver",
            0,
            builders.tensors(),
            extra_files={"model-00000.safetensors": b"not these"},
        )


def test_a_manifest_that_arrives_damaged_once_is_fetched_again(memory_store: ObjectStore) -> None:
    publisher.publish(memory_store, "solver", 0, builders.tensors(1))
    assert (
        reader.fetch(damages_first_reads(memory_store), "solver", 0)["model.scale"].bits.tolist()
        == 1
    )


def test_data_without_a_manifest_is_no_version(memory_store: ObjectStore) -> None:
    publisher.publish(memory_store, "solver", 0, builders.tensors())
    memory_store.delete("weights/solver/00000000/manifest.json")
    assert not manifests.exists(memory_store, "solver", 0)
    assert manifests.latest(memory_store, "solver") is None
    with pytest.raises(NotFoundError):
        reader.fetch(memory_store, "solver", 0)
    publisher.publish(memory_store, "solver", 0, builders.tensors(3))
    assert reader.fetch(memory_store, "solver", 0)["model.scale"].bits.tolist() == 3


def test_a_damaged_anchor_is_named_without_a_version_that_needs_it(
    memory_store: ObjectStore,
) -> None:
    manifest = publisher.publish(memory_store, "solver", 0, builders.tensors())
    memory_store.put(f"{layout.weights('solver', 0)}/{manifest.files[0].name}", b"x")
    with pytest.raises(
        CorruptError,
        match=r"^version 0 of solver cannot be read, whose chain is 0: .*; put the object back as",
    ):
        reader.fetch(memory_store, "solver", 0)


def test_the_latest_version_is_found_from_any_hint(memory_store: ObjectStore) -> None:
    assert manifests.latest(memory_store, "solver") is None
    for version in range(6):
        publisher.publish(memory_store, "solver", version, builders.tensors(version))
    assert [manifests.latest(memory_store, "solver", start) for start in range(7)] == [
        5,
        5,
        5,
        5,
        5,
        5,
        None,
    ]
    assert manifests.latest(memory_store, "verifier") is None


def test_the_extra_files_of_a_model_keep_their_names(memory_store: ObjectStore) -> None:
    files = {"config.json": b'{"a": 1}', "tokenizer.json": b"{}"}
    publisher.publish(memory_store, "solver", 0, builders.tensors(), extra_files=files)
    assert reader.fetch_files(memory_store, "solver") == files


def test_a_config_with_sizes_above_the_tensors_is_refused(memory_store: ObjectStore) -> None:
    files = {"config.json": b'{"num_hidden_layers": 1000000}'}
    publisher.publish(memory_store, "solver", 0, builders.tensors(), extra_files=files)
    with pytest.raises(CorruptError, match=r"config\.json of solver: num_hidden_layers is 1000000"):
        reader.fetch_files(memory_store, "solver")


def changed(store: ObjectStore, **fields: object) -> None:
    key = "weights/solver/00000000/manifest.json"
    store.put(key, sealed({**json.loads(store.get(key)), **fields}))


def test_a_manifest_at_a_wrong_key_is_corrupt(memory_store: ObjectStore) -> None:
    publisher.publish(memory_store, "solver", 0, builders.tensors())
    changed(memory_store, version=3)
    with pytest.raises(CorruptError, match="is the manifest of solver version 3"):
        manifests.read_manifest(memory_store, "solver", 0)


def test_a_manifest_with_a_wrong_weights_digest_is_corrupt(
    memory_store: ObjectStore,
) -> None:
    publisher.publish(memory_store, "solver", 0, builders.tensors())
    changed(memory_store, digest="sha256:00")
    with pytest.raises(CorruptError, match="do not give its own digest"):
        reader.fetch(memory_store, "solver", 0)


def test_an_unknown_kind_is_refused_with_a_list_of_kinds(
    memory_store: ObjectStore,
) -> None:
    publisher.publish(memory_store, "solver", 0, builders.tensors())
    changed(memory_store, kind="patch")
    for read in (manifests.read_manifest, reader.fetch):
        with pytest.raises(
            CorruptError,
            match=r"00000000/manifest\.json is not a Manifest: kind: .*'anchor' or 'delta'",
        ):
            read(memory_store, "solver", 0)


def test_a_first_version_that_is_a_delta_cannot_be_read(
    memory_store: ObjectStore,
) -> None:
    publisher.publish(memory_store, "solver", 0, builders.tensors())
    changed(memory_store, kind="delta", base=0)
    with pytest.raises(CorruptError, match="version 0 of solver is a delta"):
        reader.fetch(memory_store, "solver", 0)


STEP = {"tensors": {}, "files": []}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"kind": "delta", "base": 10**9},
            "version 2 of solver is a delta to version 1000000000, which is not the one before",
        ),
        (
            {"kind": "delta", "base": -5},
            "version 2 of solver is a delta to version -5, which is not the one before",
        ),
        (
            {"kind": "delta", "base": 0},
            "version 2 of solver is a delta to version 0, which is not the one before",
        ),
        (
            {"kind": "delta", "base": None},
            "version 2 of solver is a delta to version None, which is not the one before",
        ),
        ({"kind": "anchor", "base": 1}, "is an anchor and names the base 1; it has none"),
        (
            {"step": {"base": 0, **STEP}},
            "has a step from version 0; only an anchor has one, from the version before",
        ),
        (
            {"kind": "delta", "base": 1, "step": {"base": 1, **STEP}},
            "has a step from version 1; only an anchor has one",
        ),
    ],
)
def test_a_manifest_with_another_base_than_the_version_before_is_corrupt(
    memory_store: ObjectStore, fields: dict[str, object], message: str
) -> None:
    for version in range(3):
        publisher.publish(memory_store, "solver", version, builders.tensors(version))
    key = layout.manifest(layout.weights("solver", 2))
    memory_store.put(key, sealed({**json.loads(memory_store.get(key)), **fields}))
    with pytest.raises(CorruptError, match=message):
        manifests.read_manifest(memory_store, "solver", 2)
    findings = Findings()
    WeightsAudit(memory_store, "solver", findings).audit(-1, lambda what, share: None)
    assert [
        message in violation.what for violation in findings.violations() if violation.where == key
    ] == [True]


def test_a_first_version_with_a_step_is_corrupt(memory_store: ObjectStore) -> None:
    publisher.publish(memory_store, "solver", 0, builders.tensors())
    changed(memory_store, step={"base": -1, **STEP})
    with pytest.raises(CorruptError, match="has a step from version -1; only an anchor has one"):
        manifests.read_manifest(memory_store, "solver", 0)


W = "model.weight"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({W: {"file": ""}}, "lists the tensor 'model.weight' as a change, or in none of its files"),
        ({W: {"file": f"{'0' * 32}.model-00000.safetensors"}}, "or in none of its files"),
        ({W: {"source": W}}, "lists the tensor 'model.weight' as a change"),
        ({W: {"entry": "model.scale"}}, "as the same entry as another tensor"),
        ({W: {"dtype": "F64", "shape": [1000]}}, "in a file that is too small"),
        ({}, "is an anchor without tensors"),
    ],
)
def test_an_anchor_that_cannot_have_its_tensors_is_corrupt(
    memory_store: ObjectStore, fields: dict[str, Any], message: str
) -> None:
    manifest = publisher.publish(memory_store, "solver", 0, builders.tensors())
    infos: dict[str, Any] = {
        name: {**asdict(info), **fields.get(name, {})}
        for name, info in (manifest.tensors if fields else {}).items()
    }
    digest = weights_digest({name: TensorInfo(**info) for name, info in infos.items()})
    changed(memory_store, tensors=infos, digest=digest)
    with pytest.raises(CorruptError, match=message):
        manifests.read_manifest(memory_store, "solver", 0)


def test_tied_tensors_of_an_anchor_may_share_an_entry(memory_store: ObjectStore) -> None:
    manifest = publisher.publish(memory_store, "solver", 0, builders.tensors())
    infos = {**manifest.tensors, "tied": replace(manifest.tensors[W], entry=W)}
    tensors = {name: asdict(info) for name, info in infos.items()}
    changed(memory_store, tensors=tensors, digest=weights_digest(infos))
    read = reader.fetch(memory_store, "solver", 0)
    assert read["tied"].bits.tolist() == read[W].bits.tolist()


def put_manifests(run: ObjectStore, versions: Iterable[int]) -> None:
    """Objects at the keys of manifests: the search for the newest version reads none of them."""
    for version in versions:
        run.put(layout.manifest(layout.weights("solver", version)), b"{}")


@pytest.mark.parametrize("missing", range(1, 40))
def test_a_single_missing_version_does_not_hide_the_newest(
    memory_store: ObjectStore, missing: int
) -> None:
    put_manifests(memory_store, (version for version in range(41) if version != missing))
    assert manifests.latest(memory_store, "solver") == 40
    assert manifests.latest(memory_store, "solver", missing - 1) == 40
    assert manifests.latest(memory_store, "solver", missing) is None


def test_several_missing_versions_are_all_skipped(
    memory_store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    put_manifests(memory_store, range(0, 20, 2))
    assert manifests.latest(memory_store, "solver") == 18
    assert "version 1 of solver is missing, version 2 exists" in caplog.text
    assert "version 17 of solver is missing, version 18 exists" in caplog.text


def test_a_version_published_between_two_probes_is_not_reported_as_missing(
    memory_store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    class Publishes:
        """Publishes versions 1 and 2 directly after version 1 was found absent."""

        def __getattr__(self, verb: str) -> Any:
            return getattr(memory_store.backend, verb)

        def exists(self, key: str) -> bool:
            result = memory_store.backend.exists(key)
            if "00000001" in key:
                put_manifests(memory_store, [1, 2])
            return result

    put_manifests(memory_store, [0])
    assert manifests.latest(replace(memory_store, backend=Publishes()), "solver") == 2
    assert "missing" not in caplog.text


def test_a_poll_of_the_newest_version_costs_three_probes(memory_store: ObjectStore) -> None:
    put_manifests(memory_store, range(8))
    probes: list[str] = []

    class Counts:
        def __getattr__(self, verb: str) -> Any:
            raise AssertionError(f"a poll calls {verb}")

        def exists(self, key: str) -> bool:
            probes.append(key)
            return memory_store.backend.exists(key)

    assert manifests.latest(replace(memory_store, backend=Counts()), "solver", 7) == 7
    assert len(probes) == 3


def test_a_manifest_with_a_tensor_that_files_cannot_have_is_damaged(
    memory_store: ObjectStore,
) -> None:
    """A safetensors file has its metadata under this name."""
    publisher.publish(memory_store, "solver", 0, builders.tensors(0))
    key = layout.manifest(layout.weights("solver", 0))
    fields = json.loads(memory_store.get(key))
    listed = fields["tensors"]
    listed["__metadata__"] = listed["model.scale"]
    infos = {name: TensorInfo(**info) for name, info in listed.items()}
    memory_store.put(key, sealed(fields | {"digest": weights_digest(infos)}))
    with pytest.raises(CorruptError, match=r"lists a tensor __metadata__, which safetensors files"):
        manifests.read_manifest(memory_store, "solver", 0)
