"""What the operating system says becomes a sentence, and unfinished files stay invisible."""

import errno
import os
from pathlib import Path

import pytest

from storage.backends.local_files import LocalFiles
from storage.errors import ConfigError, TransientError


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


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="is denied"):
        LocalFiles(locked).create("a", b"x")
