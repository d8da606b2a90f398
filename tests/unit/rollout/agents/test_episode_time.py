import asyncio

import pytest

from rollout.agents.episode_time import episode_limit, stopped_time
from tests.support.patience import PATIENCE_S
from tests.support.time_leaps import pass_by


async def test_an_episode_is_cancelled_at_its_timeout() -> None:
    with pytest.raises(TimeoutError):
        async with episode_limit(0.01) as limit:
            await asyncio.Event().wait()
    assert limit.is_over


async def test_the_clock_does_not_advance_during_a_stop_and_the_rest_remains() -> None:
    over: list[bool] = []

    async def play() -> None:
        async with episode_limit(2 * PATIENCE_S) as limit:
            async with stopped_time():
                await pass_by(3 * PATIENCE_S)
            over.append(limit.is_over)
            await pass_by(2 * PATIENCE_S)
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await play()
    assert over == [False]


async def test_the_clock_advances_only_when_all_stops_are_over() -> None:
    async with episode_limit(2 * PATIENCE_S) as limit:
        async with stopped_time():
            async with stopped_time():
                pass
            await pass_by(3 * PATIENCE_S)
        assert not limit.is_over


async def test_an_error_during_a_stop_restarts_the_clock() -> None:
    async def judge() -> None:
        async with stopped_time():
            raise ValueError("judge")

    async def play() -> None:
        async with episode_limit(0.05):
            with pytest.raises(ValueError, match="judge"):
                await judge()
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await play()


async def test_without_an_episode_a_stop_has_no_effect() -> None:
    async with stopped_time():
        pass


async def test_a_task_that_outlives_its_episode_stops_no_clock() -> None:
    release = asyncio.Event()

    async def stop() -> str:
        async with stopped_time():
            await release.wait()
        return "done"

    async with episode_limit(10.0):
        task = asyncio.create_task(stop())
        await asyncio.sleep(0)
    release.set()
    assert await task == "done"
