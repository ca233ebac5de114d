"""Reading of records: the lines of a Parquet, JSONL, CSV or TSV file, and the lines that are none, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from contracts.errors import InputError
from loading.csv_file import read_csv
from loading.lines import BadLine, Records, readable
from loading.parquet_file import read_parquet
from loading.values import from_json

FORMATS = {".parquet": "parquet", ".pq": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv"}

_BOM = b"\xef\xbb\xbf"


def read_records(path: Path, vector_column: str = "embedding") -> Records:
    """Reads a file by its suffix.

    TSV has no header: it is `id<TAB>text`, read as the columns `query_id` and `text`.

    Args:
        path: .parquet, .jsonl, .csv or .tsv.
        vector_column: the column of a Parquet file that is kept apart as `vectors`.

    Raises:
        InputError: no such file, another suffix, or a file that cannot be read as what its suffix says.
    """
    readers: dict[str, Callable[[Path], Records]] = {"jsonl": _read_jsonl, "csv": read_csv, "tsv": _read_tsv}
    file_format = FORMATS.get(path.suffix.lower())
    if file_format is None:
        raise InputError(
            str(path),
            "the kind of file is not known",
            got=path.suffix or "no suffix",
            want=", ".join(FORMATS),
            next_step="Convert the file, or give it the suffix of what it is.",
        )
    try:
        return read_parquet(path, vector_column) if file_format == "parquet" else readers[file_format](path)
    except OSError as error:
        raise InputError(
            str(path), "cannot be read", got=error.strerror or str(error), next_step="Check the path."
        ) from error


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    r"""The lines of a file as bytes, split on \n alone, with numbers from 1; a byte order mark is left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            content = line.removeprefix(_BOM) if number == 1 else line
            yield number, content.rstrip(b"\r\n")


def _read_jsonl(path: Path) -> Records:
    records = Records("jsonl")
    for number, line in _lines(path):
        if not line.strip():
            records.bad.append(BadLine(number, "empty", "an empty line", readable(line)))
            continue
        try:
            row = from_json(line.decode("utf-8"))
        except UnicodeError as error:
            records.bad.append(BadLine(number, "undecodable", f"not UTF-8: {error}", readable(line)))
        except ValueError as error:
            records.bad.append(BadLine(number, "invalid", f"not JSON: {error}", readable(line)))
        else:
            if isinstance(row, dict):
                records.add(number, row)
            else:
                detail = f"got a JSON {type(row).__name__}, want an object"
                records.bad.append(BadLine(number, "invalid", detail, readable(line)))
    return records


def _read_tsv(path: Path) -> Records:
    records = Records("tsv")
    for number, line in _lines(path):
        fields = line.split(b"\t")
        if not line.strip():
            records.bad.append(BadLine(number, "empty", "an empty line", readable(line)))
        elif len(fields) != 2:  # noqa: PLR2004 - id and text
            detail = f"got {len(fields)} fields, want 2: id<TAB>text"
            records.bad.append(BadLine(number, "invalid", detail, readable(line)))
        else:
            try:
                query_id, text = (one.decode("utf-8") for one in fields)
            except UnicodeDecodeError as error:
                records.bad.append(BadLine(number, "undecodable", f"not UTF-8: {error.reason}", readable(line)))
            else:
                records.add(number, {"query_id": query_id or None, "text": text or None})
    return records
