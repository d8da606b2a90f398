"""Base models: built once per store, the first builder wins, version 0 is published once."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from storage.errors import ConfigError
from storage.formats.safetensors import to_safetensors, weights_digest
from storage.records.weights import HostTensor
from storage.run.base_models import discard_model, load_model, save_model
from storage.store.object_store import ObjectStore
from storage.weights import manifests, publisher, reader
from tasks.base_models import tiny as tiny_base
from tasks.base_models.config import FolderModel, TinyBase, TinyModel
from tasks.base_models.publishing import build_digest, ensure_base_model, publish_base_models
from tasks.base_models.tiny import build, model_files
from tests.support.stores.strange_objects import STRANGE, link, take_place

LARGEST_BF16 = 0x7F7F0000  # as F32


SMALL = TinyBase(
    hidden=16,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=8,
    intermediate=16,
    skill_iterations=1,
    habit_iterations=1,
    batch_size=4,
)
TINY = TinyModel(tiny=SMALL)


class Reported(list[tuple[str, float]]):
    """The calls of a progress callback."""

    def __call__(self, stage: str, share: float) -> None:
        self.append((stage, share))


def test_the_first_use_builds_and_the_second_reads(local_store: ObjectStore):
    first, second = Reported(), Reported()
    built = ensure_base_model(local_store, TINY, first)
    result = ensure_base_model(local_store, TINY, second)
    assert first[-1] == ("adding bad habits", 1.0)
    assert second == []
    assert built.digest == result.digest == weights_digest(result.tensors)
    assert {tensor.dtype for tensor in result.tensors.values()} == {"BF16"}
    assert set(result.files) == set(model_files(SMALL))


def test_the_build_key_depends_on_every_recipe_field_and_the_format(
    monkeypatch: pytest.MonkeyPatch,
):
    base = TinyBase()
    changed = [
        base.model_copy(update={name: getattr(base, name) + 1}) for name in TinyBase.model_fields
    ]
    digests = {build_digest(each) for each in [base, *changed]}
    assert len(digests) == 1 + len(TinyBase.model_fields)
    monkeypatch.setattr(tiny_base, "FORMAT", tiny_base.FORMAT + 1)
    assert build_digest(base) not in digests


def test_the_first_of_two_builders_wins(local_store: ObjectStore):
    """A concurrent builder stores its model while this one is still building: both then use the
    stored one.
    """
    competitor, _ = build(SMALL.model_copy(update={"seed": 9}), Reported())

    def rival_finishes(stage: str, share: float) -> None:
        if (stage, share) == ("adding bad habits", 1.0):
            save_model(local_store, build_digest(SMALL), competitor, model_files(SMALL), {})

    mine = ensure_base_model(local_store, TINY, rival_finishes)
    assert (
        mine.digest
        == weights_digest(competitor)
        == weights_digest(load_model(local_store, build_digest(SMALL))[0])
    )


def damage_model(store: ObjectStore, part: str, body: bytes | None) -> None:
    """Overwrite the file of the stored model whose key contains `part`, or delete it (None)."""
    (key,) = [key for key in store.list("models") if part in key]
    if body is None:
        store.delete(key)
    else:
        store.put(key, body)


@pytest.mark.parametrize("part", ["model-00000", ".config.json", "manifest.json"])
@pytest.mark.parametrize("body", [b"torn", None])
def test_a_damaged_model_is_built_again_and_replaced(
    local_store: ObjectStore, part: str, body: bytes | None, caplog: pytest.LogCaptureFixture
):
    digest = ensure_base_model(local_store, TINY, Reported()).digest
    damage_model(local_store, part, body)
    built, read = Reported(), Reported()
    assert ensure_base_model(local_store, TINY, built).digest == digest
    assert built[-1] == ("adding bad habits", 1.0)
    assert [message.split(":")[0] for message in caplog.messages] == (
        []
        if (part, body) == ("manifest.json", None)
        else ["the stored base model is damaged, and is built again"]
    )
    assert ensure_base_model(local_store, TINY, read).digest == digest
    assert read == []


def test_a_model_that_another_run_repairs_during_the_build_is_used(local_store: ObjectStore):
    ensure_base_model(local_store, TINY, Reported())
    damage_model(local_store, "model-00000", b"torn")
    competitor, _ = build(SMALL.model_copy(update={"seed": 9}), Reported())

    def rival_repairs(stage: str, share: float) -> None:
        if (stage, share) == ("adding bad habits", 1.0):
            discard_model(local_store, build_digest(SMALL))
            save_model(local_store, build_digest(SMALL), competitor, model_files(SMALL), {})

    mine = ensure_base_model(local_store, TINY, rival_repairs)
    assert mine.digest == weights_digest(competitor)


def test_a_built_model_that_cannot_be_read_back_is_used_from_memory(
    local_store: ObjectStore, caplog: pytest.LogCaptureFixture
):
    digest = ensure_base_model(local_store, TINY, Reported()).digest

    class Torn:
        """A store whose tensor files are all damaged."""

        def __getattr__(self, name: str) -> object:
            return getattr(local_store.backend, name)

        def read(self, key: str) -> bytes:
            return b"torn" if key.endswith(".safetensors") else local_store.backend.read(key)

    torn = replace(local_store, backend=Torn())  # type: ignore[arg-type]  # delegates the rest
    assert ensure_base_model(torn, TINY, Reported()).digest == digest
    assert caplog.messages[-1].startswith(
        "the base model that was just built cannot be read back, and is used from memory; "
        f"if the next run reports this too, delete {local_store.url}/models/{build_digest(SMALL)}: "
    )


@pytest.mark.parametrize(
    ("part", "make"),
    [("manifest.json", STRANGE["a full folder"]), ("", link), ("", Path.touch), ("..", link)],
)
def test_a_model_in_whose_place_nothing_can_be_stored_is_used_from_memory(
    local_store: ObjectStore,
    tmp_path: Path,
    part: str,
    make: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
):
    digest = ensure_base_model(local_store, TINY, Reported()).digest
    place = (tmp_path / "store" / "models" / build_digest(SMALL) / part).resolve()
    take_place(place, make)
    assert ensure_base_model(local_store, TINY, Reported()).digest == digest
    assert (
        f"and is used from memory; if the next run reports this too, delete {local_store.url}"
        in (caplog.messages[-1])
    )
    assert str(place) in caplog.messages[-1]


def test_a_model_folder_is_read_unchanged(local_store: ObjectStore, tmp_path: Path):
    tensors, _ = build(SMALL, Reported())
    folder = tmp_path / "model"
    folder.mkdir()
    for name, body in model_files(SMALL).items():
        (folder / name).write_bytes(body)
    (folder / "model.safetensors").write_bytes(to_safetensors(tensors))
    model = ensure_base_model(local_store, FolderModel(path=str(folder)), Reported())
    assert model.digest == weights_digest(tensors)
    assert model.files == model_files(SMALL)


def test_version_0_of_every_policy_is_published_once(local_store: ObjectStore):
    run, reported = local_store.sub("runs/r"), Reported()
    other = TinyModel(tiny=SMALL.model_copy(update={"seed": 1}))
    publish_base_models(
        local_store, run, {"solver": TINY, "verifier": TINY, "judge": other}, reported
    )
    assert [share for stage, share in reported if stage == "adding bad habits"] == [
        0.5,
        1.0,
    ]  # two recipes, two builds
    assert reported == sorted(reported, key=lambda call: call[1])
    digests = [
        manifests.read_manifest(run, policy, 0).digest for policy in ("solver", "verifier", "judge")
    ]
    assert digests[0] == digests[1] != digests[2]
    assert reader.fetch_files(run, "verifier") == model_files(SMALL)
    written = manifests.read_manifest(run, "solver", 0).write_id
    publish_base_models(local_store, run, {"solver": TINY, "verifier": TINY}, reported)
    assert manifests.read_manifest(run, "solver", 0).write_id == written


def test_a_version_0_of_a_concurrent_publisher_is_accepted(local_store: ObjectStore):
    run = local_store.sub("runs/r")

    def rival_publishes(stage: str, share: float) -> None:
        if (stage, share) == ("adding bad habits", 1.0):
            publisher.publish(
                run, "solver", 0, build(SMALL, Reported())[0], extra_files=model_files(SMALL)
            )

    publish_base_models(local_store, run, {"solver": TINY}, rival_publishes)
    assert manifests.latest(run, "solver") == 0


def test_a_folder_with_config_sizes_above_its_tensors_is_refused(
    local_store: ObjectStore, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 1099511627776}')
    norm = HostTensor("BF16", (4,), np.zeros(4, np.uint16))
    (tmp_path / "model.safetensors").write_bytes(to_safetensors({"norm": norm}))
    model = FolderModel(path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"model: config\.json: hidden_size is 1099511627776"):
        ensure_base_model(local_store, model, Reported())


@pytest.mark.parametrize(
    "bits", [0x7FC00000, 0xFF800000, 0x7F7FFFFF]
)  # NaN, −infinity, F32's largest
def test_a_tensor_that_is_not_finite_in_bf16_is_refused_by_name(
    local_store: ObjectStore, tmp_path: Path, bits: int
) -> None:
    def write(last: int) -> FolderModel:
        values = np.array([0x3F800000, LARGEST_BF16, last], np.uint32)
        tensors = {
            "good": HostTensor("F32", (3,), np.array([0, LARGEST_BF16, 1], np.uint32)),
            "model.norm": HostTensor("F32", (3,), values),
        }
        (tmp_path / "model.safetensors").write_bytes(to_safetensors(tensors))
        return FolderModel(path=str(tmp_path))

    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=r"model: the tensor 'model\.norm' has values that are not finite"
    ):
        ensure_base_model(local_store, write(bits), Reported())
    kept = ensure_base_model(local_store, write(LARGEST_BF16), Reported())
    assert kept.tensors["model.norm"].bits.tolist() == [0x3F80, 0x7F7F, 0x7F7F]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_heads": 3}, "heads 4 is not divisible by kv_heads 3: each key and value head"),
        ({"kv_heads": 8}, "heads 4 is not divisible by kv_heads 8"),
        (
            {"head_dim": 15},
            "head_dim 15 is odd, but positions rotate pairs of its elements; use 16",
        ),
        (
            {"layers": 1024, "hidden": 1024},
            "its layers have 805,306,368 parameters, and at most 13",
        ),
    ],
)
def test_a_tiny_model_of_an_impossible_shape_is_refused(
    settings: dict[str, int], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        TinyBase(**settings)
