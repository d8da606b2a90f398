import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from storage.errors import ConfigError, CorruptError
from storage.machine import kept_process, limited_process
from storage.machine.kept_process import KeptProcess, answered, result
from storage.machine.limited_process import LimitedProcess, ProcessDiedError, ProcessTimeoutError
from tests.support.patience import PATIENCE_S

KEEPING = """
from storage.errors import ConfigError
from storage.machine.child_limits import limit_cpu, open_replies, serve

kept = []

def answer(*, keep=None, say=None, works=False):
    while works:
        pass
    if keep == "bad":
        raise ConfigError("bad")
    if keep is not None:
        kept.append(keep)
    return [*kept, say]

serve(answer, open_replies(), (ConfigError,))
"""
ERRORS = (ConfigError, CorruptError)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LimitedProcess]]:
    """The children that were started."""
    started: list[LimitedProcess] = []
    popen = subprocess.Popen

    def replaced(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        assert command[-1] == "named"
        return popen([command[0], "-c", KEEPING], **options)

    class Recorded(LimitedProcess):
        def __init__(self, module: str) -> None:
            super().__init__(module)
            started.append(self)

    monkeypatch.setattr(limited_process.subprocess, "Popen", replaced)
    monkeypatch.setattr(kept_process, "LimitedProcess", Recorded)
    yield started
    assert all(child.has_ended for child in started), "a process is left"


@pytest.fixture
def process(children: list[LimitedProcess]) -> Iterator[KeptProcess]:
    made = KeptProcess("named", {"keep": "first"})
    yield made
    made.close()


def test_a_child_is_started_with_its_first_question(
    process: KeptProcess, children: list[LimitedProcess]
) -> None:
    assert process.pid is None
    assert result(process.ask(), ERRORS) == ["first", None]
    assert result(process.ask({"say": "a"}), ERRORS) == ["first", "a"]
    assert result(process.ask({"say": "b"}), ERRORS) == ["first", "b"]
    assert [process.pid] == [child.pid for child in children]


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_lost_child_is_replaced_by_one_with_the_first_question(
    is_idle: bool, process: KeptProcess, children: list[LimitedProcess]
) -> None:
    process.ask()
    (first,) = children
    if is_idle:
        first.close()
    else:
        os.kill(first.pid, signal.SIGSTOP)  # it has the question and cannot have answered
        threading.Timer(0.2, first.kill).start()
    assert result(process.ask({"say": "a"}), ERRORS) == ["first", "a"]
    assert [child.has_ended for child in children] == [True, False]


@pytest.mark.parametrize("num_lost", [1, 2])
def test_a_question_is_asked_of_two_children_at_most(
    num_lost: int,
    process: KeptProcess,
    children: list[LimitedProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask = LimitedProcess.ask

    def lost(child: LimitedProcess, question: dict[str, Any]) -> dict[str, Any]:
        if len(children) <= num_lost:
            child.kill()
        return ask(child, question)

    monkeypatch.setattr(LimitedProcess, "ask", lost)
    if num_lost == 1:
        assert result(process.ask(), ERRORS) == ["first", None]
    else:
        with pytest.raises(ProcessDiedError):
            process.ask()
    assert len(children) == 2


def test_a_question_that_exceeds_its_cpu_time_is_asked_once(
    process: KeptProcess, children: list[LimitedProcess]
) -> None:
    process.ask()
    with pytest.raises(ProcessTimeoutError):
        process.ask({"works": True, "cpu_s": 0.2})
    assert process.pid is None
    assert len(children) == 1
    assert result(process.ask({"say": "a"}), ERRORS) == ["first", "a"]
    assert len(children) == 2


def test_an_error_of_the_first_question_is_the_answer_to_each(
    children: list[LimitedProcess],
) -> None:
    process = KeptProcess("named", {"keep": "bad"})
    for question in (None, {"say": "a"}):
        with pytest.raises(ConfigError, match=r"^bad$"):
            result(process.ask(question), ERRORS)
        assert process.pid is None
    assert len(children) == 2
    process.close()


@pytest.mark.parametrize("is_first", [True, False])
def test_closing_ends_a_question_in_progress_and_no_other_begins(
    is_first: bool, children: list[LimitedProcess]
) -> None:
    endless = {"works": True, "cpu_s": 1e6}
    process = KeptProcess("named", endless if is_first else {})
    raised: list[Exception] = []

    def ask() -> None:
        try:
            if not is_first:
                process.ask()
            process.ask(endless)
        except Exception as error:
            raised.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    while not (process.pid and psutil.Process(process.pid).cpu_times().user > 0.3):
        asking.join(0.01)
        assert asking.is_alive()
    process.close()
    asking.join(PATIENCE_S)
    assert [type(error) for error in raised] == [ProcessDiedError]
    assert len(children) == 1
    with pytest.raises(ProcessDiedError, match="it was closed"):
        process.ask()
    assert len(children) == 1


def test_several_threads_are_answered_one_after_another(process: KeptProcess) -> None:
    answers: list[object] = []

    def ask(say: int) -> None:
        answers.append(result(process.ask({"say": say}), ERRORS))

    threads = [threading.Thread(target=ask, args=(say,)) for say in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(map(str, answers)) == [str(["first", say]) for say in range(8)]


def test_one_question_has_a_process_of_its_own(children: list[LimitedProcess]) -> None:
    assert result(answered("named", {"say": "a"}), ERRORS) == ["a"]
    with pytest.raises(ProcessTimeoutError):
        answered("named", {"works": True, "cpu_s": 0.2})
    assert len(children) == 2
