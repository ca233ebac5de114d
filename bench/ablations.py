"""Ablations on scifact: what each part of the ranking adds, what there was to be found, and other ways to select.

All settings are the defaults, which were chosen on other judged queries than the 300 that are asked here (decision
006).
"""

from __future__ import annotations

from pathlib import Path

from bench.paired import by_query, difference
from bench.sections import Figures, Section, Value
from bench.variants import Variants, judged_log
from checkpoints.store import Store
from evaluation.measures import Qrels, rank_measures
from flows.engine import plain_step
from flows.evaluate import load_qrels
from flows.progress_bars import progress_bars
from flows.settings import Settings, load_settings
from flows.snapshots import make_snapshot

DEPTHS = (10, 20, 30, 50, 100)
_NDCG = "nDCG@10"

# Each part left out by the settings that leave it out; the weights of the others are rescaled to sum to 1.
_PARTS = {
    "all parts": [],
    "without cross-encoder": ["cross_encoder.provider=none"],
    "without retrieval": ["blended_rerank.retrieval_weight=0.0"],
    "without lexical overlap": ["blended_rerank.lexical_weight=0.0"],
    "without exact-token bonus": ["blended_rerank.exact_token_bonus=0.0"],
    "cross-encoder alone": [
        "blended_rerank.retrieval_weight=0.0", "blended_rerank.lexical_weight=0.0",
        "blended_rerank.exact_token_bonus=0.0",
    ],
}  # fmt: skip
_METHODS = {"Dartboard": "dartboard", "MMR, lambda 0.5": "mmr", "plain top-k": "top_k"}


def scifact_settings(store: Path, *assignments: str) -> Settings:
    """The defaults with ten passages, over a store below a folder."""
    given = [f"store={store}", "blended_rerank.top_k=10"]
    return load_settings(environment={}, assignments=[*given, *assignments])


def parts_section(data: Path, store: Path) -> Section:
    """The test claims, with the parts of the ranking taken away one by one."""
    settings, qrels = scifact_settings(store / "scifact"), load_qrels(data / "scifact" / "qrels_test.tsv")
    if not Store(settings.store).files("corpora"):
        with progress_bars() as report:
            make_snapshot(data / "scifact" / "corpus.parquet", settings, plain_step, report)
    log = judged_log(data / "scifact" / "queries.parquet", qrels, store / "scifact_judged.parquet")
    variants = Variants(settings, log)
    return Section(
        "scifact: what each part adds",
        "The 300 test claims, the defaults, ten passages. Differences are paired, with 95 % bootstrap intervals.",
        [
            _against_retrievers(variants, qrels), _parts(variants, qrels), _methods(variants, qrels),
            ceiling(variants, qrels, "USE multilingual"),
        ],
    )  # fmt: skip


def _against_retrievers(variants: Variants, qrels: Qrels) -> Figures:
    stages = {"reranked": "blended_rerank", "fused": "rrf_merge", "keyword": "sparse_search", "dense": "oversample"}
    found = {name: by_query(variants.rankings(variants.first, stage), qrels, _NDCG) for name, stage in stages.items()}
    rows: list[list[Value]] = [
        [name, float(values.mean()), None if name == "reranked" else difference(found["reranked"], values)]
        for name, values in found.items()
    ]
    return Figures("The reranked list and what it is made of", ["ranking", _NDCG, "reranked - this"], rows)


def _parts(variants: Variants, qrels: Qrels) -> Figures:
    rows: list[list[Value]] = []
    whole = None
    for name, assignments in _PARTS.items():
        rankings = variants.rankings(variants.rerun(*assignments), "blended_rerank")
        values = by_query(rankings, qrels, _NDCG)
        lost = None if whole is None else difference(whole, values)
        whole = values if whole is None else whole
        rows.append([name, float(values.mean()), rank_measures(rankings, qrels)["R@5"], lost])
    return Figures("Parts of the blended score, left out", ["score", _NDCG, "R@5", "all parts - this"], rows)


def _methods(variants: Variants, qrels: Qrels) -> Figures:
    rows: list[list[Value]] = []
    dartboard = None
    for name, method in _METHODS.items():
        # What fusion makes of it is seen without the cross-encoder, which would read other pairs for each.
        plan = variants.rerun("cross_encoder.provider=none", f"greedy_selection.method={method}")
        picked = variants.rankings(plan, "greedy_selection")
        values = by_query(picked, qrels, _NDCG)
        lost = None if dartboard is None else difference(dartboard, values)
        dartboard = values if dartboard is None else dartboard
        fused = by_query(variants.rankings(plan, "rrf_merge"), qrels, _NDCG)
        rows.append([name, float(values.mean()), rank_measures(picked, qrels)["R@10"], lost, float(fused.mean())])
    return Figures(
        "Ways to order the same 30 dense candidates",
        ["method", _NDCG, "R@10", "Dartboard - this", f"{_NDCG} after fusion"],
        rows,
    )


def ceiling(variants: Variants, qrels: Qrels, embedder: str) -> Figures:
    """How much of what is relevant the fused list holds at each depth: no reranker can reach more."""
    names = [f"R@{depth}" for depth in DEPTHS]
    rows: list[list[Value]] = []
    for name, stage in (("fused", "rrf_merge"), ("keyword", "sparse_search"), ("dense", "oversample")):
        rankings = variants.rankings(variants.first, stage)
        deepest = max(len(chunks) for chunks in rankings.values())
        found = rank_measures(rankings, qrels, names)
        rows.append([name, *(found[f"R@{depth}"] if depth <= deepest else None for depth in DEPTHS)])
    return Figures(f"Recall at each depth, the ceiling of what is reranked ({embedder})", ["ranking", *names], rows)
