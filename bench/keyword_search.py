"""Keyword search, the best 100 by BM25: dartflow against rank-bm25 and bm25s with numba.

`python -m bench.keyword_search`
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rank_bm25 import BM25Okapi

from bench.generate import chunk_table, query_table
from bench.reference import best_by_bm25
from bench.results import Check, Comparison, claim_of, cores, peer
from bench.terminal import run
from bench.timing import Work, in_turn
from bench.topics import Sizes, blocks
from contracts.columns import Ragged
from corpus.keyword_index import KeywordIndex
from corpus.keyword_search import KeywordSearch
from corpus.scope import Scope, Scopes
from corpus.tokeniser import Tokeniser, TokeniserParams
from flows.executor import map_shards
from flows.settings import ExecutorParams, RunParams
from stages.sparse_search import Params

DEPTH = 100
TOKENISER = TokeniserParams()


@dataclass(frozen=True)
class Texts:
    """A corpus and its queries as text, and the chunks as tokens."""

    chunks: list[list[str]]
    queries: list[str]
    tokeniser: Tokeniser

    @classmethod
    def of(cls, sizes: Sizes) -> Texts:
        """Made by rule, in the order of the corpus."""
        tokeniser = Tokeniser(TOKENISER)
        chunks: list[list[str]] = []
        queries: list[str] = []
        for number, block in enumerate(blocks(sizes)):
            chunks += [tokeniser.tokens(text) for text in chunk_table(block, sizes)["text"].to_pylist()]
            queries += query_table(block, sizes.asked_of(number), sizes)["text"].to_pylist()
        return cls(chunks, np.random.default_rng(1).permutation(queries).tolist(), tokeniser)


def bulk_search(texts: Texts) -> KeywordSearch:
    """The search of dartflow over all chunks, with the defaults of sparse_search."""
    index, params, everything = KeywordIndex.build(texts.chunks), Params(), np.ones(len(texts.chunks), dtype=bool)
    scores = index.okapi_scores(params.k1, params.b, params.epsilon)
    return KeywordSearch(index, texts.tokeniser, lambda _scope: everything, scores)


def searched(search: KeywordSearch, texts: Texts) -> list[Ragged]:
    """What each query finds, from text, shard by shard on all cores."""
    size = RunParams().shard_size
    shards = range(-(-len(texts.queries) // size))
    found: list[Any] = [None] * len(shards)

    def work(shard: int) -> None:
        asked = texts.queries[shard * size : (shard + 1) * size]
        found[shard] = search.search(asked, Scopes.single(Scope(), len(asked)), DEPTH)

    map_shards(work, shards, ExecutorParams(), lambda _done: None)
    return found


def lists(found: list[Ragged]) -> list[list[int]]:
    """The rows of each query."""
    return [rows.tolist() for hits in found for rows in np.split(hits.values["row"], hits.offsets[1:-1])]


def bm25s_engine(texts: Texts) -> Any:
    """bm25s over the same tokens with the same k1 and b, its numba backend; None where it is not installed."""
    bm25s = peer("bm25s")
    if bm25s is None:
        return None
    engine = bm25s.BM25(k1=Params().k1, b=Params().b, method="robertson", backend="numba")
    engine.index(texts.chunks, show_progress=False)
    return engine


def sides(texts: Texts, search: KeywordSearch, okapi: BM25Okapi, sampled: int) -> dict[str, Work]:
    """The engines, each from the text of the queries to the rows found; what compiles has done so."""

    def dartflow(_number: int) -> int:
        searched(search, texts)
        return len(texts.queries)

    def rank_bm25(number: int) -> int:
        for query in texts.queries[number * sampled : (number + 1) * sampled]:
            best_by_bm25(okapi, texts.tokeniser.tokens(query), DEPTH)
        return sampled

    def bm25s(_number: int) -> int:
        tokens = [texts.tokeniser.tokens(query) for query in texts.queries]
        engine.retrieve(tokens, k=DEPTH, show_progress=False, n_threads=cores())
        return len(texts.queries)

    dartflow(0)
    found: dict[str, Work] = {"dartflow": dartflow, "rank-bm25": rank_bm25}
    engine = bm25s_engine(texts)
    if engine is not None:
        bm25s(0)
        found["bm25s numba"] = bm25s
    return found


def compare(small: bool, _work: Path) -> Comparison:  # noqa: FBT001 - every comparison is called alike
    """Times the three engines."""
    sizes = Sizes(chunks=1_500 if small else 50_000, queries=300 if small else 4_096, dimension=1)
    sampled, rounds = (5, 2) if small else (10, 5)
    texts = Texts.of(sizes)
    search, okapi = bulk_search(texts), BM25Okapi(texts.chunks)
    times = in_turn(sides(texts, search, okapi, sampled), rounds)
    mine, asked = lists(searched(search, texts)), texts.queries[: rounds * sampled]
    right = [best_by_bm25(okapi, texts.tokeniser.tokens(query), DEPTH) for query in asked]
    same = sum(one == other for one, other in zip(mine, right, strict=False))
    return Comparison(
        name="keyword_search",
        title="Keyword search: the best 100 chunks by BM25",
        settings={
            "chunks": sizes.chunks, "queries a turn": f"{len(texts.queries)}, and {sampled} for rank-bm25",
            "depth": DEPTH, "threads": f"{cores()}; rank-bm25 knows one",
            "scores": "float64; bm25s float32", "tokeniser": f"one for all, {TOKENISER.language}",
        },
        claims=[
            claim_of(times, "rank-bm25", "dartflow", 1000),
            claim_of(times, "dartflow", "bm25s numba", 1.1, "at most", package="bm25s"),
        ],
        checks=[Check(what="queries whose 100 chunks are those of rank-bm25 in its order, ties by row",
                      share=same / len(asked), compared=len(asked))],
    )  # fmt: skip


if __name__ == "__main__":
    run(compare)
