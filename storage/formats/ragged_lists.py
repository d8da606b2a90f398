"""Several list columns of one table that run in step: element i of a row's lists speaks of the
row's token i.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.errors import CorruptError
from storage.formats.arrow_files import Table, lists
from storage.records.types import Bool


@dataclass(frozen=True)
class TokenLists:
    """The flat values of every column, [T] each, and the rows' shared bounds in them."""

    values: Mapping[str, NDArray[Any]]
    offsets: NDArray[np.int32]
    """[rows + 1] row r is `values[offsets[r]:offsets[r + 1]]`."""

    @classmethod
    def of(cls, table: Table, names: Iterable[str]) -> "TokenLists":
        """The columns `names` of `table`; CorruptError when two of them differ in a row's
        length.
        """
        columns = {name: lists(table, name) for name in names}
        (first, (_, offsets)), *others = columns.items()
        for name, (_, bounds) in others:
            if (wrong := np.flatnonzero(np.diff(bounds) != np.diff(offsets))).size:
                raise CorruptError(f"row {wrong[0]}: {name} and {first} differ in length")
        values = {name: flat[bounds[0] : bounds[-1]] for name, (flat, bounds) in columns.items()}
        return cls(values, offsets - offsets[0])

    def cut(self, name: str) -> Iterator[NDArray[Any]]:
        """The column row by row, as views."""
        flat, bounds = self.values[name], self.offsets.tolist()
        return (flat[start:end] for start, end in pairwise(bounds))

    def repeat(self, per_row: NDArray[Any]) -> NDArray[Any]:
        """[rows] → [T]: each row's value on each of its tokens."""
        return np.repeat(per_row, np.diff(self.offsets))

    def refuse(self, wrong: Bool, what: str) -> None:
        """CorruptError naming row and token when `wrong` [T] is True anywhere."""
        if wrong.any():
            place = int(wrong.argmax())
            row = int(np.searchsorted(self.offsets, place, side="right")) - 1
            raise CorruptError(f"row {row}, token {place - int(self.offsets[row])}: {what}")
