import asyncio
import queue
from traceback import FrameSummary

import pytest

from rollout.service import blocked_loop, event_loop
from storage.machine import limited_process
from tests.support.patience import PATIENCE_S


def frames(*files: str) -> list[FrameSummary]:
    return [FrameSummary(file, line, "call") for line, file in enumerate(files, 1)]


@pytest.mark.parametrize(
    ("called", "place"),
    [
        (("/home/me/my_reward.py", asyncio.__file__), "/home/me/my_reward.py, line 3"),
        (("/home/me/my_reward.py", limited_process.__file__), "/home/me/my_reward.py, line 3"),
        ((event_loop.__file__, limited_process.__file__), f"{limited_process.__file__}, line 4"),
        (
            (pytest.__file__, "<frozen importlib._bootstrap>"),
            "<frozen importlib._bootstrap>, line 4",
        ),
    ],
)
def test_only_code_of_users_is_advised_to_await(called: tuple[str, ...], place: str) -> None:
    found = blocked_loop.note(frames("<string>", event_loop.__file__, *called))
    assert found.startswith(f"blocked for 30 s by {place}, in call: no lease is renewed")
    assert ("must await" in found) == ("my_reward.py" in place)


async def answers_late(reports: "queue.Queue[str]") -> str:
    """Block the event loop until that is reported."""
    return reports.get(timeout=PATIENCE_S)


async def waits(reports: "queue.Queue[str]") -> tuple[str, str]:
    first = await answers_late(reports)
    return first, await asyncio.to_thread(reports.get, timeout=PATIENCE_S)


def test_code_that_blocks_an_event_loop_is_reported_with_its_line_until_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The limits are short only for the time that the test takes: it waits for the reports."""
    monkeypatch.setattr(blocked_loop, "BLOCKED_S", 0.01)
    monkeypatch.setattr(blocked_loop, "POLL_INTERVAL_S", 0.001)
    reports = queue.Queue[str]()
    first, last = event_loop.run(waits(reports), reports.put)
    line = answers_late.__code__.co_firstlineno
    place = f"{__file__}, line {line + 2}, in answers_late"
    assert first.startswith(f"blocked for 0.01 s by {place}: no lease is renewed")
    assert "queue.py" in caplog.text, "the log has the frames of libraries, too"
    assert last == ""
