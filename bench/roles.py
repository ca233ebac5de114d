"""Roles: what the score grader gives to passages that are right, tampered with, or lack the answer (rgb_en_fact)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.reference import Array
from bench.sections import Figures, Section, Value
from checkpoints.pair_scores import PairScores
from checkpoints.store import Store
from corpus.passages import passage_texts
from flows.settings import Settings
from models.cross_encoder import CachedCrossEncoder, open_cross_encoder, probabilities
from stages.crag_grading import grade_scores

ROLES = {"positive": "right", "positive_wrong": "tampered with", "negative": "no answer"}
_GRADES = ("incorrect", "ambiguous", "correct")


def roles_section(data: Path, store: Path) -> Section:
    """Every passage read for its question by the default cross-encoder, and graded by the default bands."""
    settings = Settings()
    pairs = _pairs(data / "rgb_en_fact")
    scores = _scores(pairs, store / "rgb_en_fact", settings)
    roles = np.array(pairs["role"].to_pylist())
    lower, upper = settings.crag_grading.lower, settings.crag_grading.upper
    queries = np.array(pairs["query_id"].to_pylist())
    told = _told_apart(scores, roles, queries, "positive", "positive_wrong")
    return Section(
        "rgb_en_fact: grades by role",
        f"{len(set(queries))} questions; passages that answer them, the same with the answer changed, and passages "
        "about the same things that lack it; what the tampering left as it was is left out. Grades of the score "
        f"grader: correct from {upper:g} on, incorrect below {lower:g}.\n\n"
        "**A tampered passage cannot be told from a right one by its relevance**: it says as plainly what was asked, "
        "only wrongly. A score cannot see that, whatever the bands; a grader that knows the answer, or sources that "
        "contradict each other, could. Where a right and a tampered passage are drawn for a question, the right one "
        f"has the higher score in {told:.3f} of cases, and 0.5 is a coin.",
        [_grades(scores, roles, lower, upper), _pairwise(scores, roles, queries)],
    )


def _pairs(folder: Path) -> pa.Table:
    """A row a question and passage: query_id, query, passage, role."""
    roles = pq.read_table(folder / "roles.parquet", columns=["query_id", "chunk_id", "role"])
    corpus, queries = pq.read_table(folder / "corpus.parquet"), pq.read_table(folder / "queries.parquet")
    texts = dict(zip(corpus["chunk_id"].to_pylist(), passage_texts(corpus, "title_and_text"), strict=True))
    asked = dict(zip(queries["query_id"].to_pylist(), queries["text"].to_pylist(), strict=True))
    rows: dict[tuple[str, str], set[str]] = {}
    for one in roles.to_pylist():
        rows.setdefault((one["query_id"], one["chunk_id"]), set()).add(one["role"])
    return pa.Table.from_pylist([
        {"query_id": query, "query": asked[query], "passage": texts[chunk], "role": next(iter(found))}
        for (query, chunk), found in rows.items()
        if len(found) == 1
    ])  # fmt: skip


def _scores(pairs: pa.Table, store: Path, settings: Settings) -> Array:
    encoder = open_cross_encoder(settings.cross_encoder)
    if encoder is None:
        raise RuntimeError("the default has a cross-encoder")
    cached = CachedCrossEncoder(encoder, PairScores(Store(str(store)), encoder.model_id))
    return probabilities(cached, pairs["query"].to_pylist(), pairs["passage"].to_pylist())


def _grades(scores: Array, roles: Array, lower: float, upper: float) -> Figures:
    rows: list[list[Value]] = []
    for role, said in ROLES.items():
        mine = scores[roles == role]
        shares = np.bincount(grade_scores(mine, lower, upper), minlength=len(_GRADES)) / len(mine)
        middle = [float(value) for value in np.percentile(mine, [25, 50, 75])]
        rows.append([f"{role} ({said})", len(mine), *(float(share) for share in shares[::-1]), *middle])
    columns = ["role", "passages", *_GRADES[::-1], "score: quarter", "median", "three quarters"]
    return Figures("Share of each grade, and scores", columns, rows)


def _pairwise(scores: Array, roles: Array, queries: Array) -> Figures:
    rows: list[list[Value]] = [
        [f"{one} above {other}", _told_apart(scores, roles, queries, one, other)]
        for one, other in (("positive", "negative"), ("positive_wrong", "negative"), ("positive", "positive_wrong"))
    ]
    title = "How often a passage of one role has the higher score, of two for the same question, ties halved"
    return Figures(title, ["pair", "share"], rows)


def _told_apart(scores: Array, roles: Array, queries: Array, above: str, below: str) -> float:
    """The share of pairs of a question that are in this order, as a mean over questions that have both roles."""
    shares = []
    for query in np.unique(queries):
        first = scores[(queries == query) & (roles == above)][:, None]
        second = scores[(queries == query) & (roles == below)][None, :]
        if first.size and second.size:
            shares.append((first > second).mean() + 0.5 * (first == second).mean())
    return float(np.mean(shares))
