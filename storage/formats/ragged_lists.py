"""List columns of a table that are aligned by token: element i of each list belongs to token i.

Shape legend: T tokens of all rows, R rows.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """The flat values of every column, and the row offsets that all columns share."""

    values: Mapping[str, NDArray[Any]]
    """Column → [T]."""
    offsets: NDArray[np.int32]
    """[R + 1] row r of a column is `values[column][offsets[r]:offsets[r + 1]]`."""

    @classmethod
    def from_table(cls, table: Table, names: Iterable[str]) -> "TokenLists":
        """Read the columns `names`; CorruptError when two of them differ in the length of a row."""
        return cls._aligned({name: lists(table, name) for name in names})

    @classmethod
    def from_rows(cls, columns: Mapping[str, Sequence[NDArray[Any]]]) -> "TokenLists":
        """Join the arrays of one row or more, by column; CorruptError as `from_table`."""
        return cls._aligned(
            {
                name: (
                    np.concatenate(rows),
                    np.cumsum([0, *(len(row) for row in rows)], dtype=np.int32),
                )
                for name, rows in columns.items()
            }
        )

    @classmethod
    def _aligned(
        cls, columns: Mapping[str, tuple[NDArray[Any], NDArray[np.int32]]]
    ) -> "TokenLists":
        (first, (_, first_offsets)), *others = columns.items()
        for name, (_, offsets) in others:
            if (rows := np.flatnonzero(np.diff(offsets) != np.diff(first_offsets))).size:
                raise CorruptError(f"row {rows[0]}: {name} and {first} differ in length")
        return cls({name: flat for name, (flat, _) in columns.items()}, first_offsets)

    def rows(self, name: str) -> Iterator[NDArray[Any]]:
        """Iterate over the rows of a column, as views."""
        flat, offsets = self.values[name], self.offsets.tolist()
        return (flat[start:end] for start, end in pairwise(offsets))

    def repeat(self, per_row: NDArray[Any]) -> NDArray[Any]:
        """Return [T] from [R]: the value of each row on each of its tokens."""
        return np.repeat(per_row, np.diff(self.offsets))

    def raise_where(self, is_wrong: Bool, fault: str) -> None:
        """Raise CorruptError for the first True of `is_wrong` [T], with its row and token."""
        if is_wrong.any():
            position = int(is_wrong.argmax())
            row = int(np.searchsorted(self.offsets, position, side="right")) - 1
            raise CorruptError(f"row {row}, token {position - int(self.offsets[row])}: {fault}")
