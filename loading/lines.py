"""Lines: what every kind of file is read into, records and lines that are none."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa


@dataclass(frozen=True)
class BadLine:
    """A line that is no record, or a record that is refused.

    Attributes:
        line_number: from 1; in Parquet the number of the row.
        reason: a snake_case word: `empty`, `undecodable`, `invalid` ...
        detail: what is wrong, in words.
        original: the line with nothing lost: see `readable`.
    """

    line_number: int
    reason: str
    detail: str
    original: str


@dataclass(frozen=True)
class Records:
    """What a file holds.

    Attributes:
        file_format: `parquet`, `jsonl`, `csv` or `tsv`.
        line_numbers: of each record, from 1.
        rows: each record by column; a missing value is None or absent, in CSV and TSV an empty string is missing.
        vectors: (rows,) Arrow lists of numbers, kept apart from `rows` because they are most of a file;
            None where it has no column of vectors, or where the file is text and vectors stand in `rows`.
        vector_column: what that column is called.
        bad: the lines that are no records, in order.
    """

    file_format: str
    line_numbers: list[int] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    vectors: pa.Array | None = None
    vector_column: str = "embedding"
    bad: list[BadLine] = field(default_factory=list)

    def columns(self) -> list[str]:
        """Every column that a record has, in order of first appearance."""
        names: dict[str, None] = {}
        for row in self.rows:
            names.update(dict.fromkeys(row))
        return list(names)

    def original(self, place: int) -> str:
        """The record at this place as one JSON object, with its vector, for people and for replay."""
        row = self.rows[place]
        if self.vectors is not None:
            row = {**row, self.vector_column: self.vectors[place].as_py()}
        return as_json(row)

    def add(self, line_number: int, row: dict[str, Any]) -> None:
        """Takes a record in."""
        self.line_numbers.append(line_number)
        self.rows.append(row)


def readable(line: bytes) -> str:
    r"""Bytes as text with nothing lost: UTF-8 as it is; where it is not, backslashes double and bytes become \xNN."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        return line.replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace")


def as_json(row: dict[str, Any]) -> str:
    """Values by name as one JSON object."""
    return json.dumps(row, ensure_ascii=False, default=str)
