import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest

from storage.errors import ConfigError, NotFoundError, TransientError
from storage.store import object_store, s3, source_files
from storage.store.source_files import SourceFile, fault, fetch, find, matcher
from tests.conftest import BUCKET

Put = Callable[[str, bytes], None]


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "BACKOFF_MAX_S", 0.0)


@pytest.fixture
def memory_folder() -> tuple[str, Put]:
    root = f"memory://{uuid4().hex}"
    return root, lambda name, body: fsspec.filesystem("memory").pipe_file(f"{root}/{name}", body)


@pytest.fixture
def local_folder(tmp_path: Path) -> tuple[str, Put]:
    def put(name: str, body: bytes) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(body)

    return str(tmp_path), put


@pytest.fixture
def s3_folder(s3_server: str) -> Iterator[tuple[str, Put]]:
    import boto3  # type: ignore[import-untyped]  # the package has no types

    prefix = uuid4().hex
    with closing(boto3.client("s3")) as client:
        yield (
            f"s3://{BUCKET}/{prefix}",
            lambda name, body: client.put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=body),
        )


@pytest.fixture(params=["memory", "local", pytest.param("s3", marks=pytest.mark.s3)])
def folder(request: pytest.FixtureRequest) -> tuple[str, Put]:
    """A folder of each kind, and a function that writes a file into it."""
    result: tuple[str, Put] = request.getfixturevalue(f"{request.param}_folder")
    return result


def names(root: str, *patterns: str) -> list[str]:
    found = find([f"{root}/{pattern}" for pattern in patterns])
    return [file.name.removeprefix(f"{root}/") for file in found]


def test_patterns_match_within_a_part_or_over_several(folder: tuple[str, Put]) -> None:
    root, put = folder
    for name in ("a1.jsonl", "a2.jsonl", "b.parquet", "deep/a1.jsonl", "deep/er/a3.jsonl"):
        put(name, b"x")
    assert names(root, "*.jsonl") == ["a1.jsonl", "a2.jsonl"]
    assert names(root, "**/*.jsonl") == [
        "a1.jsonl",
        "a2.jsonl",
        "deep/a1.jsonl",
        "deep/er/a3.jsonl",
    ]
    assert names(root, "*/a1.jsonl") == ["deep/a1.jsonl"]
    assert names(root, "a[2-9].jsonl") == ["a2.jsonl"]
    assert names(root, "b.parquet") == ["b.parquet"]
    assert names(root, "absent/*.jsonl", "absent.jsonl") == []


def test_a_file_of_two_patterns_is_found_once_and_files_are_sorted(folder: tuple[str, Put]) -> None:
    root, put = folder
    for name in ("b.jsonl", "a.jsonl"):
        put(name, b"x")
    assert names(root, "b.*", "*.jsonl") == ["a.jsonl", "b.jsonl"]


def test_names_with_a_dot_are_matched_only_by_patterns_with_a_dot(folder: tuple[str, Put]) -> None:
    root, put = folder
    put(".a.jsonl", b"half")
    put("a.jsonl", b"whole")
    assert names(root, "*.jsonl") == ["a.jsonl"]
    assert names(root, ".*.jsonl") == [".a.jsonl"]


def test_the_copy_has_all_bytes_in_order_and_their_digest(
    folder: tuple[str, Put], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, put = folder
    body = bytes(range(256)) * 5
    put("a.jsonl", body)
    put("empty.jsonl", b"")
    monkeypatch.setattr(source_files, "PART_BYTES", 100)
    file, empty = find([f"{root}/*.jsonl"])
    assert file.num_bytes == len(body)
    assert fetch(file, tmp_path / "copy") == f"sha256:{hashlib.sha256(body).hexdigest()}"
    assert (tmp_path / "copy").read_bytes() == body
    assert fetch(empty, tmp_path / "copy") == f"sha256:{hashlib.sha256(b'').hexdigest()}"
    assert (tmp_path / "copy").read_bytes() == b""


def test_a_file_that_is_replaced_after_it_was_found_is_refused(
    folder: tuple[str, Put], tmp_path: Path
) -> None:
    root, put = folder
    put("a.jsonl", b"before, and longer")
    (file,) = find([f"{root}/a.jsonl"])
    put("a.jsonl", b"after")
    with pytest.raises(ConfigError, match=r"a\.jsonl was changed while it was read; write files"):
        fetch(file, tmp_path / "copy")


def test_a_local_file_of_the_same_size_and_time_is_another_one(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b"):
        (tmp_path / name).write_bytes(b"12345")
        os.utime(tmp_path / name, (1_700_000_000, 1_700_000_000))
    (file,) = find([str(tmp_path / "*.jsonl")])
    os.replace(tmp_path / "b", tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match="was changed while it was read"):
        fetch(file, tmp_path / "copy")


def test_a_local_file_that_was_deleted_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"12345")
    (file,) = find([str(tmp_path / "*.jsonl")])
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(ConfigError, match="was changed while it was read"):
        fetch(file, tmp_path / "copy")


def test_a_part_that_is_too_short_is_refused(tmp_path: Path) -> None:
    file = SourceFile("short", 10, 0.0, lambda start, end: b"12345")
    with pytest.raises(ConfigError, match="short was changed while it was read"):
        fetch(file, tmp_path / "copy")


@pytest.mark.usefixtures("_quick")
def test_a_part_is_read_again_after_a_transient_error(tmp_path: Path) -> None:
    script: Iterator[Any] = iter([TransientError("away"), b"12345"])

    def read_part(start: int, end: int) -> bytes:
        said = next(script)
        if isinstance(said, Exception):
            raise said
        return bytes(said)

    fetch(SourceFile("slow", 5, 0.0, read_part), tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"12345"


def test_a_copy_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = SourceFile("a.jsonl", 0, 0.0, lambda start, end: b"")
    with pytest.raises(ConfigError, match=r"a\.jsonl cannot be copied to .*: .*No such file"):
        fetch(file, tmp_path / "absent" / "copy")


def test_the_time_of_a_file_is_that_of_its_modification(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"")
    os.utime(tmp_path / "a.jsonl", (1.0, 1_700_000_000.25))
    (file,) = find([str(tmp_path / "a.jsonl")])
    assert file.modified_s == 1_700_000_000.25
    os.utime(tmp_path / "a.jsonl", (1.0, -1.0))
    with pytest.raises(ConfigError, match=r"a\.jsonl was modified before 1970"):
        find([str(tmp_path / "a.jsonl")])


def test_a_local_name_with_brackets_is_that_file_and_pipes_and_folders_are_no_files(
    tmp_path: Path,
) -> None:
    (tmp_path / "a[1].jsonl").write_bytes(b"")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "lost.jsonl").symlink_to(tmp_path / "nothing")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a[1].jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert names(str(tmp_path), "a[1].jsonl") == ["a[1].jsonl"]
    assert names(str(tmp_path), "*.jsonl") == ["a[1].jsonl", "link.jsonl"]


def test_a_local_folder_that_cannot_be_listed_is_an_error_and_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed").mkdir()

    def refuse(path: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ConfigError, match=r"closed/\*\.jsonl cannot be listed: .*denied"):
        find([str(tmp_path / "closed" / "*.jsonl")])


@pytest.mark.s3
def test_objects_on_s3_are_listed_page_by_page_from_the_literal_beginning(
    s3_folder: tuple[str, Put], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, put = s3_folder
    for number in range(5):
        put(f"a{number}.jsonl", b"x")
    put("b.jsonl", b"x")
    put("a/", b"")  # a folder, as consoles of S3 make it
    monkeypatch.setattr(s3, "PAGE_KEYS_MAX", 2)
    monkeypatch.setattr(source_files, "LISTED_MAX", 6)
    assert names(root, "a*") == [f"a{number}.jsonl" for number in range(5)]
    with pytest.raises(ConfigError, match="more than 6 objects begin with"):
        find([f"{root}/*.jsonl"])


@pytest.mark.s3
def test_a_bucket_that_does_not_exist_is_named(s3_server: str) -> None:
    with pytest.raises(ConfigError, match="the bucket absent-bucket does not exist"):
        find(["s3://absent-bucket/*.jsonl"])


@pytest.mark.s3
def test_an_object_that_is_replaced_by_one_of_its_size_is_refused(
    s3_folder: tuple[str, Put], tmp_path: Path
) -> None:
    root, put = s3_folder
    put("a.jsonl", b"before")
    (file,) = find([f"{root}/a.jsonl"])
    put("a.jsonl", b"after!")
    with pytest.raises(ConfigError, match=r"a\.jsonl was changed while it was read"):
        fetch(file, tmp_path / "copy")


@pytest.mark.s3
def test_an_object_that_was_deleted_is_refused(s3_folder: tuple[str, Put], tmp_path: Path) -> None:
    import boto3

    root, put = s3_folder
    put("a.jsonl", b"12345")
    (file,) = find([f"{root}/a.jsonl"])
    with closing(boto3.client("s3")) as client:
        client.delete_object(Bucket=BUCKET, Key=file.name.removeprefix(f"s3://{BUCKET}/"))
    with pytest.raises(ConfigError) as caught:
        fetch(file, tmp_path / "copy")
    assert isinstance(caught.value.__cause__, NotFoundError)


@pytest.mark.s3
def test_the_endpoint_of_an_address_is_used_and_a_bucket_has_one(
    s3_folder: tuple[str, Put], s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, put = s3_folder
    put("a.jsonl", b"x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    pattern = f"{root}/*.jsonl?endpoint={s3_server}"
    assert [file.name for file in find([pattern])] == [f"{root}/a.jsonl"]
    with pytest.raises(ConfigError, match=f"the bucket {BUCKET} is named with two endpoints"):
        find([pattern, f"{root}/*.jsonl"])


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("s3://key:secret@bucket/a.jsonl", "contains a credential beside the address s3://bucket"),
        ("s3://bucket/a.jsonl?token=abc", "contains a credential"),
        ("key:secret@bucket/a.jsonl", "contains a credential"),
        ("s3:/key:secret@bucket/a.jsonl", "contains a credential"),
        ("https://host/a.jsonl", "has the unknown scheme 'https'"),
        ("file:///a.jsonl", "has the unknown scheme 'file'"),
        ("s3:///a.jsonl", "has no bucket"),
        ("s3://bucket/a?.jsonl", "unknown parameter"),
        ("s3://bucket/a**.jsonl", "is no pattern of files"),
        ("a**b.jsonl", "is no pattern of files"),
        (" ", "must be a path or an address"),
        ("a\nb.jsonl", "must be a path or an address"),
    ],
)
def test_a_pattern_that_cannot_be_used_has_a_reason_without_the_secret(
    pattern: str, reason: str
) -> None:
    assert reason in fault(pattern)
    assert "secret" not in fault(pattern)
    assert "abc" not in fault(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "a.jsonl",
        "/data/a:b@c/*.jsonl",
        "s3://bucket/x/**/*.jsonl?profile=eu",
        "memory://x/[ab].jsonl",
    ],
)
def test_a_pattern_that_can_be_used_has_no_fault(pattern: str) -> None:
    assert fault(pattern) == ""


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("a/*.jsonl", "a/b.jsonl", "a/b/c.jsonl"),
        ("a/*", "a/b", "a/"),
        ("a/?.jsonl", "a/b.jsonl", "a/bc.jsonl"),
        ("a/[xy]*", "a/x1", "a/z1"),
        ("a/[!x]", "a/y", "a/x"),
        ("**/c", "a/b/c", "a/b/d"),
        ("**/c", "c", "c/d"),
        ("a/**/c", "a/c", "b/c"),
        ("a/**", "a/b/c", "a"),
        ("**/b/**/d", "a/b/b/c/d", "a/b/c"),
        ("**/a/b", "a/a/b", "a/b/a"),
        ("a/[b", "a/[b", "a/b"),
        ("a.b", "a.b", "axb"),
    ],
)
def test_a_pattern_matches_whole_parts_of_a_path(pattern: str, matching: str, other: str) -> None:
    assert matcher(pattern)(matching)
    assert not matcher(pattern)(other)


def test_names_that_were_made_for_a_pattern_take_no_time() -> None:
    """An expression that goes back to every `*` would not end."""
    assert not matcher("*a" * 30 + ".jsonl")("a" * 1000 + "b")
    assert not matcher("**/a/" * 30 + "x.jsonl")("a/" * 300 + "b")
    assert matcher("*a" * 30 + ".jsonl")("ba" * 300 + ".jsonl")
