"""The stronger embedder e5-small on scifact: fused and keyword rankings, with settings chosen on other queries.

Embedding 5,183 abstracts takes about an hour on two cores; the vectors are kept beside the stores.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.ablations import ceiling, scifact_settings
from bench.paired import by_query, difference
from bench.reference import Array
from bench.sections import Figures, Section, Value
from bench.variants import Variants, judged_log
from corpus.passages import passage_texts
from evaluation.measures import Qrels
from flows.engine import plain_step
from flows.evaluate import load_qrels
from flows.progress import no_progress
from flows.snapshots import make_snapshot
from models.embedder import Embedder, EmbedderParams, open_embedder

_BLOCK = 32
_NDCG = "nDCG@10"
_GRID = {
    "log_normal.sigma": (0.02, 0.05, 0.1),
    "rrf_merge.greedy_selection_weight": (0.4, 0.7, 1.0, 1.5, 2.0),
    "rrf_merge.rank_constant": (5, 20, 60),
}


def e5_section(data: Path, store: Path) -> Section:
    """Settings chosen on the judged claims that are no test claims, and told on the test claims."""
    embedder = open_embedder(EmbedderParams(provider="e5-small"))
    if embedder is None:
        raise RuntimeError("e5-small computes vectors")
    scifact, folder = data / "scifact", store / "scifact_e5"
    corpus, queries = with_vectors(scifact, folder, embedder)
    given = ("embedder.provider=precomputed", f"embedder.name={embedder.model_id}", "cross_encoder.provider=none")
    settings = scifact_settings(folder / "store", *given)
    make_snapshot(corpus, settings, plain_step, no_progress)
    test = load_qrels(scifact / "qrels_test.tsv")
    others = {query: judged for query, judged in load_qrels(scifact / "qrels.tsv").items() if query not in test}
    chosen = _chosen(Variants(settings, judged_log(queries, others, folder / "others.parquet")), others)
    variants = Variants(
        scifact_settings(folder / "store", *given, *chosen), judged_log(queries, test, folder / "test.parquet")
    )
    return Section(
        "scifact with the embedder e5-small",
        f"{embedder.model_id}, {embedder.dimension} dimensions. Of {len(list(itertools.product(*_GRID.values())))} "
        f"settings, those with the best fused nDCG@10 on the {len(others)} judged claims that are no test claims: "
        f"{', '.join(f'`{one}`' for one in chosen)}. Told on the 300 test claims; no cross-encoder.",
        [_rankings(variants, test), ceiling(variants, test, "e5-small")],
    )


def _chosen(variants: Variants, qrels: Qrels) -> list[str]:
    best: tuple[float, list[str]] = (-1.0, [])
    for values in itertools.product(*_GRID.values()):
        assignments = [f"{name}={value}" for name, value in zip(_GRID, values, strict=True)]
        plan = variants.rerun(*assignments)
        found = float(by_query(variants.rankings(plan, "rrf_merge"), qrels, _NDCG).mean())
        print(f"{found:.4f} {' '.join(assignments)}", flush=True)
        if found > best[0]:
            best = found, assignments
    return best[1]


def _rankings(variants: Variants, qrels: Qrels) -> Figures:
    stages = {
        "keyword (sparse_search)": "sparse_search", "dense (oversample)": "oversample",
        "Dartboard (greedy_selection)": "greedy_selection", "fused (rrf_merge)": "rrf_merge",
        "reranked without a model (blended_rerank)": "blended_rerank",
    }  # fmt: skip
    rows: list[list[Value]] = []
    keyword, keyword_recall = None, None
    for name, stage in stages.items():
        rankings = variants.rankings(variants.first, stage)
        values, recall = by_query(rankings, qrels, _NDCG), by_query(rankings, qrels, "R@10")
        if keyword is None or keyword_recall is None:
            keyword, keyword_recall = values, recall
            rows.append([name, float(values.mean()), None, float(recall.mean()), None])
        else:
            gains = difference(values, keyword), difference(recall, keyword_recall)
            rows.append([name, float(values.mean()), gains[0], float(recall.mean()), gains[1]])
    return Figures(
        "Rankings beside keyword search alone", ["ranking", _NDCG, "this - keyword", "R@10", "this - keyword"], rows
    )


def with_vectors(scifact: Path, folder: Path, embedder: Embedder) -> tuple[Path, Path]:
    """Corpus and queries as files with a column of embeddings."""
    corpus = pq.read_table(scifact / "corpus.parquet", columns=["chunk_id", "title", "text", "source", "document_id"])
    queries = pq.read_table(scifact / "queries.parquet", columns=["query_id", "text"])
    vectors = folder / "vectors"
    found = {
        "corpus": (corpus, kept_vectors(passage_texts(corpus, "title_and_text"), vectors, embedder, "passages")),
        "queries": (queries, kept_vectors(queries["text"].to_pylist(), vectors, embedder, "queries")),
    }
    for name, (table, matrix) in found.items():
        pq.write_table(
            table.append_column("embedding", pa.array(list(matrix), pa.list_(pa.float32()))), folder / f"{name}.parquet"
        )
    return folder / "corpus.parquet", folder / "queries.parquet"


def kept_vectors(texts: Sequence[str], folder: Path, embedder: Embedder, kind: str) -> Array:
    """(texts, dimension) float32, in blocks that are kept by what they were made of, so that it can be interrupted."""
    folder.mkdir(parents=True, exist_ok=True)
    blocks = []
    for start in range(0, len(texts), _BLOCK):
        block = list(texts[start : start + _BLOCK])
        path = folder / block_name(embedder.model_id, kind, block)
        if not path.exists():
            vectors = embedder.embed_queries(block) if kind == "queries" else embedder.embed(block)
            with path.with_suffix(".part").open("wb") as file:
                np.save(file, vectors)
            path.with_suffix(".part").rename(path)
            print(f"{kind}: {start + len(block)} of {len(texts)}", flush=True)
        blocks.append(np.load(path))
    return np.concatenate(blocks)


def block_name(model_id: str, kind: str, block: Sequence[str]) -> str:
    """The name of the file of a block."""
    digest = hashlib.sha256("\0".join([model_id, kind, *block]).encode())
    return f"{digest.hexdigest()[:32]}.npy"
