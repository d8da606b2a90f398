"""What the operating system says becomes a sentence, and unfinished files stay invisible."""

import errno
import os
import stat
from pathlib import Path

import pytest

from storage.backends.local_files import TEMPORARY, LocalFiles
from storage.errors import ConfigError, TransientError
from tests.ordinary_user import as_ordinary_user


def raising(code: int) -> "type[OSError]":
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail  # type: ignore[return-value]  # stands for any os function


def test_unfinished_files_are_never_listed(tmp_path: Path) -> None:
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders" / ".tmp-0123").write_bytes(b"half")
    (tmp_path / "orders" / "00000000.json").write_bytes(b"whole")
    assert LocalFiles(tmp_path).list("", "") == ["orders/00000000.json"]


def test_no_temporary_file_outlives_a_create_or_a_write(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    assert files.create("a/b", b"1")
    assert not files.create("a/b", b"2")
    files.write("a/b", b"3")
    assert os.listdir(tmp_path / "a") == ["b"]


@pytest.mark.parametrize(("verb", "naming"), [("create", "link"), ("write", "replace")])
def test_bytes_are_on_the_disk_before_their_name_and_the_name_before_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, naming: str
) -> None:
    done: list[str] = []
    fsync, name = os.fsync, getattr(os, naming)

    def synced(descriptor: int) -> None:
        folder = os.path.samestat(os.fstat(descriptor), os.stat(tmp_path))
        done.append("sync folder" if folder else "sync bytes")
        fsync(descriptor)

    def named(source: Path, target: Path) -> None:
        done.append(naming)
        name(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, naming, named)
    getattr(LocalFiles(tmp_path), verb)("a", b"x")
    assert done == ["sync bytes", naming, "sync folder"]


@pytest.mark.parametrize("verb", ["create", "write"])
def test_all_bytes_have_left_the_process_when_the_file_is_synced(
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


def test_the_loser_of_a_race_leaves_nothing_and_the_winner_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = LocalFiles(tmp_path)
    files.create("a", b"winner")
    monkeypatch.setattr(LocalFiles, "exists", lambda self, key: False)  # both looked before either wrote
    assert not files.create("a", b"loser")
    assert (tmp_path / "a").read_bytes() == b"winner"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("code", "kind", "sentence"),
    [
        (errno.ENOSPC, ConfigError, r"no space left to write .*/a .*; free some, or set ASTRAFLOW_STORE elsewhere"),
        (errno.EDQUOT, ConfigError, "no space left"),
        (errno.EACCES, ConfigError, r"access to .*/a is denied .*; correct its permissions"),
        (errno.EROFS, ConfigError, "is denied"),
        (errno.EIO, TransientError, "the file system failed at"),
    ],
)
def test_failures_of_the_disk_are_sorted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception], sentence: str
) -> None:
    files = LocalFiles(tmp_path)
    monkeypatch.setattr(os, "fsync", raising(code))
    for write in (files.create, files.write):
        with pytest.raises(kind, match=sentence):
            write("a", b"x")
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", raising(errno.EOPNOTSUPP))
    with pytest.raises(ConfigError, match=r"has no hard links .*; put the store on another one \(ASTRAFLOW_STORE\)"):
        LocalFiles(tmp_path).create("a", b"x")
    assert os.listdir(tmp_path) == []


def test_a_store_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(ConfigError, match="a file stands where a folder belongs"):
        LocalFiles(tmp_path / "file").create("a", b"x")


def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir()

    def work() -> None:
        (tmp_path / "locked").chmod(0o500)
        with pytest.raises(ConfigError, match="is denied"):
            LocalFiles(tmp_path / "locked").create("a", b"x")

    as_ordinary_user(tmp_path, work)


class Disk:
    """What is done to names and folders, in order: `sync a/b`, `mkdir a`, `unlink a/b/c`; bytes of files are `sync bytes`."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self._root = root
        fsync, mkdir, unlink = os.fsync, Path.mkdir, Path.unlink

        def synced(descriptor: int) -> None:
            self.done.append(f"sync {self._name_of(os.fstat(descriptor))}")
            fsync(descriptor)

        def made(path: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
            self.done.append(f"mkdir {path.relative_to(root)}")
            mkdir(path, mode, parents, exist_ok)

        def unlinked(path: Path, missing_ok: bool = False) -> None:
            unlink(path, missing_ok)
            if not path.name.startswith(TEMPORARY):
                self.done.append(f"unlink {path.relative_to(root)}")

        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(Path, "mkdir", made)
        monkeypatch.setattr(Path, "unlink", unlinked)

    def _name_of(self, status: os.stat_result) -> str:
        folders = [self._root, *(path for path in self._root.rglob("*") if path.is_dir())]
        names = (str(path.relative_to(self._root)) for path in folders if os.path.samestat(status, path.stat()))
        return next(names, "bytes")


@pytest.mark.parametrize("verb", ["create", "write"])
def test_a_new_folders_name_is_on_the_disk_before_anything_is_written_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    disk = Disk(tmp_path, monkeypatch)
    files = LocalFiles(tmp_path)
    getattr(files, verb)("a/b/c", b"x")
    assert disk.done == ["mkdir a", "sync .", "mkdir a/b", "sync a", "sync bytes", "sync a/b"]
    disk.done.clear()
    getattr(files, verb)("a/b/d", b"x")
    assert disk.done == ["sync bytes", "sync a/b"]


def test_a_deletion_is_on_the_disk_before_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = LocalFiles(tmp_path)
    files.create("a/b", b"x")
    disk = Disk(tmp_path, monkeypatch)
    files.delete("a/b")
    assert disk.done == ["unlink a/b", "sync a"]
    files.delete("a/b")
    assert disk.done == ["unlink a/b", "sync a"]


def test_unfinished_files_are_those_that_nobody_has_written_to_for_a_while(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name, written_s in (("a/.tmp-1", 100.0), ("a/b/.tmp-2", 101.0), ("a/whole", 1.0)):
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (written_s, written_s))
    assert files.unfinished("", 100.0) == {}
    assert files.unfinished("", 100.5) == {"a/.tmp-1": 4}
    assert files.unfinished("a/b", 200.0) == {"a/b/.tmp-2": 4}
    assert files.unfinished("absent", 200.0) == {}
