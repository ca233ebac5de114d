"""Whole runs over real claims, scifact, against LlamaIndex and the best script by hand: `python -m bench.scifact`.

Needs the folder of real data beside the checkout. Embeddings are computed once, kept, and given to all sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.oracle import run_checks
from bench.reference import Array
from bench.results import ROOT, Claim, Comparison, claim_of, cores, peer
from bench.scripts import Script
from bench.stores import Prepared, forget, ingested, vectors_of, whole_run
from bench.terminal import run
from bench.timing import Work, in_turn
from models.embedder import EmbedderParams, open_embedder

DATA = ROOT.parent / "shared" / "data" / "scifact"
LLAMA, BEST = "LlamaIndex: FAISS store, BM25 retriever, fusion", "best script: in batches"
WANTED = {LLAMA: 10.0, BEST: 3.0}
_LISTS = pa.list_(pa.float32())


def prepared_claims(work: Path, claims: int | None, chunks: int | None) -> Prepared:
    """The claims and chunks as files with vectors by USE multilingual, ingested; some of it where numbers are given."""
    found = Prepared((work / f"scifact-{claims}-{chunks}").resolve())
    if not (found.folder / "done").exists():
        found.folder.mkdir(parents=True, exist_ok=True)
        corpus = pq.read_table(DATA / "corpus.parquet", columns=["chunk_id", "title", "text", "source", "document_id"])
        queries = pq.read_table(DATA / "queries.parquet", columns=["query_id", "text"])
        for table, path, texts in (
            (corpus.slice(0, chunks), found.corpus, _passages(corpus.slice(0, chunks))),
            (queries.slice(0, claims), found.queries, queries.slice(0, claims)["text"].to_pylist()),
        ):
            pq.write_table(table.append_column("embedding", [_embedded(texts)]), path)
        ingested(found)
    return found


def _passages(corpus: pa.Table) -> list[str]:
    """What dartflow reads of a chunk by default: title and text."""
    return [
        f"{title}\n{text}" for title, text in zip(corpus["title"].to_pylist(), corpus["text"].to_pylist(), strict=True)
    ]


def _embedded(texts: Sequence[str]) -> pa.Array:
    embedder = open_embedder(EmbedderParams())
    if embedder is None:
        raise RuntimeError("the embedded embedder is the default")
    return pa.array(list(embedder.embed(texts)), _LISTS)


@dataclass(frozen=True)
class Llama:
    """LlamaIndex's own way: a vector index over FAISS, its BM25 retriever, and its fusion of both."""

    retriever: Any
    bundle: Any

    @classmethod
    def over(cls, ids: Sequence[str], texts: Sequence[str], embeddings: Array, script: Script) -> Llama | None:
        """Indexes a corpus with given vectors; None where LlamaIndex is not installed."""
        core, stores, bm25 = (
            peer(name)
            for name in ("llama_index.core", "llama_index.vector_stores.faiss", "llama_index.retrievers.bm25")
        )
        if core is None or stores is None or bm25 is None:
            return None
        schema, retrievers, llms = (peer(f"llama_index.core.{name}") for name in ("schema", "retrievers", "llms"))
        nodes = [
            schema.TextNode(id_=one, text=text, embedding=vector.tolist())
            for one, text, vector in zip(ids, texts, embeddings, strict=True)
        ]
        store = stores.FaissVectorStore(faiss_index=type(script.index)(embeddings.shape[1]))
        index = core.VectorStoreIndex(
            nodes,
            storage_context=core.StorageContext.from_defaults(vector_store=store),
            embed_model=core.MockEmbedding(embed_dim=embeddings.shape[1]),
        )
        dense = index.as_retriever(similarity_top_k=script.settings.oversample.depth)
        words = bm25.BM25Retriever.from_defaults(nodes=nodes, similarity_top_k=script.settings.sparse_search.depth)
        fusion = retrievers.QueryFusionRetriever(
            [dense, words], llm=llms.MockLLM(), mode="reciprocal_rerank", num_queries=1, use_async=False,
            similarity_top_k=script.settings.rrf_merge.limit,
        )  # fmt: skip
        return cls(fusion, schema.QueryBundle)

    def ask(self, text: str, vector: Array) -> list[str]:
        """The ids that it finds."""
        found = self.retriever.retrieve(self.bundle(query_str=text, embedding=vector.tolist()))
        return [node.node.node_id for node in found]


def compare(small: bool, work: Path) -> Comparison:  # noqa: FBT001 - every comparison is called alike
    """Times all claims through each side."""
    result = Comparison(name="scifact", title="A whole run over scifact", settings={})
    if not DATA.is_dir():
        missing = "the data are not beside the checkout"
        result.claims = [Claim(what=f"{name} / dartflow", wanted=WANTED[name], missing=missing) for name in WANTED]
        return result
    found = prepared_claims(work, *((20, 60) if small else (None, None)))
    script, llama = _others(found)
    texts, vectors = pq.read_table(found.queries)["text"].to_pylist(), vectors_of(found.queries)
    sides, runs = _sides(found, script, llama, texts, vectors)
    for side in sides.values():
        side(0)  # compiles
    times = in_turn(sides, rounds=1 if small else 5)
    plan, verdict = runs[-1]
    okapi, _ = script.rank_bm25()
    result.checks = run_checks(found, plan, script, okapi, sampled=10 if small else 300)
    result.claims = [
        claim_of(times, name, "dartflow", wanted, package="LlamaIndex" if name == LLAMA else "bm25s")
        for name, wanted in WANTED.items()
    ]
    result.settings = {
        "chunks": len(script.ids), "dimension": vectors.shape[1], "claims": len(texts), "threads": cores(),
        "settings": "the defaults, vectors given, no cross-encoder", "verdict": verdict.verdict,
    }  # fmt: skip
    for plan, _ in runs:
        forget(found, plan)
    return result


def _others(found: Prepared) -> tuple[Script, Llama | None]:
    """The script and LlamaIndex over the same chunks, by ascending id as dartflow has them, so that ties fall alike."""
    table = pq.read_table(found.corpus, columns=["chunk_id", "title", "text"])
    order = np.argsort(np.array(table["chunk_id"].to_pylist()))
    table, embeddings = table.take(pa.array(order)), np.ascontiguousarray(vectors_of(found.corpus)[order])
    ids, passages = table["chunk_id"].to_pylist(), _passages(table)
    script = Script.over(ids, passages, embeddings, found.settings())
    return script, Llama.over(ids, passages, embeddings, script)


def _sides(
    found: Prepared, script: Script, llama: Llama | None, texts: Sequence[str], vectors: Array
) -> tuple[dict[str, Work], list[Any]]:
    """What is timed, and the runs that dartflow leaves."""
    runs: list[Any] = []

    def dartflow(_number: int) -> int:
        runs.append(whole_run(found, found.queries))
        return len(texts)

    sides: dict[str, Work] = {"dartflow": dartflow}
    keywords = script.bm25s()
    if llama is not None:
        theirs = llama

        def ask_llama(_number: int) -> int:
            return len([theirs.ask(text, vector) for text, vector in zip(texts, vectors, strict=True)])

        sides[LLAMA] = ask_llama
    if keywords is not None:
        sides[BEST] = lambda _number: len(script.batch(texts, vectors, keywords))
    return sides, runs


if __name__ == "__main__":
    run(compare)
