"""Limits: what the processor, the memory and the disk would take for the least that a stage must do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from threadpoolctl import threadpool_limits

from bench.reference import Array
from bench.stores import Prepared, table_of
from contracts.columns import ragged
from contracts.manifest import RunPlan
from corpus.corpus import Corpus, KeywordSearch
from stages.pipeline import find_stage

# Sizes of the trials: matrices that fit no first-level cache, arrays that fit no cache at all, a file.
_SIDE, _ARRAY_BYTES, _FILE_BYTES = 1024, 256 * 2**20, 64 * 2**20
_TRIES = 5


@dataclass(frozen=True)
class Rates:
    """What one thread of this machine does a second at its best.

    Attributes:
        float32, float64: operations of a matrix product in that type.
        memory: bytes read and written by a copy.
        disk: bytes written and synced.
    """

    float32: float
    float64: float
    memory: float
    disk: float


@dataclass(frozen=True)
class Least:
    """The least work of a stage: operations by type of number, bytes through memory, bytes onto the disk."""

    float32: float = 0.0
    float64: float = 0.0
    memory: float = 0.0
    disk: float = 0.0

    def seconds(self, rates: Rates) -> Mapping[str, float]:
        """How long each part takes at the best rate, by what bounds it."""
        return {
            "products of float32": self.float32 / rates.float32,
            "products of float64": self.float64 / rates.float64,
            "memory": self.memory / rates.memory,
            "disk": self.disk / rates.disk,
        }


def measured_rates(folder: Path) -> Rates:
    """Measures the rates, the best of a few tries, on one thread, the disk in `folder`."""
    source = np.ones(_ARRAY_BYTES, np.uint8)
    target = np.empty_like(source)
    with threadpool_limits(1, user_api="blas"):
        return Rates(
            float32=2 * _SIDE**3 / _best(_product(np.float32)),
            float64=2 * _SIDE**3 / _best(_product(np.float64)),
            memory=2 * _ARRAY_BYTES / _best(lambda: np.copyto(target, source)),
            disk=_FILE_BYTES / _best(lambda: _written(folder / "trial", source[:_FILE_BYTES])),
        )


def least_of(name: str, found: Prepared, plan: RunPlan, corpus: Corpus, search: KeywordSearch) -> Least:
    """The least that a stage must do in a run: read and write its tables, and what its method cannot do without.

    `oversample` multiplies every query with every chunk; `distance_matrices` every candidate with the query and
    with half of the others; `sparse_search` reads the postings of every term of every query.
    """
    stage = find_stage(name)
    tables = {one: table_of(found, plan, one) for one in (*stage.reads, name)}
    memory = sum(_bytes_of(tables[one], stage.reads.get(one)) for one in tables)
    disk = sum(path.stat().st_size for path in (found.folder / "store/runs" / plan.run_id).glob(f"*-{name}/*.parquet"))
    float32 = float64 = 0.0
    if name == "oversample":
        float32 = 2.0 * len(tables["queries"]) * corpus.embeddings.size
    if name == "distance_matrices":
        lengths = ragged(tables["oversample"], "candidates").lengths
        float64 = float((lengths * (lengths + 1)).sum()) * corpus.snapshot.dimension
    if name == "sparse_search":
        texts = tables["queries"].column("normalised_text").to_pylist()
        terms = [search.index.term_ids(search.tokeniser.tokens(text)) for text in texts]
        postings = search.index.document_frequencies[np.concatenate([np.array(one, np.int64) for one in terms])]
        memory += int(postings.sum()) * (search.index.rows.itemsize + search.scores.itemsize)
    return Least(float32=float32, float64=float64, memory=memory, disk=disk)


def _bytes_of(table: pa.Table, columns: tuple[str, ...] | None) -> int:
    """Bytes of a table in Arrow, of one that is read those of the columns that are."""
    if columns is None:
        return int(table.nbytes)
    total = 0
    for column in columns:
        name, _, field = column.partition(".")
        total += ragged(table, name).values[field].nbytes if field else table.column(name).nbytes
    return total


def _product(kind: type) -> Callable[[], object]:
    numbers: Array = np.random.default_rng(0).random((2, _SIDE, _SIDE)).astype(kind)
    return lambda: numbers[0] @ numbers[1]


def _written(path: Path, data: Array) -> None:
    with path.open("wb") as file:
        file.write(data.data)
        file.flush()
        os.fsync(file.fileno())
    path.unlink()


def _best(work: Callable[[], object]) -> float:
    """The least seconds of a few tries."""
    taken = []
    for _ in range(_TRIES):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return min(taken)
