"""A stream of prompts with a cursor, from which a restarted dataflow continues exactly.

    a source ──stream()──▶ PromptStream ──take(cursor, count)──▶ prompts, next cursor
                                        └─all(limit)──▶ prompts in the source's order (evaluation)

This module defines the order of the prompts. Sources read them; curators choose which of them are
rolled out.
"""

from collections.abc import Callable, Sequence

import numpy as np

from storage.errors import ConfigError, CorruptError
from storage.records.numbers import QUANTITY_MAX
from storage.records.rollouts import Prompt
from storage.records.types import Json


class PromptStream:
    """Prompts without end. A finite source is repeated epoch by epoch, each in another seeded
    permutation.
    """

    def __init__(self, at: Callable[[int], Prompt], size: int | None, seed: int) -> None:
        """`at(i)` returns prompt i of the source, i < `size`; `size` is None for an endless one."""
        if size is not None and size < 1:
            raise ValueError(f"a prompt stream needs at least one prompt, not {size}")
        self._at = at
        self._size = size
        self._seed = seed
        self._permutation = (-1, np.empty(0, np.int64))

    @classmethod
    def of(cls, prompts: Sequence[Prompt], seed: int) -> "PromptStream":
        """Return a stream of these prompts."""
        return cls(prompts.__getitem__, len(prompts), seed)

    def take(self, cursor: Json, count: int) -> tuple[list[Prompt], Json]:
        """Return the next `count` prompts after `cursor`, and the cursor behind them.

        A cursor is `{"epoch": e, "position": p}`: p prompts of epoch e have been taken. `{}` is the
        start. The same cursor always gives the same prompts. Raises CorruptError for anything else.
        """
        epoch, position = _read_cursor(cursor)
        prompts = []
        for _ in range(count):
            if self._size is not None and position >= self._size:
                epoch, position = epoch + 1, 0
            prompts.append(self._at(self._index(epoch, position)))
            position += 1
        return prompts, {"epoch": epoch, "position": position}

    def num(self, limit: int | None = None) -> int:
        """Return how many prompts `all` returns; raises what it raises, and makes none."""
        if limit is None and self._size is None:
            raise ConfigError(
                "the source of the prompts is endless; set prompts.limit, such as 512"
            )
        return min(bound for bound in (limit, self._size) if bound is not None)

    def all(self, limit: int | None = None) -> list[Prompt]:
        """Return the source's first `limit` prompts (or all) in the source's order. Raises
        ConfigError for all of an endless source.
        """
        return [self._at(index) for index in range(self.num(limit))]

    def _index(self, epoch: int, position: int) -> int:
        if self._size is None:
            return position
        if self._permutation[0] != epoch:
            order = np.random.default_rng([self._seed, epoch]).permutation(self._size)
            self._permutation = (epoch, order)
        return int(self._permutation[1][position])


def check_cursor(cursor: Json) -> None:
    """Raise CorruptError for a stored cursor that is no position of prompts, or one beyond any run:
    the next position could be too large for an order.
    """
    if max(_read_cursor(cursor)) > QUANTITY_MAX:
        raise CorruptError(f"the prompt cursor {cursor} has a number above {QUANTITY_MAX}")


def _read_cursor(cursor: Json) -> tuple[int, int]:
    epoch, position = cursor.get("epoch", 0), cursor.get("position", 0)
    if set(cursor) - {"epoch", "position"} or not all(
        isinstance(n, int) and n >= 0 for n in (epoch, position)
    ):
        raise CorruptError(
            f'a prompt cursor is {{"epoch": e, "position": p}} with whole numbers, not {cursor}'
        )
    return epoch, position
