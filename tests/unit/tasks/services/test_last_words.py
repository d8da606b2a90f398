"""The end of a dead process's log: bounded, plain text, without secrets."""

from pathlib import Path

import pytest

from tasks.services import last_words


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the flow run `f`."""
    monkeypatch.setenv("ASTRAFLOW_LOGS", str(tmp_path))
    (tmp_path / "flows").mkdir()
    return tmp_path / "flows" / "f.log"


def test_the_last_lines_of_the_file_are_returned_in_order(log: Path) -> None:
    log.write_text("\n".join(f"line {number}\n" for number in range(100)) + "\n\n")
    assert last_words.of_file("f") == [f"line {number}" for number in range(88, 100)]


def test_a_process_without_a_file_has_no_words(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert last_words.of_file("f") == []
    log.write_text("x\n")
    monkeypatch.delenv("ASTRAFLOW_LOGS")
    assert last_words.of_file("f") == []


def test_a_large_file_is_read_from_its_end_and_long_lines_are_cut(log: Path) -> None:
    log.write_bytes(b"start\n" + b"\xff" * 1_000_000 + b"\n" + b"y" * 5000 + b"\nlast\n")
    long, last = last_words.of_file("f")
    assert long == "y" * 300 + "…"
    assert last == "last"


def test_only_the_end_of_a_large_file_is_read(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_words, "BYTES_READ", 11)
    log.write_text("12345678\nabcdefghi\n")
    assert last_words.of_file("f") == ["abcdefghi"]


def test_the_rest_of_a_line_whose_start_was_not_read_is_not_shown(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "password=hunter2\n"
    log.write_text(f"{secret}the last line\n")
    for size in range(15, len(secret) + 14):
        monkeypatch.setattr(last_words, "BYTES_READ", size)
        assert last_words.of_file("f") == ["the last line"]
    monkeypatch.setattr(last_words, "BYTES_READ", len(secret) + 14)
    assert last_words.of_file("f") == ["password=…", "the last line"]


def test_a_line_has_no_control_characters() -> None:
    assert last_words.shown(["a\x1b[2Jb\x07\u202ec"]) == ["a[2Jbc"]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("AWS_SECRET_ACCESS_KEY=abc/def+1", "AWS_SECRET_ACCESS_KEY=…"),
        ('{"password": "hunter2", "user": "me"}', '{"password": …", "user": "me"}'),
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: Basic …"),
        ("authorization: Bearer abc.def", "authorization: Bearer …"),
        ("key AKIAIOSFODNN7EXAMPLE was refused", "key … was refused"),
        ("GET http://me:pass@host:4200/api failed", "GET http://host:4200/api failed"),
        ("5,000 tokens: 12 per second", "5,000 tokens: 12 per second"),
        ("loss 0.3, step 40", "loss 0.3, step 40"),
    ],
)
def test_what_looks_like_a_secret_is_removed(line: str, shown: str) -> None:
    assert last_words.without_secrets(line) == shown


def test_secrets_of_the_environment_are_removed_wherever_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "astraflow:s3cr3t")
    monkeypatch.setenv("SOME_TOKEN", "short")
    monkeypatch.setenv("EDITOR", "editor-name")
    assert (
        last_words.without_secrets("got astraflow:s3cr3t, short, editor-name")
        == "got …, short, editor-name"
    )


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            "exited with non-zero status code -11.",
            "exited with non-zero status code -11. (SIGSEGV)",
        ),
        ("status code: 137. Killed", "status code: 137. Killed (SIGKILL)"),
        ("status code: -9. Process exited due to a SIGKILL", None),
        ("exited with non-zero status code 1.", "exited with non-zero status code 1."),
        ("status code -99", "status code -99"),
        ("an exception:\n\x1b[2Jboom", "an exception: [2Jboom"),
        ("", ""),
    ],
)
def test_the_signal_that_ended_a_process_is_named_once(message: str, words: str | None) -> None:
    assert last_words.exit_words(message) == (message if words is None else words)
