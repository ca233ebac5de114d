"""A whole run through plan, engine and store against scripts by hand: `python -m bench.whole_run`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow.parquet as pq

from bench.oracle import run_checks
from bench.results import Comparison, claim_of, cores
from bench.scripts import KeywordRetriever, Script
from bench.stores import Prepared, forget, prepared, vectors_of, whole_run
from bench.terminal import run
from bench.timing import Work, in_turn
from bench.topics import Sizes
from contracts.manifest import RunPlan, Verdict

SLOW, SINGLE, BEST = "script: FAISS, rank-bm25, loop", "script: FAISS, bm25s numba, loop", "best script: in batches"
WANTED = {SLOW: 100.0, SINGLE: 10.0, BEST: 2.0}
# Queries of each script a round, in a real and in a small comparison; dartflow runs all.
SAMPLED = {SLOW: (67, 4), SINGLE: (200, 20), BEST: (2_000, 300)}


def compare(small: bool, work: Path) -> Comparison:  # noqa: FBT001 - every comparison is called alike
    """Times the run and the scripts in turn, each on queries of its own round."""
    sizes = Sizes(chunks=600, queries=300, dimension=32) if small else Sizes(chunks=100_000, queries=20_000)
    sampled = {name: counts[small] for name, counts in SAMPLED.items()}
    found = prepared(work, sizes)
    table = pq.read_table(found.corpus, columns=["chunk_id", "text"])
    ids, texts = (table[name].to_pylist() for name in ("chunk_id", "text"))
    script = Script.over(ids, texts, vectors_of(found.corpus), found.settings())
    okapi, rank_bm25 = script.rank_bm25()
    runs: list[tuple[RunPlan, Verdict]] = []

    def dartflow(_number: int) -> int:
        runs.append(whole_run(found, found.queries))
        return sizes.queries

    sides = {"dartflow": dartflow, **_scripts(found, script, rank_bm25, sampled)}
    forget(found, whole_run(found, found.log_of(min(300, sizes.queries)))[0])  # compiles
    times = in_turn(sides, rounds=1 if small else 3)
    plan, verdict = runs[-1]
    result = Comparison(
        name="whole_run",
        title="A whole run over a generated corpus",
        settings={
            "chunks": sizes.chunks, "dimension": sizes.dimension, "distinct queries": plan.distinct_queries,
            "queries of the scripts a turn": ", ".join(str(count) for count in sampled.values()),
            "threads": cores(), "settings": "the defaults, vectors given, no cross-encoder", "verdict": verdict.verdict,
        },
        claims=[claim_of(times, name, "dartflow", WANTED[name], package="bm25s") for name in WANTED],
        checks=run_checks(found, plan, script, okapi, sampled=10 if small else 60),
    )  # fmt: skip
    for plan, _ in runs:
        forget(found, plan)
    return result


def _scripts(
    found: Prepared, script: Script, rank_bm25: KeywordRetriever, sampled: Mapping[str, int]
) -> dict[str, Work]:
    """The scripts that can run here; what compiles has done so."""
    texts, vectors = pq.read_table(found.queries, columns=["text"])["text"].to_pylist(), vectors_of(found.queries)

    def work_of(name: str, ask: Callable[..., list[list[str]]], keywords: KeywordRetriever) -> Work:
        def work(number: int) -> int:
            part = slice(number * sampled[name], (number + 1) * sampled[name])
            return len(ask(texts[part], vectors[part], keywords))

        return work

    scripts = {SLOW: work_of(SLOW, script.query_by_query, rank_bm25)}
    bm25s = script.bm25s()
    if bm25s is not None:
        scripts[SINGLE] = work_of(SINGLE, script.query_by_query, bm25s)
        scripts[BEST] = work_of(BEST, script.batch, bm25s)
        script.query_by_query(texts[:2], vectors[:2], bm25s)
        script.batch(texts[:2], vectors[:2], bm25s)
    return scripts


if __name__ == "__main__":
    run(compare)
