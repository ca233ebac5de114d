"""Building and writing of a corpus: the same corpus is the same bytes, and other bytes are refused."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.corpus import Chunk
from contracts.errors import ConfigurationError, CorruptArtifactError, InputError, MissingArtifactError
from contracts.table import schema
from corpus.build import build_corpus, embed_chunks
from corpus.files import CHUNKS, EMBEDDINGS, INDEX, KEYWORDS, described_snapshot, open_corpus, snapshot_files
from corpus.scope import Scope, Scopes
from corpus.tokeniser import TokeniserParams
from models.embedder import unit_rows
from tests.corpora import chunk_table, make_corpus, unit

CHUNKS_GIVEN = [
    {"chunk_id": "a", "text": "the red fox", "title": "Foxes", "acl": ["staff"], "authority_tier": 1},
    {"chunk_id": "b", "text": "a blue whale", "acl": None, "metadata": {"lang": "en", "draft": "true"}},
    {"chunk_id": "c", "text": "the red fox", "acl": [], "version": "2"},
    {"chunk_id": "é", "text": "ŻÓŁĆ and fox", "acl": ["all", "staff"]},
]


def build(chunks=CHUNKS_GIVEN, embeddings=None, **more):
    table = chunk_table(chunks)
    if embeddings is None:
        embeddings = np.random.default_rng(3).normal(size=(len(chunks), 6))
    defaults = {
        "chunks": table, "embeddings": embeddings, "embedding_model": "m", "access_control": True,
        "tokeniser": TokeniserParams(),
    }  # fmt: skip
    return build_corpus(**{**defaults, **more})


def written(tmp_path, corpus):
    """The corpus's files in a folder, and their manifest."""
    files = snapshot_files(corpus)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    return described_snapshot(corpus.snapshot, files, source_file="c.jsonl", created_at="2026", seconds=1.0)


@pytest.mark.parametrize("index_factory", ["Flat", "HNSW8", "IVF1,Flat", "PCA2,SQ8"])
def test_a_corpus_comes_back_from_its_files_as_it_was(tmp_path, index_factory):
    corpus = build(index_factory=index_factory, searched_text="text")
    snapshot = written(tmp_path, corpus)
    again = open_corpus(tmp_path, snapshot)
    assert again.chunks.equals(corpus.chunks)
    assert again.chunks.schema.equals(schema(Chunk))
    assert np.array_equal(again.embeddings, corpus.embeddings)
    assert isinstance(again.embeddings, np.memmap)
    assert (again.keywords.terms, again.searched_text) == (corpus.keywords.terms, "text")
    for name in ("offsets", "rows", "frequencies", "lengths"):
        left, right = getattr(again.keywords, name), getattr(corpus.keywords, name)
        assert np.array_equal(left, right)
        assert left.dtype == right.dtype
    scopes = Scopes.single(Scope(("staff",)), 2)
    vectors = unit(np.random.default_rng(4).normal(size=(2, 6)))
    for one, other in (
        (again.dense_search(vectors, scopes, 3), corpus.dense_search(vectors, scopes, 3)),
        (again.index.search(vectors, 2)[1], corpus.index.search(vectors, 2)[1]),
        *[
            tuple(x.keyword_search(1.5, 0.75, 0.25).search(["fox", "the whale"], scopes, 3) for x in (again, corpus)),
        ],
    ):
        values = [one, other] if isinstance(one, np.ndarray) else [one.values["row"], other.values["row"]]
        assert values[0].tolist() == values[1].tolist()
    assert snapshot_files(again) == snapshot_files(corpus)


@pytest.mark.parametrize("index_factory", ["Flat", "HNSW8", "IVF8,Flat", "IVF8,SQ8"])
def test_the_same_corpus_gives_the_same_bytes(index_factory):
    chunks = [{"chunk_id": f"{i:04d}", "text": f"word{i % 40} other{i % 7}"} for i in range(600)]
    embeddings = np.random.default_rng(0).normal(size=(600, 16))
    one, other = (build(chunks, embeddings, index_factory=index_factory) for _ in range(2))
    assert snapshot_files(one) == snapshot_files(other)
    assert one.snapshot == other.snapshot


def test_a_corpus_of_several_row_groups_comes_back_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("corpus.files._ROW_GROUP", 2)
    corpus = build()
    again = open_corpus(tmp_path, written(tmp_path, corpus))
    assert pq.ParquetFile(tmp_path / CHUNKS).num_row_groups == 2
    assert again.chunks.column("text").num_chunks == 1
    assert again.chunks.equals(corpus.chunks)
    assert again.keywords.offsets.tolist() == corpus.keywords.offsets.tolist()


def test_a_corpus_without_a_single_term_can_be_written(tmp_path):
    corpus = build([{"chunk_id": "a", "text": "?!"}, {"chunk_id": "b", "text": "the of"}])
    again = open_corpus(tmp_path, written(tmp_path, corpus))
    assert again.keywords.terms == ()
    assert again.keywords.lengths.tolist() == [0, 0]


@pytest.mark.parametrize("name", [CHUNKS, EMBEDDINGS, INDEX, KEYWORDS])
@pytest.mark.parametrize("place", [0, 0.3, 0.7, -1])
def test_one_changed_byte_is_refused_by_name(tmp_path, name, place):
    snapshot = written(tmp_path, build())
    data = bytearray((tmp_path / name).read_bytes())
    data[int(place * len(data)) if place >= 0 else -1] ^= 1
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CorruptArtifactError, match=rf"{name}: the file is not what was committed: got SHA-256"):
        open_corpus(tmp_path, snapshot)


def test_a_missing_file_is_refused_by_name(tmp_path):
    snapshot = written(tmp_path, build())
    (tmp_path / INDEX).unlink()
    with pytest.raises(MissingArtifactError, match=r"a file is missing: got nothing, want .*index\.faiss"):
        open_corpus(tmp_path, snapshot)


def test_the_manifest_lists_what_was_written(tmp_path):
    corpus = build(settings={"left_out_columns": ["tags"]}, chunking="by heading", quarantined=2)
    snapshot = written(tmp_path, corpus)
    assert {file.name: file.bytes for file in snapshot.files} == {
        path.name: path.stat().st_size for path in tmp_path.iterdir()
    }
    assert (snapshot.chunks, snapshot.documents, snapshot.quarantined, snapshot.dimension) == (4, 4, 2, 6)
    assert (snapshot.source_file, snapshot.created_at, snapshot.seconds) == ("c.jsonl", "2026", 1.0)
    assert snapshot.snapshot_id == corpus.snapshot.snapshot_id
    assert snapshot.settings == {
        "left_out_columns": ["tags"],
        "chunking": "by heading",
        "index_factory": "Flat",
        "searched_text": "title_and_text",
        "tokeniser": TokeniserParams().model_dump(mode="json"),
    }


OTHER_CONTENT = {
    "a text": {"chunks": [{**CHUNKS_GIVEN[0], "text": "the red foxes"}, *CHUNKS_GIVEN[1:]]},
    "an access list": {"chunks": [{**CHUNKS_GIVEN[0], "acl": ["all"]}, *CHUNKS_GIVEN[1:]]},
    "an embedding": {"embeddings": np.random.default_rng(7).normal(size=(4, 6))},
    "the model": {"embedding_model": "n"},
    "access control": {"access_control": False},
    "the tokeniser": {"tokeniser": TokeniserParams(language="none")},
    "the searched text": {"searched_text": "text"},
    "the index": {"index_factory": "HNSW8"},
    "the chunking": {"chunking": "other"},
}


@pytest.mark.parametrize("what", OTHER_CONTENT)
def test_other_content_is_another_snapshot(what):
    assert build(**OTHER_CONTENT[what]).snapshot.snapshot_id != build().snapshot.snapshot_id


def test_the_same_content_is_the_same_snapshot():
    scaled = np.random.default_rng(3).normal(size=(4, 6)) * 4  # a power of two changes no bit of the unit vectors
    same = build(embeddings=scaled, settings={"note": "x"}, collapse_identical_texts=False, quarantined=3)
    assert same.snapshot.snapshot_id == build().snapshot.snapshot_id
    assert same.snapshot.snapshot_id.startswith("corpus-")
    assert len(same.snapshot.snapshot_id) == len("corpus-") + 12


@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=6).filter(any), st.sampled_from([1e-300, 1, 1e300])
)
@settings(max_examples=80, deadline=None)
def test_unit_rows_have_length_one_and_the_direction_of_the_given(vector, scale):
    given_row = np.array([vector]) * scale
    if not given_row.any():
        return
    (row,) = unit_rows(given_row).astype(np.float64)
    assert np.linalg.norm(row) == pytest.approx(1, abs=1e-6)
    direction = given_row[0] / np.abs(given_row[0]).max()
    np.testing.assert_allclose(row, direction / np.linalg.norm(direction), atol=1e-6)


@pytest.mark.parametrize(
    ("embeddings", "message"),
    [
        (np.ones((3, 6)), r"do not belong to the chunks: got an array of shape \(3, 6\), want \(4, dimension\)"),
        (np.ones(4), "do not belong to the chunks"),
        (np.array([[1.0], [np.nan], [1.0], [1.0]]), "chunk b: its embedding is not usable"),
        (np.array([[1.0], [1.0], [1.0], [0.0]]), "chunk é: its embedding is not usable"),
    ],
)
def test_embeddings_that_do_not_fit_are_refused(embeddings, message):
    with pytest.raises(InputError, match=message):
        build(embeddings=embeddings)


@pytest.mark.parametrize("index_factory", ["Falt", "IVF64,Flat", "LSH"])
def test_an_index_that_faiss_cannot_build_or_search_is_a_wrong_setting(index_factory):
    with pytest.raises(ConfigurationError, match=f"setting corpus.index_factory: FAISS cannot .*got {index_factory}"):
        build(index_factory=index_factory)


class CountingEmbedder:
    """Counts what it is asked; a vector tells the length of its text."""

    model_id = "counting"
    dimension = 2

    def __init__(self):
        self.asked = []

    def embed(self, texts):
        self.asked += texts
        return unit([[1.0, len(text)] for text in texts])


def test_equal_passages_are_embedded_once():
    embedder, told = CountingEmbedder(), []
    chunks = chunk_table([{"chunk_id": f"{i:03d}", "text": f"text {'x' * (i % 300)}"} for i in range(400)])
    vectors = embed_chunks(chunks, embedder, "text", lambda done, total: told.append((done, total)))
    assert len(embedder.asked) == 300
    assert told == [(256, 300), (300, 300)]
    assert np.array_equal(vectors, CountingEmbedder().embed(chunks["text"].to_pylist()))


def test_the_keyword_index_has_the_searched_text():
    assert "fox" in make_corpus([{"chunk_id": "a", "text": "red", "title": "Fox"}]).keywords.terms
    assert "fox" not in build([{"chunk_id": "a", "text": "red", "title": "Fox"}], searched_text="text").keywords.terms
