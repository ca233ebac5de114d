"""Corpus files: a row is a chunk, or it is refused or quarantined by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from contracts.corpus import Chunk
from contracts.errors import InputError
from contracts.table import check_table
from loading.corpus_file import CorpusParams, load_corpus_file

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "corpus.jsonl"


def chunk(chunk_id="a", **more):
    return {"chunk_id": chunk_id, "text": f"text of {chunk_id}", "source": "s.md", "document_id": "s", **more}


def load(tmp_path, rows, *, with_vectors=True, **params):
    path = tmp_path / "corpus.jsonl"
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return load_corpus_file(path, CorpusParams(**params), with_vectors=with_vectors)


def test_a_row_becomes_a_chunk_with_its_further_columns_as_metadata(tmp_path):
    loaded = load(
        tmp_path,
        [
            chunk(
                7, chunk_index=3, title="T", evidence_family="f", authority_tier=1, version=2026, acl=["b", "a", "b"],
                language="en", draft=True, weight=0.5, year=2021.0, empty="", nothing=None, tags=["x"], nested={"y": 1},
            )
        ],
    )  # fmt: skip
    assert loaded.chunks.to_pylist() == [
        {
            "chunk_id": "7", "text": "text of 7", "source": "s.md", "document_id": "s", "chunk_index": 3,
            "title": "T", "evidence_family": "f", "authority_tier": 1, "version": "2026", "acl": ["a", "b"],
            "metadata": [
                {"key": "draft", "value": "true"}, {"key": "empty", "value": ""}, {"key": "language", "value": "en"},
                {"key": "weight", "value": "0.5"}, {"key": "year", "value": "2021"},
            ],
            "text_id": 0,
        }
    ]  # fmt: skip
    assert loaded.left_out_columns == ["nested", "tags"]
    assert (loaded.access_control, loaded.embeddings, loaded.quarantined) == (True, None, [])


def test_chunks_stand_in_the_order_of_code_points_with_their_embeddings(tmp_path):
    ids = ["b", "\U0001f600", "a", "\uffee", "B", "10", "9"]
    rows = [chunk(one, embedding=[1.0, place]) for place, one in enumerate(ids)]
    loaded = load(tmp_path, rows)
    assert loaded.chunks["chunk_id"].to_pylist() == ["10", "9", "B", "a", "b", "\uffee", "\U0001f600"]
    assert loaded.embeddings[:, 1].tolist() == [5, 6, 4, 2, 0, 3, 1]


def test_a_whole_float_is_the_id_of_its_integer(tmp_path):
    loaded = load(tmp_path, [chunk(101.0) | {"document_id": 7.0, "source": 8.0, "evidence_family": 9.0}])
    (row,) = loaded.chunks.to_pylist()
    assert [row[name] for name in ("chunk_id", "document_id", "source", "evidence_family")] == ["101", "7", "8", "9"]


def test_text_ids_are_equal_for_equal_normalised_texts(tmp_path):
    texts = {"a": "two  words", "b": "other", "c": " two\nwords ", "d": "\uff54\uff57\uff4f words", "e": "Two words"}
    loaded = load(tmp_path, [chunk(one, text=text) for one, text in texts.items()])
    assert loaded.chunks["text_id"].to_pylist() == [0, 1, 0, 0, 2]
    assert loaded.chunks["text"].to_pylist() == list(texts.values())


def test_columns_can_be_mapped(tmp_path):
    row = {"id": 1, "body": "b", "source": "s", "document_id": "d", "position": "4", "chunk_index": "mine"}
    loaded = load(tmp_path, [row], columns={"chunk_id": "id", "text": "body", "chunk_index": "position"})
    assert loaded.chunks.select(["chunk_id", "text", "chunk_index"]).to_pylist() == [
        {"chunk_id": "1", "text": "b", "chunk_index": 4}
    ]
    assert loaded.chunks["metadata"].to_pylist() == [[]]
    assert loaded.left_out_columns == ["chunk_index"]


BAD = {
    "no id": (chunk(None), "invalid", "has no usable chunk_id: got None"),
    "a list as id": (chunk(["x"]), "invalid", "has no usable chunk_id"),
    "half a number as id": (chunk(1.5), "invalid", "chunk_id: got 1.5, want a string that is not empty, or a whole"),
    "half a number as document": (chunk("bad", document_id=1.5), "invalid", "its document_id is not usable: got 1.5"),
    "a bool as source": (chunk("bad", source=True), "invalid", "its source is not usable: got True"),
    "a bool as family": (chunk("bad", evidence_family=True), "invalid", "its evidence_family is not usable: got True"),
    "an unseen text": (chunk("bad", text="\u200b\u2060 \x01"), "empty_text", "its text is empty"),
    "too many digits": (chunk("bad", chunk_index="9" * 5000), "invalid", "its chunk_index is not usable"),
    "no JSON as acl": (chunk("bad", acl="[staff]"), "invalid", "its acl is not usable: got '[staff]'"),
    "a repeated key": (b'{"chunk_id": "a", "chunk_id": "b"}', "invalid", "not JSON: an object has a key twice"),
    "an empty text": (chunk("bad", text=" \u00a0\n"), "empty_text", "its text is empty"),
    "a null text": (chunk("bad", text=None), "empty_text", "its text is empty"),
    "a number as text": (chunk("bad", text=5), "invalid", "its text is no string: got 5"),
    "no source": (chunk("bad", source=""), "invalid", "has no source"),
    "a struct as source": (chunk("bad", source={"a": 1}), "invalid", "its source is no single value"),
    "no document": (chunk("bad", document_id=None), "invalid", "has no document_id"),
    "a negative index": (chunk("bad", chunk_index=-1), "invalid", "its chunk_index is not usable: got -1"),
    "a bool as index": (chunk("bad", chunk_index=True), "invalid", "its chunk_index is not usable: got True"),
    "a word as tier": (chunk("bad", authority_tier="high"), "invalid", "its authority_tier is not usable"),
    "a null acl": (chunk("bad", acl=None), "no_access_list", "its acl is null"),
    "a string as acl": (chunk("bad", acl="staff"), "invalid", "its acl is not usable: got 'staff'"),
    "a null in an acl": (chunk("bad", acl=["staff", None]), "invalid", "its acl is not usable"),
    "another width": (chunk("bad", embedding=[1.0, 2.0, 3.0]), "bad_vector", "another width: got 3, want 2"),
    "a NaN": (chunk("bad", embedding=[float("nan"), 1.0]), "bad_vector", "holds a NaN or an infinity"),
    "an infinity": (chunk("bad", embedding=[float("inf"), 1.0]), "bad_vector", "holds a NaN or an infinity"),
    "a zero vector": (chunk("bad", embedding=[0.0, 0.0]), "bad_vector", "its vector is zero"),
    "no vector": (chunk("bad", embedding=None), "bad_vector", "has no vector"),
    "a repeated id": (chunk("good"), "duplicate_id", "its chunk_id stands twice: got lines 1 and 2"),
    "no JSON": (b'{"chunk_id": ', "invalid", "not JSON"),
    "no UTF-8": (b'{"chunk_id": "\xff"}', "undecodable", "not UTF-8"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_chunk_is_refused_or_quarantined_by_name(tmp_path, name):
    row, reason, problem = BAD[name]
    whole = {"acl": ["all"], "embedding": [1.0, 2.0], "chunk_index": 0}
    if isinstance(row, dict):
        row = {**whole, **row}
    rows = [chunk("good", **whole), row, chunk("other", **whole)]
    chunk_id = row["chunk_id"] if isinstance(row, dict) and isinstance(row["chunk_id"], str) else None
    place = r"corpus\.jsonl, line 2" + (f", chunk {chunk_id}: " if chunk_id else ": ")
    with pytest.raises(InputError, match=place) as refused:
        load(tmp_path, rows)
    assert problem in str(refused.value)
    loaded = load(tmp_path, rows, on_bad_chunk="quarantine")
    assert loaded.chunks["chunk_id"].to_pylist() == ["good", "other"]
    (one,) = loaded.quarantined
    assert (one.chunk_id, one.line_number, one.reason) == (chunk_id, 2, reason)
    assert problem in one.detail
    if isinstance(row, dict):
        assert json.loads(one.original)["text"] == row["text"]


def test_the_first_of_a_repeated_id_is_kept_and_a_bad_first_does_not_count(tmp_path):
    rows = [chunk("a", text=""), chunk("a", text="second"), chunk("a", text="third")]
    loaded = load(tmp_path, rows, on_bad_chunk="quarantine")
    assert loaded.chunks["text"].to_pylist() == ["second"]
    assert [(one.line_number, one.reason) for one in loaded.quarantined] == [(1, "empty_text"), (3, "duplicate_id")]


def test_a_null_access_list_is_what_default_access_says(tmp_path):
    rows = [chunk("a", acl=["staff"]), chunk("b"), chunk("c", acl=[])]
    with pytest.raises(InputError, match=r"chunk b: its acl is null.*want a list of groups, or default_access"):
        load(tmp_path, rows)
    assert load(tmp_path, rows, default_access="public").chunks["acl"].to_pylist() == [["staff"], None, []]
    assert load(tmp_path, rows, default_access="deny").chunks["acl"].to_pylist() == [["staff"], [], []]


def test_without_an_acl_column_there_is_no_access_control(tmp_path):
    loaded = load(tmp_path, [chunk("a")], default_access="deny")
    assert not loaded.access_control
    assert loaded.chunks["acl"].to_pylist() == [None]


def test_faulty_vectors_do_not_matter_where_an_embedder_makes_them_anew(tmp_path):
    loaded = load(tmp_path, [chunk("a", embedding=[0.0]), chunk("b", embedding=None)], with_vectors=False)
    assert (loaded.chunks.num_rows, loaded.embeddings) == (2, None)
    assert loaded.chunks["metadata"].to_pylist() == [[], []]


@pytest.mark.parametrize("missing", ["chunk_id", "text", "source", "document_id"])
def test_a_missing_column_is_named(tmp_path, missing):
    row = {key: value for key, value in chunk().items() if key != missing}
    with pytest.raises(InputError, match=f"has no column for {missing}: got .*, want {missing}.*corpus.columns"):
        load(tmp_path, [row])
    with pytest.raises(InputError, match=r"has no column for title: got .*, want headline"):
        load(tmp_path, [chunk()], columns={"title": "headline"})


@pytest.mark.parametrize("rows", [[], [b"", b""]])
def test_a_corpus_without_chunks_is_refused(tmp_path, rows):
    with pytest.raises(InputError, match="holds no chunk"):
        load(tmp_path, rows)


def test_csv_has_access_groups_between_semicolons_or_in_json(tmp_path):
    path = tmp_path / "corpus.csv"
    path.write_text(
        "chunk_id,text,source,document_id,chunk_index,title,acl,embedding,lang\n"
        'a,"one, two",s,d,0,,"[""staff"", ""all""]","[1, 0]",en\n'
        'b,three,s,d,1,T,,"[0, 2]",\n'
        'c,four,s,d,2,,staff; all,"[2, 0]",\n'
    )  # fmt: skip
    loaded = load_corpus_file(path, CorpusParams(default_access="deny"))
    rows = loaded.chunks.to_pylist()
    assert [row["acl"] for row in rows] == [["all", "staff"], [], ["all", "staff"]]
    assert [row["title"] for row in rows] == [None, "T", None]
    assert [row["metadata"] for row in rows] == [[{"key": "lang", "value": "en"}], [], []]
    assert loaded.embeddings.tolist() == [[1, 0], [0, 2], [2, 0]]


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcd"), st.sampled_from(["one", "two", "", " one "]), st.sampled_from([None, [], ["g"]])
        ),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=60, deadline=None)
def test_every_line_is_a_chunk_or_quarantined(tmp_path_factory, given_rows):
    folder = tmp_path_factory.mktemp("corpus")
    rows = [chunk("~", acl=["g"])] + [chunk(one, text=text, acl=acl) for one, text, acl in given_rows]
    loaded = load(folder, rows, on_bad_chunk="quarantine")
    check_table(loaded.chunks, Chunk, "ingest")
    assert loaded.chunks.num_rows + len(loaded.quarantined) == len(rows)
    expected = {}
    for row in rows:
        if row["text"].strip() and row["acl"] is not None:
            expected.setdefault(row["chunk_id"], row["text"])
    assert list(zip(*loaded.chunks.select(["chunk_id", "text"]).to_pydict().values(), strict=True)) == sorted(
        expected.items()
    )


@pytest.mark.parametrize(
    "wrong", [{"columns": {"id": "x"}}, {"default_access": "all"}, {"on_bad_chunk": "skip"}, {"index_factory": ""}]
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValidationError):
        CorpusParams(**wrong)


def test_parquet_with_vectors_as_arrow_lists_is_read(tmp_path):
    table = pa.table(
        {
            "chunk_id": [2, 1], "text": ["b", "a"], "source": ["s", "s"], "document_id": ["d", "d"],
            "vector": pa.array([[0.0, 2.0], [3.0, 0.0]], pa.list_(pa.float32(), 2)),
        }
    )  # fmt: skip
    pq.write_table(table, tmp_path / "corpus.parquet")
    loaded = load_corpus_file(tmp_path / "corpus.parquet", CorpusParams(columns={"embedding": "vector"}))
    assert loaded.chunks["chunk_id"].to_pylist() == ["1", "2"]
    assert loaded.embeddings.tolist() == [[3, 0], [0, 2]]
    assert loaded.embeddings.dtype == np.float32


def test_the_bundled_corpus_is_read_whole():
    loaded = load_corpus_file(EXAMPLE, CorpusParams())
    assert loaded.chunks.num_rows == len(EXAMPLE.read_bytes().splitlines())
    assert loaded.access_control
    assert loaded.left_out_columns == []


@pytest.mark.parametrize(
    ("name", "columns", "chunks", "left_out"),
    [
        ("scifact", {}, 5183, ["sentences"]),
        ("k8s_docs", {"chunk_index": "position"}, 3192, []),
        ("xquad_en", {}, 240, []),
    ],
)
def test_real_corpora_are_read_with_a_mapping_at_most(shared_data, name, columns, chunks, left_out):
    loaded = load_corpus_file(shared_data / name / "corpus.parquet", CorpusParams(columns=columns))
    assert loaded.chunks.num_rows == chunks
    assert loaded.left_out_columns == left_out
    if name == "k8s_docs":
        assert chunks - len(set(loaded.chunks["text_id"].to_pylist())) >= 79  # the exact copies that its README counts
