"""Vectors as they stand in files: lists of numbers to one matrix, and what is wrong with each that does not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from contracts.columns import as_numpy, offsets_from_lengths
from loading.values import from_json

Array = np.ndarray[Any, np.dtype[Any]]

_NO_VECTOR = "has no vector"
_NO_NUMBERS = "its vector is not a list of numbers"


@dataclass(frozen=True)
class LoadedVectors:
    """The vectors of some rows.

    Attributes:
        matrix: (rows, width) float32 or float64; a row with a problem is zero.
        problems: what is wrong, in words, by row.
        widths: the widths that the vectors have, ascending; none where there is no vector at all.
    """

    matrix: Array
    problems: Mapping[int, str]
    widths: tuple[int, ...] = ()


def vectors_of_array(lists: pa.Array, width: int | None = None) -> LoadedVectors:
    """Vectors of a Parquet column: lists of numbers, of fixed or free size.

    Args:
        lists: the column.
        width: how many numbers a vector must have; None takes the width that most of them have.
    """
    if pa.types.is_fixed_size_list(lists.type):
        lists = lists.cast(pa.list_(lists.type.value_type))
    is_list = pa.types.is_list(lists.type) or pa.types.is_large_list(lists.type)
    if not is_list or not _is_number(lists.type.value_type):
        return LoadedVectors(np.zeros((len(lists), width or 0)), dict.fromkeys(range(len(lists)), _NO_NUMBERS))
    present = as_numpy(lists.is_valid())
    lengths = np.where(present, as_numpy(lists.value_lengths().fill_null(0)), 0)
    values = as_numpy(lists.flatten())  # nulls within a list become NaN
    if values.dtype != np.float32:
        values = values.astype(np.float64)
    return _matrix(offsets_from_lengths(lengths), values, width)


def vectors_of_values(given: Sequence[Any], width: int | None = None) -> LoadedVectors:
    """Vectors of JSONL (lists) and of CSV (lists in JSON), one value a row.

    Args:
        given: what each row has.
        width: as in `vectors_of_array`.
    """
    lists = [_numbers(value) for value in given]
    flat = np.array([number for one in lists for number in one or ()], dtype=np.float64)
    offsets = offsets_from_lengths(np.array([len(one or ()) for one in lists], dtype=np.int64))
    loaded = _matrix(offsets, flat, width)
    wrong = {row: _NO_NUMBERS for row, one in enumerate(lists) if one is None}
    return LoadedVectors(loaded.matrix, {**loaded.problems, **wrong}, loaded.widths)


def _numbers(value: Any) -> list[float] | None:
    """A list of numbers, an empty one where there is no value, None for anything else."""
    if isinstance(value, str):
        try:
            value = from_json(value)
        except ValueError:
            return None
    if value is None:
        return []
    if not isinstance(value, list) or any(type(number) not in (int, float) for number in value):
        return None
    try:
        return [float(number) for number in value]
    except OverflowError:
        return None


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))


def _matrix(offsets: Array, values: Array, width: int | None) -> LoadedVectors:
    lengths = np.diff(offsets)
    if width is None:
        counts = Counter(lengths[lengths > 0].tolist())
        width = min(counts, key=lambda one: (-counts[one], one)) if counts else 0
    fits = (lengths == width) & (lengths > 0)
    if fits.all() and width:
        matrix = values.reshape(-1, width)  # as it lies in Arrow: a log of a million vectors is not copied
    else:
        matrix = np.zeros((len(lengths), width), dtype=values.dtype)
        matrix[fits] = values[np.repeat(fits, lengths)].reshape(-1, width)
    problems = {
        int(row): f"its vector has another width: got {lengths[row]}, want {width}" if lengths[row] else _NO_VECTOR
        for row in np.flatnonzero(~fits)
    }
    infinite = fits & ~np.isfinite(matrix).all(axis=1)
    if infinite.any():
        matrix = np.where(infinite[:, np.newaxis], matrix.dtype.type(0), matrix)
    zero = fits & ~infinite & ~matrix.any(axis=1)
    problems.update(dict.fromkeys(np.flatnonzero(infinite).tolist(), "its vector holds a NaN or an infinity"))
    problems.update(dict.fromkeys(np.flatnonzero(zero).tolist(), "its vector is zero"))
    return LoadedVectors(matrix, problems, tuple(np.unique(lengths[lengths > 0]).tolist()))
