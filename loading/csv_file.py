"""CSV files with a header, read so that every row keeps its line number and no bad byte is lost."""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from contracts.errors import InputError
from loading.lines import BadLine, Records, readable

# Larger fields than the csv module allows by itself; an unclosed quote still ends somewhere.
_FIELD_CHARACTERS = 2**24
# What "surrogateescape" makes of bytes that are not UTF-8; no decoded text holds one otherwise.
_UNDECODED = re.compile("[\udc80-\udcff]")


def read_csv(path: Path) -> Records:
    """Rows of a CSV file with a header; a quoted field may hold line breaks, and a row's number is its first line's.

    Where a row is not CSV, as after a quote that is never closed, its first line alone is bad: reading goes on
    with the next line, so that one stray quote costs one line and not the rest of the file.
    """
    csv.field_size_limit(_FIELD_CHARACTERS)
    records = Records("csv")
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        seen: list[str] = []
        again: deque[str] = deque()

        def remembered() -> Iterator[str]:
            while line := again.popleft() if again else next(file, ""):
                seen.append(line)
                yield line

        reader = csv.reader(remembered(), strict=True)
        header: list[str] | None = None
        number = 1
        while True:
            seen.clear()
            try:
                fields = next(reader)
            except StopIteration:
                return records
            except csv.Error as error:
                if header is None:
                    raise _unusable_header(path, seen[0]) from error
                records.bad.append(BadLine(number, "invalid", f"not CSV: {error}", _original(seen[:1])))
                number += 1
                again.extendleft(reversed(seen[1:]))
                reader = csv.reader(remembered(), strict=True)
                continue
            start, number = number, number + len(seen)
            if header is None:
                header = _csv_header(path, fields)
                continue
            _add_csv_row(records, header, fields, start, _original(seen))


def _original(lines: list[str]) -> str:
    return readable("".join(lines).encode("utf-8", "surrogateescape").rstrip(b"\r\n"))


def _csv_header(path: Path, fields: list[str]) -> list[str]:
    if len(set(fields)) != len(fields) or any(_UNDECODED.search(name) for name in fields) or not fields:
        raise _unusable_header(path, ",".join(fields))
    return fields


def _unusable_header(path: Path, header: str) -> InputError:
    return InputError(
        f"{path}, line 1",
        "the header is not usable",
        got=_original([header]),
        want="UTF-8 names, each once",
        next_step="Correct the first line of the file.",
    )


def _add_csv_row(records: Records, header: list[str], fields: list[str], number: int, original: str) -> None:
    if not any(fields):
        records.bad.append(BadLine(number, "empty", "an empty line", original))
    elif any(_UNDECODED.search(value) for value in fields):
        records.bad.append(BadLine(number, "undecodable", "not UTF-8", original))
    elif len(fields) != len(header):
        records.bad.append(BadLine(number, "invalid", f"got {len(fields)} fields, want {len(header)}", original))
    else:
        records.add(number, {name: value or None for name, value in zip(header, fields, strict=True)})
