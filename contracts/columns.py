"""Ragged columns: how lists of candidates lie in Arrow tables and in numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

IntArray = np.ndarray[tuple[int], np.dtype[np.int64]]
Values = Any  # a numpy array, an Arrow array, a Ragged or a mapping of these


@dataclass(frozen=True)
class Ragged:
    """Lists of different lengths, one a row, laid end to end.

    Attributes:
        offsets: (rows + 1,) int64; row i holds the values from offsets[i] up to offsets[i + 1].
        values: what the lists hold, end to end: an array, or a mapping of field name to array
            for lists of structs.
    """

    offsets: IntArray
    values: Values

    @property
    def lengths(self) -> IntArray:
        """(rows,) int64: how many values each row has."""
        return np.diff(self.offsets)

    @property
    def rows(self) -> IntArray:
        """(values,) int64: the row of each value."""
        return np.repeat(np.arange(len(self.offsets) - 1, dtype=np.int64), self.lengths)

    @property
    def positions(self) -> IntArray:
        """(values,) int64: the place of each value within its row, from 0."""
        return np.arange(self.offsets[-1], dtype=np.int64) - np.repeat(self.offsets[:-1], self.lengths)

    def numpy_values(self) -> np.ndarray[Any, np.dtype[Any]]:
        """(values,) the values of lists of numbers, end to end, as a numpy array."""
        return as_numpy(self.values)

    def numpy(self, field: str) -> np.ndarray[Any, np.dtype[Any]]:
        """One field of a list of structs as a numpy array; nulls of a float field become NaN."""
        return as_numpy(self.values[field])


def offsets_from_lengths(lengths: np.ndarray[Any, np.dtype[Any]]) -> IntArray:
    """(rows,) lengths to (rows + 1,) int64 offsets."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def as_numpy(array: Values) -> np.ndarray[Any, np.dtype[Any]]:
    """An Arrow array as numpy, without a copy where Arrow allows it."""
    if isinstance(array, np.ndarray):
        return array
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    converted: np.ndarray[Any, np.dtype[Any]] = array.to_numpy(zero_copy_only=False)
    return converted


def column(table: pa.Table, name: str) -> pa.Array:
    """A column of a table as one Arrow array."""
    chunked = table.column(name)
    if chunked.num_chunks == 1:
        return chunked.chunk(0)
    combined = chunked.combine_chunks()
    return combined.chunk(0) if isinstance(combined, pa.ChunkedArray) else combined


def ragged(table: pa.Table, name: str) -> Ragged:
    """A list column of a table as `Ragged`; lists of structs give a mapping of field to Arrow array."""
    lists = column(table, name)
    offsets = lists.offsets.to_numpy().astype(np.int64)
    values = lists.values.slice(offsets[0], offsets[-1] - offsets[0])
    if pa.types.is_struct(values.type):
        flat = values.flatten()
        values = {values.type.field(i).name: flat[i] for i in range(values.type.num_fields)}
    return Ragged(offsets - offsets[0], values)


def build_array(arrow_type: pa.DataType, data: Values) -> pa.Array:
    """Builds an Arrow array of exactly this type from numpy arrays, Arrow arrays, `Ragged` and mappings."""
    if isinstance(data, Ragged):
        values = build_array(arrow_type.value_type, data.values)
        return pa.ListArray.from_arrays(pa.array(data.offsets, pa.int32()), values, type=arrow_type)
    if isinstance(data, Mapping):
        fields = [arrow_type.field(i) for i in range(arrow_type.num_fields)]
        return pa.StructArray.from_arrays([build_array(f.type, data[f.name]) for f in fields], fields=fields)
    if isinstance(data, pa.ChunkedArray):
        data = data.combine_chunks()
    if isinstance(data, pa.Array) and data.type == arrow_type:
        return data
    if isinstance(data, pa.Array) and not pa.types.is_nested(arrow_type):
        return data.cast(arrow_type)
    return pa.array(data, arrow_type)
