"""Time of an event loop that passes at once."""

import asyncio


async def pass_by(seconds: float) -> None:
    """Set the clock of the running loop forward, and let what is due then happen."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]  # a clock of this loop alone
    await asyncio.sleep(0)
    await asyncio.sleep(0)
