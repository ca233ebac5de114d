"""Rules that one field cannot say: order, uniqueness and lengths that belong together.

Each rule checks one Pydantic row, and a whole Arrow table at once; both give the same answer. A table
is given to rules once its fields are sound: right types, no nulls where none may be, finite numbers.
A null list counts as an empty one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from contracts.columns import Array, as_numpy, column, first_repeat, ragged


@dataclass(frozen=True)
class Violation:
    """The first place where a table breaks a rule; `row` counts from 0 and is None for a whole column."""

    column: str
    row: int | None
    value: object
    want: str


class Rule(Protocol):
    """What a rule can do: `check_row` looks at one row, `check_rows` and `check_table` at all of them."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns it looks at."""

    def check_row(self, row: Any) -> Violation | None:
        """What one row breaks by itself; it does not know its number."""

    def check_rows(self, rows: Sequence[Any]) -> Violation | None:
        """What only shows across rows."""

    def check_table(self, table: pa.Table) -> Violation | None:
        """Everything, on a whole table: the violation in its lowest row."""


@dataclass(frozen=True)
class Unique:
    """No value of a column of text or integers stands twice in a table; null is a value like others."""

    name: str

    @property
    def columns(self) -> tuple[str, ...]:
        """The column itself."""
        return (self.name,)

    def check_row(self, row: Any) -> Violation | None:  # noqa: ARG002 - one row cannot break it
        """One row alone is always unique."""
        return None

    def check_rows(self, rows: Sequence[Any]) -> Violation | None:
        """The first row whose value an earlier row has."""
        row = _first_repeat([getattr(row, self.name) for row in rows])
        return None if row is None else Violation(self.name, row, getattr(rows[row], self.name), "each value once")

    def check_table(self, table: pa.Table) -> Violation | None:
        """The first row whose value an earlier row has."""
        values = column(table, self.name)
        codes = _codes(values)
        places = np.arange(len(codes))
        first = np.zeros(len(codes), dtype=np.int64)
        first[codes[::-1]] = places[::-1]  # of several writes to one code the last stays, here the earliest place
        row = _first_true(first[codes] < places)
        return None if row is None else Violation(self.name, row, values[row].as_py(), "each value once")


@dataclass(frozen=True)
class _ListRule:
    """A rule that lives within the list `name` of each row: nothing more shows across rows."""

    name: str

    @property
    def columns(self) -> tuple[str, ...]:
        """The list column."""
        return (self.name,)

    def check_rows(self, rows: Sequence[Any]) -> Violation | None:  # noqa: ARG002
        """Each row has been checked by itself."""
        return None

    def _items(self, row: Any) -> Sequence[Any]:
        return getattr(row, self.name) or ()


@dataclass(frozen=True)
class UniqueWithin(_ListRule):
    """No value of a field stands twice in one list (`UniqueWithin("candidates", "chunk_id")`)."""

    field: str

    def check_row(self, row: Any) -> Violation | None:
        """The first item whose value an earlier one has."""
        values = [getattr(item, self.field) for item in self._items(row)]
        place = _first_repeat(values)
        return None if place is None else self._violation(None, values[place])

    def check_table(self, table: pa.Table) -> Violation | None:
        """The first item whose value an earlier one of its list has."""
        lists = ragged(table, self.name)
        values = lists.values[self.field]
        codes = _codes(values)
        first = first_repeat(lists.rows * (int(codes.max(initial=0)) + 1) + codes)
        return None if first is None else self._violation(int(lists.rows[first]), values[first].as_py())

    def _violation(self, row: int | None, value: object) -> Violation:
        return Violation(f"{self.name}.{self.field}", row, value, "each value once in a list")


@dataclass(frozen=True)
class Ranked(_ListRule):
    """The `rank` of a list's items counts 1, 2, 3 ... in the order they stand."""

    def check_row(self, row: Any) -> Violation | None:
        """The first rank that is not its place."""
        ranks = [item.rank for item in self._items(row)]
        wrong = [rank for place, rank in enumerate(ranks, start=1) if rank != place]
        return self._violation(None, wrong[0]) if wrong else None

    def check_table(self, table: pa.Table) -> Violation | None:
        """Compares every rank with its place."""
        lists = ragged(table, self.name)
        ranks = lists.numpy("rank")
        first = _first_true(ranks != lists.positions + 1)
        return None if first is None else self._violation(int(lists.rows[first]), int(ranks[first]))

    def _violation(self, row: int | None, rank: int) -> Violation:
        return Violation(f"{self.name}.rank", row, rank, "1, 2, 3 ... in the order they stand")


@dataclass(frozen=True)
class Sorted(_ListRule):
    """A list falls in the number `field`, ties in ascending `tie`, a text: a total order."""

    field: str
    tie: str = "chunk_id"

    def check_row(self, row: Any) -> Violation | None:
        """The first item that should stand before the one before it."""
        keys = [(-getattr(item, self.field), getattr(item, self.tie)) for item in self._items(row)]
        wrong = [key for before, key in pairwise(keys) if key < before]
        return self._violation(None, -wrong[0][0]) if wrong else None

    def check_table(self, table: pa.Table) -> Violation | None:
        """Compares every item with the one before it in the same list."""
        lists = ragged(table, self.name)
        numbers, ties = lists.numpy(self.field), lists.values[self.tie]
        inside = lists.positions[1:] > 0
        wrong = inside & (numbers[1:] > numbers[:-1])
        tied = np.flatnonzero(inside & (numbers[1:] == numbers[:-1]))
        wrong[tied] = as_numpy(pc.less(ties.take(pa.array(tied + 1)), ties.take(pa.array(tied))))
        first = _first_true(wrong)
        return None if first is None else self._violation(int(lists.rows[first + 1]), numbers[first + 1].item())

    def _violation(self, row: int | None, value: float) -> Violation:
        want = f"falling {self.field}, ties by ascending {self.tie}"
        return Violation(f"{self.name}.{self.field}", row, value, want)


@dataclass(frozen=True)
class Triangle:
    """`pairs` holds the lower triangle below the diagonal of the square matrix over `items`: n(n-1)/2 values."""

    items: str
    pairs: str

    @property
    def columns(self) -> tuple[str, ...]:
        """Both list columns."""
        return (self.items, self.pairs)

    def check_row(self, row: Any) -> Violation | None:
        """Compares the two lengths."""
        count, got = len(getattr(row, self.items) or ()), len(getattr(row, self.pairs) or ())
        want = count * (count - 1) // 2
        return None if got == want else self._violation(None, got, want)

    def check_rows(self, rows: Sequence[Any]) -> Violation | None:  # noqa: ARG002
        """Each row has been checked by itself."""
        return None

    def check_table(self, table: pa.Table) -> Violation | None:
        """Compares the two lengths of every row."""
        counts = ragged(table, self.items).lengths
        got, want = ragged(table, self.pairs).lengths, counts * (counts - 1) // 2
        row = _first_true(got != want)
        return None if row is None else self._violation(row, int(got[row]), int(want[row]))

    def _violation(self, row: int | None, got: int, want: int) -> Violation:
        return Violation(self.pairs, row, f"{got} values", f"{want} values, n(n-1)/2 of {self.items}")


def _first_true(mask: Array) -> int | None:
    return int(np.argmax(mask)) if mask.any() else None


def _first_repeat(values: Sequence[object]) -> int | None:
    """The first place whose value stands at an earlier one too."""
    seen: set[object] = set()
    for place, value in enumerate(values):
        if value in seen:
            return place
        seen.add(value)
    return None


def _codes(values: pa.Array) -> Array:
    """(values,) int64: equal numbers for equal values, null among them, all below the number of values."""
    return as_numpy(values.dictionary_encode(null_encoding="encode").indices).astype(np.int64)
