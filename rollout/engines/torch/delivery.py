"""Delivery of results from an engine's thread to the event loops that await them."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any


def settle(results: Sequence[tuple["asyncio.Future[Any]", object]]) -> None:
    """Resolve each future with its result or exception, with one wake-up of each event loop."""
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], object]]] = (
        defaultdict(list)
    )
    for future, result in results:
        by_loop[future.get_loop()].append((future, result))
    for loop, group in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve, group)
        except RuntimeError:  # the event loop has ended: nothing awaits the results
            continue


def _resolve(results: Sequence[tuple["asyncio.Future[Any]", object]]) -> None:
    for future, result in results:
        if future.done():  # cancelled meanwhile
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
