"""Rules that one field cannot say: order, uniqueness and lengths that belong together.

Each rule checks one Pydantic row, and a whole Arrow table at once; both give the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from contracts.columns import as_numpy, column, ragged


@dataclass(frozen=True)
class Violation:
    """The first place where a table breaks a rule; `row` counts from 0."""

    column: str
    row: int | None
    value: object
    want: str


class Rule(Protocol):
    """What a rule can do: `check_row` looks at one row, `check_rows` and `check_table` at all of them."""

    def check_row(self, row: Any) -> str | None:
        """The problem of one row in words, or None."""

    def check_rows(self, rows: Sequence[Any]) -> Violation | None:
        """What only shows across rows."""

    def check_table(self, table: pa.Table) -> Violation | None:
        """Everything, on a whole table."""


@dataclass(frozen=True)
class Unique:
    """No value of a column stands twice in a table."""

    name: str

    def check_row(self, row: Any) -> str | None:  # noqa: ARG002 - one row cannot break it
        """One row alone is always unique."""
        return None

    def check_rows(self, rows: Sequence[Any]) -> Violation | None:
        """The first row whose value an earlier row has."""
        seen: set[object] = set()
        for number, row in enumerate(rows):
            value = getattr(row, self.name)
            if value in seen:
                return Violation(self.name, number, value, "each value once")
            seen.add(value)
        return None

    def check_table(self, table: pa.Table) -> Violation | None:
        """The first row whose value an earlier row has."""
        codes = as_numpy(column(table, self.name).dictionary_encode().indices)
        first = np.full(len(codes), len(codes))
        np.minimum.at(first, codes, np.arange(len(codes)))
        repeated = first[codes] < np.arange(len(codes))
        if not repeated.any():
            return None
        row = int(np.argmax(repeated))
        return Violation(self.name, row, column(table, self.name)[row].as_py(), "each value once")


class _RowRule:
    """A rule that lives within one row: nothing more shows across rows."""

    def check_rows(self, rows: Sequence[Any]) -> Violation | None:  # noqa: ARG002
        """Each row has been checked by itself."""
        return None


@dataclass(frozen=True)
class UniqueWithin(_RowRule):
    """No value of a field stands twice in one list (`UniqueWithin("candidates", "chunk_id")`)."""

    name: str
    field: str

    def check_row(self, row: Any) -> str | None:
        """The problem in words, or None."""
        values = [getattr(item, self.field) for item in getattr(row, self.name)]
        return None if len(set(values)) == len(values) else f"{self.name}.{self.field}: each value once in a list"

    def check_table(self, table: pa.Table) -> Violation | None:
        """Counts distinct (row, value) pairs."""
        lists = ragged(table, self.name)
        values = lists.values[self.field]
        codes = as_numpy(values.dictionary_encode().indices).astype(np.int64)
        keys = lists.rows * (int(codes.max(initial=0)) + 1) + codes
        order = np.argsort(keys, kind="stable")
        repeated = np.flatnonzero(np.diff(keys[order]) == 0)
        if not len(repeated):
            return None
        first = int(order[repeated + 1].min())
        path = f"{self.name}.{self.field}"
        return Violation(path, int(lists.rows[first]), values[first].as_py(), "each value once in a list")


@dataclass(frozen=True)
class Ranked(_RowRule):
    """The `rank` of a list's items counts 1, 2, 3 ... in the order they stand."""

    name: str

    def check_row(self, row: Any) -> str | None:
        """The problem in words, or None."""
        ranks = [item.rank for item in getattr(row, self.name)]
        return None if ranks == list(range(1, len(ranks) + 1)) else f"{self.name}.rank: want 1, 2, 3 ... in order"

    def check_table(self, table: pa.Table) -> Violation | None:
        """Compares every rank with its place."""
        lists = ragged(table, self.name)
        ranks = lists.numpy("rank")
        wrong = ranks != lists.positions + 1
        if not wrong.any():
            return None
        first = int(np.argmax(wrong))
        return Violation(f"{self.name}.rank", int(lists.rows[first]), int(ranks[first]), "1, 2, 3 ... in order")


@dataclass(frozen=True)
class Sorted(_RowRule):
    """A list falls in `field`, ties in ascending `tie`: a total order."""

    name: str
    field: str
    tie: str = "chunk_id"

    def check_row(self, row: Any) -> str | None:
        """The problem in words, or None."""
        keys = [(-getattr(item, self.field), getattr(item, self.tie)) for item in getattr(row, self.name)]
        return None if keys == sorted(keys) else f"{self.name}: want falling {self.field}, ties by {self.tie}"

    def check_table(self, table: pa.Table) -> Violation | None:
        """Compares every item with the one before it in the same list."""
        lists = ragged(table, self.name)
        numbers, ties = lists.numpy(self.field), lists.values[self.tie]
        inside = lists.positions[1:] > 0
        fell = numbers[1:] < numbers[:-1]
        tied = numbers[1:] == numbers[:-1]
        if tied.any():
            tied &= as_numpy(pc.greater_equal(ties.slice(1), ties.slice(0, len(ties) - 1)))
        wrong = inside & ~fell & ~tied
        if not wrong.any():
            return None
        first = int(np.argmax(wrong)) + 1
        want = f"falling {self.field}, ties by ascending {self.tie}"
        return Violation(f"{self.name}.{self.field}", int(lists.rows[first]), numbers[first].item(), want)


@dataclass(frozen=True)
class Triangle(_RowRule):
    """`pairs` holds the lower triangle below the diagonal of the square matrix over `items`: n(n-1)/2 values."""

    items: str
    pairs: str

    def check_row(self, row: Any) -> str | None:
        """The problem in words, or None."""
        count = len(getattr(row, self.items))
        want = count * (count - 1) // 2
        return None if len(getattr(row, self.pairs)) == want else f"{self.pairs}: want {want} values"

    def check_table(self, table: pa.Table) -> Violation | None:
        """Compares the two lengths of every row."""
        counts = ragged(table, self.items).lengths
        got, want = ragged(table, self.pairs).lengths, counts * (counts - 1) // 2
        if np.array_equal(got, want):
            return None
        row = int(np.argmax(got != want))
        return Violation(self.pairs, row, f"{got[row]} values", f"{want[row]} values, n(n-1)/2 of {self.items}")
