import asyncio

import pytest

from rollout.agents.episode_time import episode_limit, stopped_time


async def test_an_episode_is_cancelled_at_its_timeout() -> None:
    with pytest.raises(TimeoutError):
        async with episode_limit(0.01) as limit:
            await asyncio.Event().wait()
    assert limit.is_over


async def test_the_clock_does_not_advance_during_a_stop_and_the_rest_remains() -> None:
    over: list[bool] = []

    async def play() -> None:
        async with episode_limit(0.1) as limit:
            async with stopped_time():
                await asyncio.sleep(0.3)
            over.append(limit.is_over)
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await play()
    assert over == [False]


async def test_the_clock_advances_only_when_all_stops_are_over() -> None:
    async def stop(seconds: float) -> None:
        async with stopped_time():
            await asyncio.sleep(seconds)

    async with episode_limit(0.05) as limit:
        await asyncio.gather(stop(0.01), stop(0.3))
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
