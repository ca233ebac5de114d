"""Measures: how good a ranking is against judgements, and how complete a context is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ir_measures
import numpy as np
import pyarrow as pa

from contracts.columns import as_numpy
from contracts.errors import InputError

Qrels = Mapping[str, Mapping[str, int]]

RANKING_MEASURES = ("nDCG@10", "R@5", "R@10", "RR@10")


def rank_measures(
    rankings: Mapping[str, Sequence[str]], qrels: Qrels, names: Sequence[str] = RANKING_MEASURES
) -> dict[str, float]:
    """The mean of each measure over all judged queries; a judged query without a ranking counts as 0.

    Args:
        rankings: query id to chunk ids, best first.
        qrels: query id to chunk id to relevance, > 0 is relevant.
        names: measures in the notation of ir-measures.

    Source: ir-measures, with pytrec_eval behind it; nDCG uses linear gains as trec_eval does.
    """
    measures = [ir_measures.parse_measure(name) for name in names]
    run = {
        query: {chunk: 1.0 / rank for rank, chunk in enumerate(chunks, start=1)}
        for query, chunks in rankings.items()
        if query in qrels
    }
    found = ir_measures.calc_aggregate(measures, {query: dict(judged) for query, judged in qrels.items()}, run)
    return {name: float(found[measure]) for name, measure in zip(names, measures, strict=True)}


def read_qrels(text: str, where: str) -> dict[str, dict[str, int]]:
    """TREC qrels: `query 0 chunk relevance` a line, split at white space.

    Raises:
        InputError: a line with other columns; names file and line.
    """
    qrels: dict[str, dict[str, int]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        parts = line.split()
        if not parts:
            continue
        try:
            query, _, chunk, relevance = parts
            qrels.setdefault(query, {})[chunk] = int(relevance)
        except ValueError as error:
            raise InputError(
                f"{where}, line {number}", "is no judgement", got=line[:80], want="query 0 chunk relevance",
                next_step="Correct the qrels file.",
            ) from error  # fmt: skip
    return qrels


def context_measures(context: pa.Table) -> dict[str, float | None]:
    """Evidence-family recall and the rate of queries with all families, over those that need any; None if none."""
    recall = as_numpy(context.column("evidence_family_recall").drop_null())
    if not len(recall):
        return {"evidence_family_recall": None, "all_families_rate": None, "queries": 0.0}
    return {
        "evidence_family_recall": float(np.mean(recall)),
        "all_families_rate": float(np.mean(recall == 1.0)),
        "queries": float(len(recall)),
    }
