"""Lost responses, retries, URLs and errors, on backends that fail on purpose."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from weakref import ref

import numpy as np
import pytest

from storage.errors import ConfigError, ConflictError, CorruptError, NotFoundError, TransientError
from storage.store import object_store
from storage.store.backend import Keys
from storage.store.object_store import (
    ObjectStore,
    check_store,
    default_store,
    open_store,
    read_twice,
)


@dataclass
class Scripted:
    """A backend of one dict that raises the items of `failures`, one per call, before or after the
    effect.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    honours_absence: bool = True

    def _turn(self, verb: str) -> str:
        self.calls.append(verb)
        failure = self.failures.pop(0) if self.failures else ""
        if failure == "before":
            raise TransientError("away")
        return failure

    def read(self, key: str) -> bytes:
        self._turn("read")
        if key not in self.objects:
            raise NotFoundError(key)
        return self.objects[key]

    def create(self, key: str, body: bytes) -> bool:
        failure = self._turn("create")
        if key in self.objects and self.honours_absence:
            return False
        self.objects[key] = body
        if failure == "after":
            raise TransientError("answer lost")
        return True

    def write(self, key: str, body: bytes) -> None:
        self._turn("write")
        self.objects[key] = body

    def exists(self, key: str) -> bool:
        self._turn("exists")
        return key in self.objects

    def list(self, prefix: str, start_after: str) -> Keys:
        self._turn("list")
        return sorted(key for key in self.objects if key.startswith(prefix) and key > start_after)

    def folders(self, prefix: str) -> Keys:
        return []

    def delete(self, key: str) -> None:
        self._turn("delete")
        self.objects.pop(key, None)


@dataclass
class Parts(Scripted):
    """A backend that records which parts were requested."""

    asked: list[tuple[int, int]] = field(default_factory=list)

    def read_part(self, key: str, start: int, end: int) -> bytes:
        self.asked.append((start, end))
        return self.objects[key][start:end]


@pytest.mark.parametrize(
    ("num_bytes", "parts"),
    [
        (4, []),
        (5, [(0, 4), (4, 5)]),
        (8, [(0, 4), (4, 8)]),
        (9, [(0, 5), (5, 9)]),
        (20, [(0, 8), (8, 16), (16, 20)]),
    ],
)
def test_parts_of_an_object_stay_within_the_limits(
    num_bytes: int, parts: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("PART_BYTES_MIN", 4), ("PART_BYTES_MAX", 8), ("PARTS_MAX", 2)):
        monkeypatch.setattr(object_store, name, value)
    backend = Parts({"a": bytes(range(num_bytes))})
    assert ObjectStore(url="parts", backend=backend).get("a", num_bytes) == bytes(range(num_bytes))
    assert sorted(backend.asked) == parts
    assert backend.calls == ([] if parts else ["read"])


def test_a_call_is_tried_at_most_sixteen_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    backend = Scripted({"a": b"x"}, failures=["before"] * 15)
    assert ObjectStore(url="scripted", backend=backend).get("a") == b"x"
    backend = Scripted({"a": b"x"}, failures=["before"] * 16)
    with pytest.raises(TransientError, match="away"):
        ObjectStore(url="scripted", backend=backend).get("a")
    assert len(backend.calls) == 16


def test_the_pauses_between_tries_double_up_to_five_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses_s: list[float] = []
    monkeypatch.setattr("time.sleep", pauses_s.append)
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    backend = Scripted({"a": b"x"}, failures=["before"] * 8)
    assert ObjectStore(url="scripted", backend=backend).get("a") == b"x"
    assert pauses_s == [0.6, 0.7, 0.9, 1.3, 2.1, 3.7, 5.0, 5.0]


def test_a_call_is_not_retried_after_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Scripted({"a": b"x"}, failures=["before"] * 3)
    with pytest.raises(TransientError, match="away"):
        ObjectStore(url="scripted", backend=backend, patience_s=1e-9).get("a")
    assert backend.calls == ["read"]


def test_a_transient_failure_is_retried() -> None:
    backend = Scripted({"a": b"x"}, failures=["before", "before"])
    assert ObjectStore(url="scripted", backend=backend).get("a") == b"x"
    assert backend.calls == ["read", "read", "read"]


def test_a_create_with_a_lost_response_succeeds() -> None:
    backend = Scripted(failures=["after"])
    ObjectStore(url="scripted", backend=backend).create("a", b"mine")
    assert backend.objects == {"a": b"mine"}
    assert backend.calls == ["create", "create", "read"]


def test_a_failed_create_after_a_concurrent_create_is_a_conflict() -> None:
    backend = Scripted({"a": b"rival"}, failures=["before"])
    with pytest.raises(ConflictError, match="scripted/a exists with another body"):
        ObjectStore(url="scripted", backend=backend).create("a", b"mine")


def test_an_object_deleted_between_create_and_read_back_is_created_again() -> None:
    class Vanishing(Scripted):
        def read(self, key: str) -> bytes:
            self.objects.pop(key, None)
            return super().read(key)

    backend = Vanishing({"a": b"old"})
    ObjectStore(url="scripted", backend=backend).create("a", b"new")
    assert backend.objects == {"a": b"new"}


def test_the_time_for_retries_is_limited_and_the_failure_is_raised() -> None:
    backend = Scripted({"a": b"x"}, failures=["before"] * 1000)
    with pytest.raises(TransientError, match="away"):
        replace(ObjectStore(url="scripted", backend=backend), patience_s=0.3).get("a")
    assert 2 <= len(backend.calls) <= 16


def test_permanent_errors_are_not_retried() -> None:
    backend = Scripted()
    with pytest.raises(NotFoundError):
        ObjectStore(url="scripted", backend=backend).get("a")
    assert backend.calls == ["read"]


def test_check_refuses_a_store_that_overwrites() -> None:
    with pytest.raises(ConfigError, match="overwrites objects that must be created once"):
        check_store(ObjectStore(url="scripted", backend=Scripted(honours_absence=False)))


def test_check_of_an_unreachable_store_gives_its_name_and_a_remedy() -> None:
    store = ObjectStore(
        url="s3://far/away", backend=Scripted(failures=["before"] * 1000), patience_s=0.1
    )
    with pytest.raises(
        ConfigError, match=r"the store s3://far/away cannot be used: away; correct ASTRAFLOW_STORE"
    ):
        check_store(store)


def test_check_names_the_variable_of_the_store_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRAFLOW_STORE", "memory://named")
    overwriting = replace(open_store("memory://named"), backend=Scripted(honours_absence=False))
    with pytest.raises(
        ConfigError, match=r"overwrites objects .* \(ASTRAFLOW_STORE names this store\)"
    ):
        check_store(overwriting)
    monkeypatch.setenv("ASTRAFLOW_STORE", "memory://another")
    with pytest.raises(ConfigError, match=r"a local folder$"):
        check_store(overwriting)


def test_urls_of_each_scheme_can_be_opened(tmp_path: Path) -> None:
    assert open_store(str(tmp_path)).url == f"file://{tmp_path}"
    assert open_store(f"file://{tmp_path}").url == f"file://{tmp_path}"
    assert open_store("memory://tests/a/").url == "memory://tests/a"
    assert open_store("s3://bucket/some/prefix/").url == "s3://bucket/some/prefix"


def test_two_stores_of_one_memory_name_share_their_objects() -> None:
    open_store("memory://shared-by-name").create("a", b"x")
    assert open_store("memory://shared-by-name").get("a") == b"x"
    assert not open_store("memory://shared-by-nam").exists("e/a")


def test_a_path_with_spaces_and_percent_signs_is_used_unchanged(tmp_path: Path) -> None:
    folder = tmp_path / "a b%20c"
    open_store(str(folder)).create("k", b"x")
    assert (folder / "k").read_bytes() == b"x"
    assert open_store(open_store(str(folder)).url).get("k") == b"x"


@pytest.mark.parametrize("url", ["", "ftp://host/x", "s3://", "gs://bucket/x"])
def test_a_url_without_a_usable_location_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="the store URL"):
        open_store(url)


def test_the_default_store_is_named_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRAFLOW_STORE", "memory://from-environment")
    assert default_store().url == "memory://from-environment"
    monkeypatch.delenv("ASTRAFLOW_STORE")
    monkeypatch.chdir(tmp_path)
    assert default_store().url == f"file://{tmp_path}/.astraflow/store"


@pytest.mark.parametrize("url", ["s3:/runs/a", "file:/tmp/x", "gs:/bucket"])
def test_a_scheme_with_one_slash_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="has one slash after its scheme; write two"):
        open_store(url)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (
            "file://host/store",
            r"names the machine 'host', .*write three slashes, file:///store, for the folder "
            r"/store here",
        ),
        ("file://store", r"names the machine 'store', .*write three slashes, file:///store"),
        ("file://host:80/a/b", r"names the machine 'host:80', .*file:///a/b"),
        ("file://[::1/store", r"names the machine '\[::1'"),
        ("file://LOCALHOST.example/store", "names the machine"),
        ("file://localhost", "names no folder; write file:///path"),
        ("file:///", "names no folder; write file:///path"),
        ("file:///a?b", "write a \\? of the path as %3F"),
        ("file:///a#b", "write a # of the path as %23"),
        ("file:///a\nb", "has a character that cannot be printed"),
        ("s3://bucket/a\tb", "has a character that cannot be printed"),
        ("file:///a%00b", "because it contains a NUL"),
        ("a\0b", "because it contains a NUL"),
        ("file:///a%FFb", "is not UTF-8"),
        ("a\udcffb", "cannot be a folder"),
        ("~no-such-user-here/store", "cannot be a folder"),
    ],
)
def test_an_ambiguous_file_url_is_rejected_with_a_correction(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_store(url)


def test_a_secret_in_a_file_url_is_not_repeated() -> None:
    with pytest.raises(ConfigError, match="names the machine 'host'") as caught:
        open_store("file://user:secret@host/store")
    assert "secret" not in str(caught.value)


def test_a_file_url_of_this_machine_opens_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "with space, # and ?"
    open_store(str(folder)).put("key", b"body")
    assert open_store(folder.as_uri()).get("key") == b"body"
    assert open_store(folder.as_uri().replace("file://", "file://localhost")).get("key") == b"body"


def test_what_a_damaged_object_decoded_to_is_freed_before_the_second_read() -> None:
    decoded: list[ref[object]] = []

    def read() -> None:
        assert all(earlier() is None for earlier in decoded)
        table = np.zeros(3)
        decoded.append(ref(table))
        raise CorruptError(f"read {len(decoded)} has {table.size} values")

    with pytest.raises(CorruptError, match="read 2 has 3 values"):
        read_twice(read)
    assert len(decoded) == 2
