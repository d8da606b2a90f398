"""Errors of the operating system are translated, and temporary files are not listed."""

import errno
import os
import re
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage.errors import ConfigError, ConflictError, CorruptError, TransientError
from storage.run.quarantine import quarantine_object, read_quarantine
from storage.store import local
from storage.store.backend import ARROW_BYTES_MAX, BYTES_MAX
from storage.store.local import TEMPORARY_PREFIX, LocalFiles
from storage.store.object_store import ObjectStore
from tests.support.stores.ordinary_user import as_ordinary_user


def raising(code: int) -> "type[OSError]":
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail  # type: ignore[return-value]  # stands for any os function


def test_unfinished_files_are_never_listed(tmp_path: Path) -> None:
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders" / ".tmp-0123").write_bytes(b"half")
    (tmp_path / "orders" / "00000000.json").write_bytes(b"whole")
    assert LocalFiles(tmp_path).list("", "") == ["orders/00000000.json"]


def test_no_temporary_file_remains_after_a_create_or_a_write(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    assert files.create("a/b", b"1")
    assert not files.create("a/b", b"2")
    files.write("a/b", b"3")
    assert os.listdir(tmp_path / "a") == ["b"]


@pytest.mark.parametrize(("verb", "naming"), [("create", "link"), ("write", "replace")])
def test_a_file_is_synced_before_its_name_and_both_before_the_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, naming: str
) -> None:
    done: list[str] = []
    fsync, name = os.fsync, getattr(os, naming)

    def synced(descriptor: int) -> None:
        folder = os.path.samestat(os.fstat(descriptor), os.stat(tmp_path))
        done.append("sync folder" if folder else "sync bytes")
        fsync(descriptor)

    def named(source: str, target: str, **folders: Any) -> None:
        done.append(naming)
        name(source, target, **folders)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, naming, named)
    getattr(LocalFiles(tmp_path), verb)("a", b"x")
    assert done == ["sync bytes", naming, "sync folder"]


@pytest.mark.parametrize("verb", ["create", "write"])
def test_a_file_is_flushed_before_it_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    fsync, sizes = os.fsync, []

    def synced(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            sizes.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    getattr(LocalFiles(tmp_path), verb)("a", b"small, so that a buffer holds it")
    assert sizes == [len(b"small, so that a buffer holds it")]


@pytest.mark.parametrize("verb", ["create", "write"])
def test_the_umask_decides_who_may_use_a_file(tmp_path: Path, verb: str) -> None:
    before = os.umask(0o022)
    try:
        getattr(LocalFiles(tmp_path), verb)("a", b"body")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o644


def test_the_loser_of_a_race_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = LocalFiles(tmp_path)
    files.create("a", b"winner")
    monkeypatch.setattr(
        LocalFiles, "exists", lambda self, key: False
    )  # both read before either wrote
    assert not files.create("a", b"loser")
    assert (tmp_path / "a").read_bytes() == b"winner"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("code", "kind", "sentence"),
    [
        (
            errno.ENOSPC,
            ConfigError,
            r"no space left to write .*/a .*; free some, or set ASTRAFLOW_STORE to another folder",
        ),
        (errno.EDQUOT, ConfigError, "no space left"),
        (errno.EACCES, ConfigError, r"access to .*/a is denied .*; correct its permissions"),
        (errno.EROFS, ConfigError, "is denied"),
        (errno.EIO, TransientError, "the file system failed at"),
    ],
)
def test_disk_errors_are_translated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception], sentence: str
) -> None:
    files = LocalFiles(tmp_path)
    monkeypatch.setattr(os, "fsync", raising(code))
    for write in (files.create, files.write):
        with pytest.raises(kind, match=sentence):
            write("a", b"x")
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_hard_links_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", raising(errno.EOPNOTSUPP))
    with pytest.raises(
        ConfigError, match=r"has no hard links .*; put the store on another one \(ASTRAFLOW_STORE\)"
    ):
        LocalFiles(tmp_path).create("a", b"x")
    assert os.listdir(tmp_path) == []


def test_a_store_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(ConfigError, match="a file is where a folder belongs"):
        LocalFiles(tmp_path / "file").create("a", b"x")


def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir()

    def work() -> None:
        (tmp_path / "locked").chmod(0o500)
        with pytest.raises(ConfigError, match="is denied"):
            LocalFiles(tmp_path / "locked").create("a", b"x")

    as_ordinary_user(tmp_path, work)


def recording_files(tmp_path: Path) -> tuple[LocalFiles, Path]:
    """A store with one object, and a folder outside it with one file."""
    store, outside = LocalFiles(tmp_path / "store"), tmp_path / "outside"
    store.write("runs/r/tags/best.json", b"ours")
    outside.mkdir()
    (outside / "best.json").write_bytes(b"not ours")
    return store, outside


@pytest.mark.parametrize(
    "key",
    [
        "../outside/best.json",
        "runs/../../outside/best.json",
        "/etc/passwd",
        "runs//x",
        "runs/./x",
        "a\0",
    ],
)
def test_a_key_that_leaves_the_store_is_rejected_by_every_method(tmp_path: Path, key: str) -> None:
    store, outside = recording_files(tmp_path)
    verbs: list[Callable[[], object]] = [
        lambda: store.read(key),
        lambda: store.read_part(key, 0, 1),
        lambda: store.create(key, b"x"),
        lambda: store.write(key, b"x"),
        lambda: store.exists(key),
        lambda: store.delete(key),
        lambda: store.list(key, ""),
        lambda: store.folders(key),
        lambda: store.unfinished(key, 0),
    ]
    for verb in verbs:
        with pytest.raises(ConfigError, match="cannot be a key"):
            verb()
    assert (outside / "best.json").read_bytes() == b"not ours"


@pytest.mark.parametrize("link", ["runs", "runs/r", "runs/r/tags"])
def test_a_symbolic_link_among_the_folders_of_a_store_is_refused_by_name(
    tmp_path: Path, link: str
) -> None:
    store, outside = recording_files(tmp_path)
    folder = store.root / link
    shutil.rmtree(folder)
    target = outside if link == "runs/r/tags" else outside / "below"
    (target / "r" / "tags").mkdir(parents=True, exist_ok=True)
    folder.symlink_to(target)
    before = sorted(outside.rglob("*"))
    key = "runs/r/tags/best.json"
    verbs: list[Callable[[], object]] = [
        lambda: store.read(key),
        lambda: store.create("runs/r/tags/new.json", b"x"),
        lambda: store.write(key, b"x"),
        lambda: store.exists(key),
        lambda: store.delete(key),
        lambda: store.list("runs/r/tags", ""),
    ]
    for verb in verbs:
        with pytest.raises(
            ConfigError,
            match=rf"{re.escape(str(folder))} is a symbolic link, which no part of a store may be",
        ):
            verb()
    assert sorted(outside.rglob("*")) == before
    assert (outside / "best.json").read_bytes() == b"not ours"


def test_an_object_that_is_a_symbolic_link_is_not_read_and_is_replaced_by_a_write(
    tmp_path: Path,
) -> None:
    store, outside = recording_files(tmp_path)
    link = store.root / "runs/r/report.html"
    link.symlink_to(outside / "best.json")
    (store.root / "runs/linked").symlink_to(outside)
    assert store.list("", "") == ["runs/linked", "runs/r/report.html", "runs/r/tags/best.json"]
    assert store.folders("runs") == ["r"]
    assert store.exists("runs/r/report.html")
    assert not store.create("runs/r/report.html", b"x")
    with pytest.raises(CorruptError, match=r"runs/r/report\.html is a symbolic link"):
        store.read("runs/r/report.html")
    store.write("runs/r/report.html", b"page")
    assert not link.is_symlink()
    assert store.read("runs/r/report.html") == b"page"
    assert (outside / "best.json").read_bytes() == b"not ours"


def test_the_root_folder_of_a_store_can_be_a_symbolic_link(tmp_path: Path) -> None:
    store, _ = recording_files(tmp_path)
    (tmp_path / "link").symlink_to(store.root)
    linked = LocalFiles(tmp_path / "link")
    assert linked.read("runs/r/tags/best.json") == b"ours"
    assert linked.list("", "") == ["runs/r/tags/best.json"]


def test_a_pipe_in_the_store_is_rejected_without_waiting_for_it(tmp_path: Path) -> None:
    store, _ = recording_files(tmp_path)
    os.mkfifo(store.root / "runs/r/run.json")
    with pytest.raises(CorruptError, match=r"run\.json is a pipe, a socket or a device"):
        store.read("runs/r/run.json")


def test_a_socket_in_the_store_is_refused_without_retries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = recording_files(tmp_path)
    monkeypatch.chdir(
        store.root / "runs/r"
    )  # the address of a socket may have about 100 characters
    with socket.socket(socket.AF_UNIX) as planted:
        planted.bind("run.json")
        with pytest.raises(
            CorruptError, match=r"run\.json is a pipe, a socket or a device, not a file; remove it"
        ):
            store.read("runs/r/run.json")


def test_a_folder_at_the_key_of_an_object_is_listed_and_cannot_be_read(
    tmp_path: Path,
) -> None:
    store = LocalFiles(tmp_path)
    for name in ("tags/best.json", "shards/0.arrow"):
        (tmp_path / name / "within").mkdir(parents=True)
    assert store.list("", "") == ["shards/0.arrow", "tags/best.json"]
    assert store.exists("tags/best.json")
    assert not store.create("tags/best.json", b"1")
    with pytest.raises(
        CorruptError,
        match=r"/tags/best\.json is a folder where an object belongs; remove it from the store$",
    ):
        store.read("tags/best.json")
    for change in (
        lambda: store.write("tags/best.json", b"1"),
        lambda: store.delete("tags/best.json"),
    ):
        with pytest.raises(
            ConfigError, match=r"/tags/best\.json cannot be an object \(Directory not empty\)"
        ):
            change()
    assert not store.exists("tags")


def test_an_empty_folder_is_replaced_by_a_write_and_removed_by_a_delete(
    tmp_path: Path,
) -> None:
    store = LocalFiles(tmp_path)
    (tmp_path / "beat.json").mkdir()
    store.write("beat.json", b"1")
    assert store.read("beat.json") == b"1"
    (tmp_path / "tag.json").mkdir()
    store.delete("tag.json")
    assert store.list("", "") == ["beat.json"]


def test_a_folder_at_the_key_of_a_new_object_is_rejected_without_retries(
    tmp_path: Path,
) -> None:
    store = LocalFiles(tmp_path)
    (tmp_path / "stop").mkdir()
    with pytest.raises(
        ConfigError, match=r"/stop is a folder where an object belongs; remove it from the store$"
    ):
        store.create("stop", b"1")
    assert store.list("", "") == []


def test_a_file_at_the_path_of_a_folder_is_refused(tmp_path: Path) -> None:
    store, _ = recording_files(tmp_path)
    (store.root / "runs/r/heartbeats").write_bytes(b"")
    for verb in (
        lambda: store.list("runs/r/heartbeats", ""),
        lambda: store.folders("runs/r/heartbeats"),
    ):
        with pytest.raises(
            ConfigError,
            match=r"/heartbeats cannot be an object .* a file is where a folder belongs",
        ):
            verb()


def test_an_object_of_terabytes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    store = ObjectStore(url="file:///store", backend=LocalFiles(tmp_path))
    with (tmp_path / "stop.json").open("wb") as file:
        file.truncate(BYTES_MAX)
    assert len(store.get("stop.json")) == BYTES_MAX
    with pytest.raises(
        ConfigError,
        match=r"orders/0\.json has 134,217,729 bytes; .* at most 134,217,728, .* readers reject it",
    ):
        store.create("orders/0.json", bytes(BYTES_MAX + 1))
    for name, most in (
        ("stop.json", BYTES_MAX),
        ("report.html", BYTES_MAX),
        ("0.arrow", ARROW_BYTES_MAX),
    ):
        with (tmp_path / name).open("wb") as file:
            file.truncate(2**42)  # more than the memory of any machine
        with pytest.raises(
            CorruptError, match=rf"{name} has 4,398,046,511,104 bytes; .* has at most {most:,}$"
        ):
            store.get(name)
    with pytest.raises(ConflictError):
        store.create("stop.json", b"{}")
    quarantine_object(store, "stop.json", "is too large")
    assert read_quarantine(store) == {"stop.json": "is too large"}
    assert not store.exists("quarantine/stop.json")
    assert (
        store.get("stop.json", BYTES_MAX)[:2] == b"\0\0"
    )  # a reader that gives a limit gets that part


def test_the_depth_of_listed_folders_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "DEPTH_MAX", 2)
    store = LocalFiles(tmp_path)
    store.write("1/2/here", b"")
    store.write("1/2/3/not-here", b"")
    assert store.list("", "") == ["1/2/here"]
    assert store.list("1/2", "") == ["1/2/3/not-here", "1/2/here"]


class Disk:
    """Operations on names and folders, in order: `sync a/b`, `mkdir a`, `unlink a/b/c`; for
    contents of files `sync bytes`.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self._root = root
        fsync, mkdir, unlink = os.fsync, os.mkdir, os.unlink

        def synced(descriptor: int) -> None:
            self.done.append(f"sync {self._name_of(os.fstat(descriptor))}")
            fsync(descriptor)

        def made(name: str, mode: int = 0o777, *, dir_fd: int) -> None:
            mkdir(name, mode, dir_fd=dir_fd)
            self.done.append(f"mkdir {self._below(dir_fd, name)}")

        def unlinked(name: str, *, dir_fd: int) -> None:
            unlink(name, dir_fd=dir_fd)
            if not name.startswith(TEMPORARY_PREFIX):
                self.done.append(f"unlink {self._below(dir_fd, name)}")

        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(os, "mkdir", made)
        monkeypatch.setattr(os, "unlink", unlinked)

    def _below(self, folder: int, name: str) -> Path:
        return Path(self._name_of(os.fstat(folder))) / name

    def _name_of(self, status: os.stat_result) -> str:
        folders = [self._root, *(path for path in self._root.rglob("*") if path.is_dir())]
        names = (
            str(path.relative_to(self._root))
            for path in folders
            if os.path.samestat(status, path.stat())
        )
        return next(names, "bytes")


@pytest.mark.parametrize("verb", ["create", "write"])
def test_a_new_folder_is_synced_before_a_file_is_written_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    disk = Disk(tmp_path, monkeypatch)
    files = LocalFiles(tmp_path)
    getattr(files, verb)("a/b/c", b"x")
    assert disk.done == ["mkdir a", "sync .", "mkdir a/b", "sync a", "sync bytes", "sync a/b"]
    disk.done.clear()
    getattr(files, verb)("a/b/d", b"x")
    assert disk.done == ["sync bytes", "sync a/b"]


def test_a_deletion_is_synced_before_the_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = LocalFiles(tmp_path)
    files.create("a/b", b"x")
    disk = Disk(tmp_path, monkeypatch)
    files.delete("a/b")
    assert disk.done == ["unlink a/b", "sync a"]
    files.delete("a/b")
    assert disk.done == ["unlink a/b", "sync a"]


def test_unfinished_files_are_those_unchanged_for_a_minimum_age(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name, written_s in (("a/.tmp-1", 100.0), ("a/b/.tmp-2", 101.0), ("a/whole", 1.0)):
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (written_s, written_s))
    assert files.unfinished("", 100.0) == {}
    assert files.unfinished("", 100.5) == {"a/.tmp-1": 4}
    assert files.unfinished("a/b", 200.0) == {"a/b/.tmp-2": 4}
    assert files.unfinished("absent", 200.0) == {}


def test_each_new_folder_above_the_root_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    LocalFiles(tmp_path / "x" / "y").create("a", b"")
    above = [tmp_path.stat().st_ino, (tmp_path / "x").stat().st_ino]
    assert synced[:2] == above
