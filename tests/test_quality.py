"""The quality benchmark: its statistics by hand, its page, and its reruns on a small store."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bench.ablations import ceiling
from bench.paired import by_query, difference
from bench.quality import _ORDER, write_page
from bench.roles import _pairs, _told_apart
from bench.sections import Figures, Section, page_of
from bench.strong_embedder import kept_vectors
from bench.variants import Variants, judged_log
from flows.engine import plain_step
from flows.progress import no_progress
from flows.snapshots import make_snapshot
from tests.small import small_settings, write_small_inputs

QRELS = {"a": {"x": 1}, "b": {"x": 1, "y": 1}, "c": {"z": 1}}


def test_a_measure_of_each_query_in_the_order_of_the_judgements():
    rankings = {"b": ["y", "n", "x"], "a": ["x"], "unjudged": ["x"]}
    second = (1 + 1 / np.log2(4)) / (1 + 1 / np.log2(3))
    np.testing.assert_allclose(by_query(rankings, QRELS, "nDCG@10"), [1, second, 0])
    np.testing.assert_allclose(by_query(rankings, QRELS, "R@2"), [1, 0.5, 0])


def test_a_difference_has_an_interval_that_holds_it():
    ours, theirs = np.array([0.9, 0.8, 0.7, 0.9] * 50), np.array([0.4, 0.5, 0.2, 0.6] * 50)
    middle, low, high = difference(ours, theirs)
    assert middle == pytest.approx(0.4)
    assert 0.37 < low < middle < high < 0.43
    assert difference(ours, ours) == (0, 0, 0)
    noise = np.random.default_rng(3).normal(0, 0.2, 400)
    middle, low, high = difference(noise + 0.5, np.full(400, 0.5))
    assert low < 0 < high
    # Percentiles of means lie where the normal law puts them.
    half = 1.96 * noise.std() / 20
    assert (low, high) == (pytest.approx(middle - half, abs=0.003), pytest.approx(middle + half, abs=0.003))


def test_a_section_shows_figures_intervals_and_gaps():
    table = Figures("Here", ["ranking", "nDCG@10", "difference", "passages"], [["one", 0.25, (0.01, -0.02, 0.04), 7]])
    table.rows.append(["two", 1.0, None, 0])
    assert page_of(Section("Title", "Said.", [table]).as_data()) == (
        "### Title\n\nSaid.\n\nHere:\n\n| ranking | nDCG@10 | difference | passages |\n|---|---|---|---|\n"
        "| one | 0.250 | +0.010 (-0.020 to +0.040) | 7 |\n| two | 1.000 |  | 0 |\n"
    )


def test_the_page_shows_what_was_measured(monkeypatch, tmp_path):
    import json

    from bench import quality

    kept = json.loads((quality.ROOT / "bench" / "quality.json").read_text())
    assert set(kept) <= set(_ORDER)
    (tmp_path / "docs").mkdir()
    page = quality.ROOT / "docs" / "benchmarks.md"
    (tmp_path / "docs" / "benchmarks.md").write_text(page.read_text())
    monkeypatch.setattr(quality, "ROOT", tmp_path)
    write_page(kept)
    assert (tmp_path / "docs" / "benchmarks.md").read_text() == page.read_text()


def test_how_often_one_role_is_above_another():
    """By hand: of question a 3.5 of 4 pairs, of b none of 1; c has one role alone."""
    rows = [
        ("a", "right", 0.9), ("a", "right", 0.5), ("a", "wrong", 0.5), ("a", "wrong", 0.1), ("b", "right", 0.2),
        ("b", "wrong", 0.3), ("c", "right", 0.9),
    ]  # fmt: skip
    queries, roles, scores = (np.array(column) for column in zip(*rows, strict=True))
    assert _told_apart(scores, roles, queries, "right", "wrong") == (3.5 / 4 + 0) / 2
    assert _told_apart(scores, roles, queries, "wrong", "right") == (0.5 / 4 + 1) / 2


def test_a_passage_of_two_roles_has_none(tmp_path):
    rows = [("q", "1", "positive"), ("q", "2", "positive"), ("q", "2", "positive_wrong"), ("q", "3", "negative")]
    pq.write_table(
        pa.table(list(zip(*rows, strict=True)), ["query_id", "chunk_id", "role"]), tmp_path / "roles.parquet"
    )
    corpus = {"chunk_id": ["1", "2", "3"], "title": [None, "t", None], "text": ["one", "two", "three"]}
    pq.write_table(pa.table(corpus), tmp_path / "corpus.parquet")
    pq.write_table(pa.table({"query_id": ["q"], "text": ["asked"]}), tmp_path / "queries.parquet")
    assert _pairs(tmp_path).to_pylist() == [
        {"query_id": "q", "query": "asked", "passage": "one", "role": "positive"},
        {"query_id": "q", "query": "asked", "passage": "three", "role": "negative"},
    ]


class Counting:
    """Embeds a text by its length, and counts."""

    model_id = "counting"
    dimension = 2

    def __init__(self):
        self.asked = []

    def embed(self, texts):
        self.asked += texts
        return np.array([[len(text), 1] for text in texts], dtype=np.float32)

    def embed_queries(self, texts):
        return self.embed(texts) * 2


def test_vectors_are_kept_by_what_they_were_made_of(tmp_path):
    embedder, texts = Counting(), [f"text {'x' * number}" for number in range(70)]
    first = kept_vectors(texts, tmp_path, embedder, "passages")
    assert first[:, 0].tolist() == [len(text) for text in texts]
    assert len(embedder.asked) == 70
    assert np.array_equal(kept_vectors(texts, tmp_path, embedder, "passages"), first)
    assert len(embedder.asked) == 70
    assert np.array_equal(kept_vectors(texts, tmp_path, embedder, "queries"), first * 2)
    kept_vectors([*texts[:-1], "other"], tmp_path, embedder, "passages")
    assert len(embedder.asked) == 70 + 70 + 6, "only the block that changed is embedded anew"


def test_variants_are_reruns_whose_rankings_go_by_logged_ids(tmp_path):
    write_small_inputs(tmp_path)
    settings = small_settings(tmp_path, "greedy_selection.k=30")
    make_snapshot(tmp_path / "corpus.jsonl", settings, plain_step, no_progress)
    lines = pa.Table.from_pylist([
        {"query_id": f"log-{number}", "text": f"how to set backup option {number}", "embedding": [1.0] * 15 + [number]}
        for number in range(6)
    ])  # fmt: skip
    pq.write_table(lines, tmp_path / "queries.parquet")
    qrels = {f"log-{number}": {"c-000": 1} for number in (1, 3)}
    variants = Variants(settings, judged_log(tmp_path / "queries.parquet", qrels, tmp_path / "out" / "log.parquet"))
    dartboard = variants.rankings(variants.first, "greedy_selection")
    assert set(dartboard) == set(qrels)
    plain = variants.rerun("greedy_selection.method=top_k")
    assert variants.rankings(plain, "greedy_selection") == variants.rankings(plain, "oversample")
    assert {one.stage for one in plain.stages if one.borrowed_from is not None} >= {"oversample", "sparse_search"}
    table = ceiling(variants, qrels, "given")
    found = dict(zip(table.columns, table.rows[0], strict=True))
    assert found["ranking"] == "fused"
    assert found["R@10"] <= found["R@20"] <= 1
    assert found["R@100"] is None, "what was not looked at is not told"
