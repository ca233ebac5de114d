"""Decisions: grades that people gave, kept in the store under a name that is made of what they say."""

from __future__ import annotations

import io
import re
from typing import get_args

import pyarrow as pa
import pyarrow.parquet as pq

from checkpoints.store import Store
from contracts.errors import CorruptArtifactError
from models.file_grader import Decisions, decisions_digest
from models.grader import Grade

_COLUMNS = ("query_id", "chunk_id", "decision")
_SCHEMA = pa.schema([pa.field(name, pa.string(), nullable=False) for name in _COLUMNS])
_PATH = re.compile(r"decisions/([0-9a-f]{32})\.parquet")


def digest_in(path: str) -> str | None:
    """The digest that a path of kept decisions carries; None for any other path."""
    found = _PATH.fullmatch(path)
    return None if found is None else found[1]


def keep_decisions(store: Store, decisions: Decisions) -> str:
    """Writes decisions to the store; the same ones twice are one file, whose path is given back."""
    path = f"decisions/{decisions_digest(decisions)}.parquet"
    rows = sorted([query_id, chunk_id, grade] for (query_id, chunk_id), grade in decisions.items())
    columns = [pa.array([row[place] for row in rows], pa.string()) for place in range(len(_COLUMNS))]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(columns, schema=_SCHEMA), sink, compression="zstd")
    store.write(path, sink.getvalue())
    return path


def load_decisions(store: Store, path: str) -> dict[tuple[str, str], Grade]:
    """Decisions that were kept.

    Raises:
        MissingArtifactError: nothing there.
        CorruptArtifactError: not what was kept under this name.
    """
    data = store.read(path)
    try:
        table = pq.read_table(io.BytesIO(data))
        rows = table.to_pylist() if table.schema.equals(_SCHEMA) else []
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        rows = []
    decisions: dict[tuple[str, str], Grade] = {
        (row["query_id"], row["chunk_id"]): row["decision"] for row in rows if row["decision"] in get_args(Grade)
    }
    got = decisions_digest(decisions)
    if got != digest_in(path) or len(decisions) != len(rows):
        raise CorruptArtifactError(
            path, "is not what was kept", got=f"digest {got} of {len(decisions)} decisions", want=digest_in(path),
            next_step="Restore the file, or import the decisions again.",
        )  # fmt: skip
    return decisions
