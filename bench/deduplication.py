"""Repeated queries are computed once: a log and the same log made distinct: `python -m bench.deduplication`."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bench.results import Check, Comparison, claim_of, cores
from bench.stores import Prepared, forget, prepared, whole_run
from bench.terminal import run
from bench.timing import in_turn
from bench.topics import Sizes

SHARE = 0.4


def made_distinct(found: Prepared) -> Path:
    """The same log with a serial number behind each text, a word that no chunk has."""
    path = found.folder / "distinct.parquet"
    table = pq.read_table(found.queries)
    texts = pa.array([f"{text} n{number}n" for number, text in enumerate(table["text"].to_pylist())])
    pq.write_table(table.set_column(table.column_names.index("text"), "text", texts), path)
    return path


def compare(small: bool, work: Path) -> Comparison:  # noqa: FBT001 - every comparison is called alike
    """Times both logs."""
    sizes = (
        Sizes(chunks=600, queries=500, dimension=32, distinct_share=SHARE)
        if small
        else Sizes(chunks=10_000, queries=10_000, distinct_share=SHARE)
    )
    found = prepared(work, sizes)
    distinct, asked = made_distinct(found), dict[str, int]()

    def work_of(name: str, log: Path) -> int:
        plan, _ = whole_run(found, log)
        asked[name] = plan.distinct_queries
        forget(found, plan)
        return sizes.queries

    work_of("warm-up", found.log_of(sizes.queries // 10))
    times = in_turn(
        {
            "log": lambda _number: work_of("log", found.queries),
            "log made distinct": lambda _number: work_of("log made distinct", distinct),
        },
        rounds=1 if small else 3,
        unit="ms a line",
    )
    right = [asked["log"] == sizes.distinct_queries, asked["log made distinct"] == sizes.queries]
    return Comparison(
        name="deduplication",
        title="A log that repeats its queries",
        settings={
            "chunks": sizes.chunks, "dimension": sizes.dimension, "lines": sizes.queries,
            "distinct queries": sizes.distinct_queries, "threads": cores(),
        },
        claims=[claim_of(times, "log", "log made distinct", 0.5, "at most")],
        checks=[Check(what="logs with as many distinct queries as were made", share=sum(right) / 2, compared=2)],
    )  # fmt: skip


if __name__ == "__main__":
    run(compare)
