"""A stream of prompts from a `PromptSource`, and the cursor from which a restarted dataflow goes on exactly.

    PromptSource ──load_prompts──▶ PromptStream ──take(cursor, count)──▶ prompts, next cursor
                                                └─all(limit)──▶ prompts in the source's own order (evaluation)

This module knows in which order prompts are handed out. How files are read and what is wrong with them is
`prompt_files.py`; which of the prompts are rolled out is decided by curators.
"""

from collections.abc import Callable

import numpy as np

from data_ops.config import PromptSource
from data_ops.prompts.chained_addition import problem
from data_ops.prompts.files import read_hub, read_jsonl, read_parquet
from storage.errors import ConfigError, CorruptError
from storage.records.rollouts import Prompt
from storage.records.types import Json


class PromptStream:
    """Prompts without end. A finite source is gone through epoch by epoch, each epoch in its own seeded permutation."""

    def __init__(self, at: Callable[[int], Prompt], size: int | None, seed: int) -> None:
        """`at(i)` makes or finds prompt i of the source, i < `size`; a `size` of None means that there is no last
        one."""
        if size is not None and size < 1:
            raise ValueError(f"a prompt stream needs at least one prompt, not {size}")
        self._at = at
        self._size = size
        self._seed = seed
        self._permutation: tuple[int, list[int]] = (-1, [])

    def take(self, cursor: Json, count: int) -> tuple[list[Prompt], Json]:
        """The next `count` prompts after `cursor`, and the cursor behind them.

        A cursor is `{"epoch": e, "position": p}`: p prompts of epoch e have been handed out. `{}` is the start. The
        same cursor always gives the same prompts. Raises CorruptError for anything else.
        """
        epoch, position = _read_cursor(cursor)
        prompts = []
        for _ in range(count):
            if self._size is not None and position >= self._size:
                epoch, position = epoch + 1, 0
            prompts.append(self._at(self._index(epoch, position)))
            position += 1
        return prompts, {"epoch": epoch, "position": position}

    def all(self, limit: int | None = None) -> list[Prompt]:
        """The source's first `limit` prompts (or all) in its own order. Raises ConfigError for all of an endless
        source."""
        if limit is None and self._size is None:
            raise ConfigError("the prompts of prompts.builtin never end, so say how many; set prompts.limit (such as 512)")
        size = min(bound for bound in (limit, self._size) if bound is not None)
        return [self._at(index) for index in range(size)]

    def _index(self, epoch: int, position: int) -> int:
        if self._size is None:
            return position
        if self._permutation[0] != epoch:
            order = np.random.default_rng([self._seed, epoch]).permutation(self._size)
            self._permutation = (epoch, order.tolist())
        return self._permutation[1][position]


def load_prompts(source: PromptSource) -> PromptStream:
    """Open the source. Raises ConfigError that names the file, the lines and the fix when it cannot be used."""
    if source.builtin:
        return PromptStream(lambda index: problem(index, source.split, source.seed), source.limit, source.seed)
    prompts = _read(source)[: source.limit]
    return PromptStream(prompts.__getitem__, len(prompts), source.seed)


def _read(source: PromptSource) -> list[Prompt]:
    if source.hub:
        return read_hub(source)
    if source.path and source.path.endswith(".jsonl"):
        return read_jsonl(source)
    if source.path and source.path.endswith(".parquet"):
        return read_parquet(source)
    raise ConfigError(f"prompts.path {source.path} is neither .jsonl nor .parquet; convert the file to one of the two")


def _read_cursor(cursor: Json) -> tuple[int, int]:
    epoch, position = cursor.get("epoch", 0), cursor.get("position", 0)
    if set(cursor) - {"epoch", "position"} or not all(isinstance(n, int) and n >= 0 for n in (epoch, position)):
        raise CorruptError(f'a prompt cursor is {{"epoch": e, "position": p}} with whole numbers, not {cursor}')
    return epoch, position
