"""A whole run through plan, engine and store against scripts by hand: `python -m bench.whole_run`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq

from bench.oracle import run_checks
from bench.results import Claim, Comparison, cores, not_installed, run
from bench.scripts import Script
from bench.stores import forget, prepared, vectors_of, whole_run
from bench.timing import Sample, Work, in_turn
from bench.topics import Sizes

SLOW, SINGLE, BEST = "script: FAISS, rank-bm25, loop", "script: FAISS, bm25s numba, loop", "best script: in batches"


def compare(small: bool, work: Path) -> Comparison:  # noqa: FBT001 - every comparison is called alike
    """Times the run and the scripts in turn, each on queries of its own round."""
    sizes = Sizes(chunks=600, queries=300, dimension=32) if small else Sizes(chunks=100_000, queries=20_000)
    rounds = 1 if small else 3
    per_round = {SLOW: 4 if small else 67, SINGLE: 20 if small else 200, BEST: 300 if small else 4_000}
    found = prepared(work, sizes)
    table = pq.read_table(found.corpus, columns=["chunk_id", "text"])
    script = Script.over(
        table["chunk_id"].to_pylist(), table["text"].to_pylist(), vectors_of(found.corpus), found.settings()
    )
    texts, vectors = pq.read_table(found.queries, columns=["text"])["text"].to_pylist(), vectors_of(found.queries)
    okapi, rank_bm25 = script.rank_bm25()
    bm25s = script.bm25s()
    runs = []

    def dartflow(_number: int) -> int:
        runs.append(whole_run(found, found.queries))
        return sizes.queries

    def part(number: int, name: str) -> slice:
        return slice(number * per_round[name], (number + 1) * per_round[name])

    def slow(number: int) -> int:
        chosen = part(number, SLOW)
        return len(script.query_by_query(texts[chosen], vectors[chosen], rank_bm25))

    sides: dict[str, Work] = {"dartflow": dartflow, SLOW: slow}
    if bm25s is not None:
        keywords = bm25s

        def single(number: int) -> int:
            chosen = part(number, SINGLE)
            return len(script.query_by_query(texts[chosen], vectors[chosen], keywords))

        def best(number: int) -> int:
            chosen = part(number, BEST)
            return len(script.batch(texts[chosen], vectors[chosen], keywords))

        script.query_by_query(texts[:2], vectors[:2], keywords)  # compiles
        script.batch(texts[:2], vectors[:2], keywords)
        sides |= {SINGLE: single, BEST: best}
    plan, _ = whole_run(found, found.log_of(min(300, sizes.queries)))  # compiles
    forget(found, plan)
    times = in_turn(sides, rounds)
    plan, verdict = runs[-1]
    checks = run_checks(found, plan, script, okapi, sampled=10 if small else 60)
    result = Comparison(
        name="whole_run",
        title="A whole run over a generated corpus",
        settings={
            "chunks": sizes.chunks, "dimension": sizes.dimension, "distinct queries": plan.distinct_queries,
            "queries of the scripts a turn": ", ".join(str(count) for count in per_round.values()),
            "threads": cores(), "settings": "the defaults, vectors given, no cross-encoder", "verdict": verdict.verdict,
        },
        claims=_claims(times),
        checks=checks,
    )  # fmt: skip
    for plan, _ in runs:
        forget(found, plan)
    return result


def _claims(times: dict[str, Sample], wanted: Sequence[float] = (100, 10, 2)) -> list[Claim]:
    return [
        Claim(what=f"{name} / dartflow", above=times[name], below=times["dartflow"], wanted=least)
        if name in times
        else not_installed(f"{name} / dartflow", "bm25s", least)
        for name, least in zip((SLOW, SINGLE, BEST), wanted, strict=True)
    ]


if __name__ == "__main__":
    run(compare)
