import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage.errors import ConfigError, CorruptError
from storage.machine import limited_process
from storage.machine.child_limits import ANSWER_CHARS_MAX
from storage.machine.kept_process import result
from storage.machine.limited_process import (
    ENVIRONMENT,
    LimitedProcess,
    ProcessDiedError,
    ProcessTimeoutError,
    child_environment,
)
from tests.support.patience import PATIENCE_S

SERVING = """
from storage.errors import ConfigError, CorruptError
from storage.machine.child_limits import limit_cpu, open_replies, serve

def answer(*, say="", error="", num_bytes=0, works=False, cpu_s=0.0, num_chars=0):
    if error:
        raise {"corrupt": CorruptError, "other": KeyError, "full": MemoryError}[error](say)
    if cpu_s:
        limit_cpu(cpu_s)
    while works:
        pass
    print("a library's own line")
    return [say, len(bytes(num_bytes)), "x" * num_chars]

serve(answer, open_replies(), (ConfigError, CorruptError))
"""
ERRORS = (ConfigError, CorruptError)


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[LimitedProcess]:
    popen = subprocess.Popen

    def replaced(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        return popen([command[0], "-c", SERVING], **options)

    with monkeypatch.context() as patched:
        patched.setattr(limited_process.subprocess, "Popen", replaced)
        child = LimitedProcess("named")
    yield child
    child.close()


def test_a_child_answers_one_question_after_another(serving: LimitedProcess) -> None:
    assert serving.first == {"ready": True}
    for say in ("one", 'two\n"\u2028', "x" * 300_000):
        assert result(serving.ask({"say": say}), ERRORS) == [say, 0, ""]


def test_a_child_names_the_error_of_a_question_and_answers_the_next(
    serving: LimitedProcess,
) -> None:
    with pytest.raises(CorruptError, match=r"^bad$"):
        result(serving.ask({"say": "bad", "error": "corrupt"}), ERRORS)
    with pytest.raises(ConfigError, match=r"^KeyError: 'bad'$"):
        result(serving.ask({"say": "bad", "error": "other"}), ERRORS)
    assert result(serving.ask({"say": "good"}), ERRORS)[0] == "good"


def test_a_question_has_a_limit_of_cpu_time_and_the_next_one_another(
    serving: LimitedProcess,
) -> None:
    result(serving.ask({"cpu_s": 0.5}), ERRORS)
    result(serving.ask({"cpu_s": 1e6}), ERRORS)
    with pytest.raises(ProcessTimeoutError, match="it used up its CPU time"):
        serving.ask({"cpu_s": 0.5, "works": True})
    assert serving.has_ended


def test_memory_is_limited_beyond_that_of_the_imports(serving: LimitedProcess) -> None:
    assert result(serving.ask({"num_bytes": 1 << 30}), ERRORS)[1] == 1 << 30
    with pytest.raises(ProcessDiedError, match="it ended with status 0"):
        serving.ask({"num_bytes": 3 << 30})


def test_a_very_long_answer_is_an_error(serving: LimitedProcess) -> None:
    longest = ANSWER_CHARS_MAX - len(json.dumps({"result": ["", 0, ""]}))
    assert len(result(serving.ask({"num_chars": longest}), ERRORS)[2]) == longest
    with pytest.raises(ConfigError, match="the result has more than 8,388,608 characters"):
        result(serving.ask({"num_chars": longest + 1}), ERRORS)


def test_a_lost_child_is_an_error_with_its_status(serving: LimitedProcess) -> None:
    serving.kill()
    with pytest.raises(ProcessDiedError, match=r"it ended (with status -9|before the question)"):
        serving.ask({})


@pytest.mark.parametrize("num_chars", [1, 1_000_000])
def test_a_stopped_child_is_given_up_whether_it_has_read_the_question_or_not(
    num_chars: int, serving: LimitedProcess
) -> None:
    serving._stall_s = 2.0
    os.kill(serving.pid, signal.SIGSTOP)
    with pytest.raises(ProcessDiedError, match="it did not use the CPU for 2 s"):
        serving.ask({"say": "x" * num_chars})


def test_a_child_ends_with_its_standard_input(serving: LimitedProcess) -> None:
    assert serving._child.stdin is not None
    serving._child.stdin.close()  # the effect of the parent's death in the kernel
    assert serving._child.wait(PATIENCE_S) == 0


def test_a_child_starts_in_a_folder_that_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "deleted"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    child = LimitedProcess("tasks.episodes.token_decoder_child")
    assert child.first == {"ready": True}
    child.close()


def test_a_child_that_does_not_start_is_named_with_its_status() -> None:
    with pytest.raises(ProcessDiedError, match="ended with status 1 before it was ready"):
        LimitedProcess("storage.no_such_module")


def test_a_child_inherits_no_credentials() -> None:
    secret = {
        "AWS_SECRET_ACCESS_KEY": "a",
        "HF_TOKEN": "b",
        "API_KEY": "c",
        "MLFLOW_TRACKING_PASSWORD": "d",
        "ANYTHING": "e",
    }
    made = child_environment(
        {**secret, "PATH": "/bin", "HOME": "/home/me", "PYTHONPATH": "/elsewhere"}
    )
    assert made == {
        "PATH": "/bin",
        "HOME": "/home/me",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    assert not any(
        word in name for name in ENVIRONMENT for word in ("KEY", "TOKEN", "SECRET", "PASS", "AWS")
    )
