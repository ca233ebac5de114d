"""Query logs: many lines become few distinct queries, and every line is a query or a dead letter."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from contracts.errors import ConfigurationError, InputError, ModelError
from contracts.query import DistinctQuery, LogLine
from contracts.table import check_table
from loading.query_log import QueryLogParams, embed_queries, load_query_log, query_id_of

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "queries.jsonl"


def load(tmp_path, rows, name="log.jsonl", **params):
    path = tmp_path / name
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return load_query_log(path, QueryLogParams(**params))


def reasons(log):
    return [(letter.line_number, letter.reason) for letter in log.dead_letters]


def test_equal_text_groups_and_filters_are_one_query(tmp_path):
    log = load(
        tmp_path,
        [
            {"query_id": "a", "text": "  What is\tx? ", "groups": ["staff", "all"], "filters": {"lang": "en", "v": 2}},
            {"query_id": "b", "text": "something else"},
            {"text": "What  is x?", "groups": ["all", "staff", "all"],
             "filters": [{"key": "v", "value": "2"}, {"key": "lang", "value": "en"}]},
            {"text": "What is x?"},
            {"text": "what is x?"},
        ],
    )  # fmt: skip
    identity = '["What is x?",["all","staff"],[["lang","en"],["v","2"]]]'
    first = "q-" + hashlib.sha256(identity.encode()).hexdigest()[:16]
    assert log.queries.to_pylist()[0] == {
        "query_id": first,
        "text": "  What is\tx? ",
        "normalised_text": "What is x?",
        "groups": ["all", "staff"],
        "filters": [{"key": "lang", "value": "en"}, {"key": "v", "value": "2"}],
        "occurrences": 2,
    }
    assert log.queries["normalised_text"].to_pylist()[1:] == ["something else", "What is x?", "what is x?"]
    assert log.lines["logged_id"].to_pylist() == ["a", "b", "line-3", "line-4", "line-5"]
    assert log.lines["query_id"][2].as_py() == first


def test_full_width_letters_and_their_plain_form_are_the_same_text(tmp_path):
    log = load(tmp_path, [{"text": "ERR-4102"}, {"text": "\uff25\uff32\uff32\uff0d\uff14\uff11\uff10\uff12"}])
    assert log.queries.num_rows == 1
    assert log.queries["text"].to_pylist() == ["ERR-4102"]


def test_lines_that_cannot_be_queries_are_dead_letters_with_their_original(tmp_path):
    rows = [
        {"text": ""}, {"text": " \u00a0 "}, {"text": None}, {"other": 1}, {"text": "x" * 11}, {"text": 7},
        b'{"text": "caf\xe9"}', b'{"text": ', b"", {"text": "fine"}, {"text": "x" * 10},
    ]  # fmt: skip
    log = load(tmp_path, rows, max_characters=10)
    assert reasons(log) == [
        (1, "empty"), (2, "empty"), (3, "empty"), (4, "empty"), (5, "over_long"), (6, "invalid"),
        (7, "undecodable"), (8, "invalid"), (9, "empty"),
    ]  # fmt: skip
    assert json.loads(log.dead_letters[4].original) == {"text": "x" * 11}
    assert log.dead_letters[6].original == r'{"text": "caf\xe9"}'
    assert [letter.stage for letter in log.dead_letters] == ["log_lines"] * 9
    lines = log.lines.to_pylist()
    assert [line["line_number"] for line in lines] == list(range(1, 12))
    assert [line["reason"] for line in lines[:9]] == [reason for _, reason in reasons(log)]
    assert [line["query_id"] is None for line in lines] == [True] * 9 + [False] * 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"groups": "staff"}, {"groups": [1]}, {"groups": [""]}, {"groups": {"a": 1}}, {"filters": "v=1"},
        {"filters": {"v": None}}, {"filters": {"v": ["1"]}}, {"filters": {"": "1"}}, {"filters": [{"key": "v"}]},
        {"filters": [{"key": "v", "value": "1"}, {"key": "v", "value": "2"}]}, {"filters": [["v", "1"]]},
    ],
)  # fmt: skip
def test_groups_and_filters_that_are_not_understood_never_widen_what_a_query_sees(tmp_path, wrong):
    log = load(tmp_path, [{"text": "q", **wrong}, {"text": "q", "groups": None, "filters": {}}])
    assert reasons(log) == [(1, "invalid")]
    assert log.queries.num_rows == 1


def test_a_filter_on_a_key_that_no_chunk_has_is_a_dead_letter(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"text": "q", "filters": {"lnag": "en"}}\n{"text": "q", "filters": {"lang": "en"}}\n')
    log = load_query_log(path, QueryLogParams(), filter_keys=["lang", "version"])
    assert reasons(log) == [(1, "unknown_filter")]


def test_values_of_filters_are_the_text_that_ingest_makes_of_metadata(tmp_path):
    log = load(tmp_path, [{"text": "q", "filters": {"a": True, "b": 2, "c": 0.5, "d": "x", "e": 2021.0}}])
    pairs = {pair["key"]: pair["value"] for pair in log.queries["filters"][0].as_py()}
    assert pairs == {"a": "true", "b": "2", "c": "0.5", "d": "x", "e": "2021"}


def test_csv_has_groups_between_semicolons_and_filters_in_json(tmp_path):
    (tmp_path / "log.csv").write_text(
        'query_id,question,teams,filters\n1,"what, x?",staff; all,"{""lang"": ""en""}"\n2,other,,\n3,bad,,lang=en\n'
    )
    log = load_query_log(tmp_path / "log.csv", QueryLogParams(columns={"text": "question", "groups": "teams"}))
    assert log.queries.to_pylist()[0] | {"query_id": ""} == {
        "query_id": "", "text": "what, x?", "normalised_text": "what, x?", "groups": ["all", "staff"],
        "filters": [{"key": "lang", "value": "en"}], "occurrences": 1,
    }  # fmt: skip
    assert log.lines["line_number"].to_pylist() == [2, 3, 4]
    assert reasons(log) == [(4, "invalid")]


@pytest.mark.parametrize(
    ("filters", "bad"),
    [
        ('{"a": 1, "a": 2}', True), ('{"a": "\\ud83d"}', True), ("[" * 100_000, True), ('{"a": 1, "b": 1}', False),
        ('[{"key": "a", "value": 1}, {"key": "a", "value": 2}]', True),
    ],
)  # fmt: skip
def test_filters_in_csv_name_each_key_once(tmp_path, filters, bad):
    cell = filters.replace('"', '""')
    (tmp_path / "log.csv").write_text(f'text,filters\nq,"{cell}"\n')
    assert reasons(load_query_log(tmp_path / "log.csv", QueryLogParams())) == ([(2, "invalid")] if bad else [])


@pytest.mark.parametrize(
    ("cell", "groups"),
    [
        ('["staff", "a;b"]', ["a;b", "staff"]), (" []", []), ("staff;all", ["all", "staff"]), ("[staff]", None),
        ('["staff"', None), ("[1]", None), ('["\\ud83d"]', None),
    ],
)  # fmt: skip
def test_groups_in_csv_may_be_a_list_in_json(tmp_path, cell, groups):
    quoted = cell.replace('"', '""')
    (tmp_path / "log.csv").write_text(f'text,groups\nq,"{quoted}"\n')
    log = load_query_log(tmp_path / "log.csv", QueryLogParams())
    assert (log.queries["groups"].to_pylist(), reasons(log)) == (
        ([], [(2, "invalid")]) if groups is None else ([groups], [])
    )


def test_a_logged_id_is_a_string_or_a_whole_number_or_the_line_is_a_dead_letter(tmp_path):
    ids = [101.0, 7, "x", None, "", float("nan"), 1.5, True, ["a"], {"a": 1}, float("inf")]
    log = load(tmp_path, [{"query_id": one, "text": "q"} for one in ids])
    assert log.lines["logged_id"].to_pylist() == ["101", "7", "x", *(f"line-{number}" for number in range(4, 12))]
    assert reasons(log) == [(number, "invalid") for number in range(7, 12)]


@pytest.mark.parametrize("text", ["\u200b", "\x00\x1f", " \u2060\ufeff\u00ad\t", "\u2028\u3000"])
def test_a_text_of_characters_that_nobody_sees_is_empty(tmp_path, text):
    log = load(tmp_path, [{"text": text}, {"text": text + "a"}])
    assert reasons(log) == [(1, "empty")]


def test_a_log_of_lines_without_any_column_is_dead_letters_and_not_refused(tmp_path):
    log = load(tmp_path, [{}, b"no json", {}], columns={"groups": "teams"})
    assert reasons(log) == [(1, "empty"), (2, "invalid"), (3, "empty")]
    assert log.lines.num_rows == 3


def test_tsv_is_an_id_and_a_text(tmp_path):
    log = load(tmp_path, [b"1048585\twhat is paula deen's brother", b"2"], "log.tsv")
    assert log.lines["logged_id"].to_pylist() == ["1048585", "line-2"]
    assert log.queries["text"].to_pylist() == ["what is paula deen's brother"]


def test_a_log_of_opensearch_ubi_is_read_without_a_mapping(tmp_path):
    row = {
        "application": "search", "query_id": "00112233", "client_id": "c", "user_query": "toner",
        "query_attributes": {}, "timestamp": "2026-06-01T05:59:36Z", "query_response_hit_ids": ["1"],
    }  # fmt: skip
    log = load(tmp_path, [row])
    assert log.queries["text"].to_pylist() == ["toner"]
    assert log.lines["logged_id"].to_pylist() == ["00112233"]


def test_in_parquet_a_null_field_of_a_filter_struct_is_no_filter(tmp_path):
    table = pa.table(
        {
            "text": ["a", "b", "c"],
            "filters": pa.array([{"lang": "en", "v": None}, {"lang": None, "v": 3}, None]),
            "groups": [["g"], [], None],
        }
    )
    pq.write_table(table, tmp_path / "log.parquet")
    log = load_query_log(tmp_path / "log.parquet", QueryLogParams())
    assert log.dead_letters == []
    assert log.queries["filters"].to_pylist() == [[{"key": "lang", "value": "en"}], [{"key": "v", "value": "3"}], []]
    assert log.queries["groups"].to_pylist() == [["g"], [], []]


def test_filters_may_be_an_arrow_map(tmp_path):
    filters = pa.array([[("lang", "en")], []], pa.map_(pa.string(), pa.string()))
    pq.write_table(pa.table({"text": ["a", "b"], "filters": filters}), tmp_path / "log.parquet")
    log = load_query_log(tmp_path / "log.parquet", QueryLogParams())
    assert log.queries["filters"].to_pylist() == [[{"key": "lang", "value": "en"}], []]


def test_vectors_of_the_log_go_with_the_first_line_of_a_query(tmp_path):
    rows = [
        {"text": "a", "embedding": [3.0, 4.0]},
        {"text": "b", "embedding": [0, 0]},
        {"text": "a", "embedding": [1.0, 0.0]},
        {"text": "c", "embedding": [1.0]},
        {"text": "d", "embedding": [0.0, 2.0]},
    ]
    log = load(tmp_path, rows)
    assert reasons(log) == [(2, "invalid"), (4, "invalid")]
    table = embed_queries(log.queries.slice(0, 2), log.embeddings(np.arange(0, 2)), None)
    check_table(table, DistinctQuery, "queries")
    np.testing.assert_allclose(table["embedding"].to_pylist(), [[0.6, 0.8], [0, 1]], rtol=1e-6)
    without = load_query_log(tmp_path / "log.jsonl", QueryLogParams(), with_vectors=False)
    assert (without.vectors, without.dead_letters) == (None, [])


WIDTHS = [
    {"text": "a", "embedding": [1, 0, 0]},
    {"text": "b", "embedding": [0, 2, 0]},
    {"text": "c", "embedding": [3, 4]},
]


def _with_width(tmp_path, rows, file_format, dimension):
    path = tmp_path / f"log.{file_format}"
    if file_format == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_query_log(path, QueryLogParams(), dimension=dimension)


@pytest.mark.parametrize("file_format", ["jsonl", "parquet"])
def test_vectors_of_another_width_than_the_corpus_are_dead_letters_though_most_lines_have_it(tmp_path, file_format):
    log = _with_width(tmp_path, WIDTHS, file_format, 2)
    assert reasons(log) == [(1, "invalid"), (2, "invalid")]
    np.testing.assert_allclose(log.embeddings(np.arange(1)), [[0.6, 0.8]], rtol=1e-6)
    by_majority = _with_width(tmp_path, WIDTHS, file_format, None)
    assert reasons(by_majority) == [(3, "invalid")]
    assert by_majority.embeddings(np.arange(2)).shape == (2, 3)


@pytest.mark.parametrize("file_format", ["jsonl", "parquet"])
def test_a_log_whose_vectors_all_have_another_width_than_the_corpus_is_refused(tmp_path, file_format):
    with pytest.raises(InputError, match=r"column embedding: no vector has the width of the corpus: got 2, 3, want 4"):
        _with_width(tmp_path, WIDTHS, file_format, 4)


def test_a_log_without_any_vector_is_dead_letters_whatever_the_width(tmp_path):
    log = _with_width(tmp_path, [{"text": "a", "embedding": None}, {"text": "b", "embedding": "x"}], "jsonl", 2)
    assert reasons(log) == [(1, "invalid"), (2, "invalid")]


class LengthEmbedder:
    """A vector that tells the text's length; good enough to see which text was embedded."""

    model_id = "length"
    dimension = 2

    def embed_queries(self, texts):
        return np.array([[1.0, len(text)] for text in texts], dtype=np.float32).reshape(-1, 2)


def test_an_embedder_sees_the_normalised_text(tmp_path):
    log = load(tmp_path, [{"text": "  a   b  "}])
    assert embed_queries(log.queries, None, LengthEmbedder())["embedding"].to_pylist() == [[1.0, 3.0]]


def test_queries_without_vectors_need_an_embedder(tmp_path):
    log = load(tmp_path, [{"text": "a"}])
    with pytest.raises(ConfigurationError, match="the query log has no column of embeddings"):
        embed_queries(log.queries, None, None)
    with pytest.raises(ModelError, match="NaN or an infinity"):
        embed_queries(log.queries, np.array([[np.nan]], dtype=np.float32), None)


def test_an_empty_log_is_refused_unless_it_is_allowed(tmp_path):
    with pytest.raises(InputError, match="the query log is empty"):
        load(tmp_path, [])
    log = load(tmp_path, [], allow_empty=True)
    assert (log.lines.num_rows, log.queries.num_rows, log.dead_letters) == (0, 0, [])
    for embedder in (None, LengthEmbedder()):
        check_table(embed_queries(log.queries, log.embeddings(np.arange(0, 10)), embedder), DistinctQuery, "queries")


def test_a_log_without_its_column_of_texts_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"a column is missing: got id, question, want text"):
        load(tmp_path, [{"id": 1, "question": "x"}])
    with pytest.raises(InputError, match=r"a column is missing: got text, want q\b"):
        load(tmp_path, [{"text": "x"}], columns={"text": "q"})


@pytest.mark.parametrize("wrong", [{"max_characters": 0}, {"columns": {"txt": "a"}}, {"columns": {"text": 1}}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValidationError):
        QueryLogParams(**wrong)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a b", "a  b", "\uff41 b", "", "c", "x" * 12]),
            st.lists(st.sampled_from("gh"), max_size=3),
            st.dictionaries(st.sampled_from("kl"), st.sampled_from("12"), max_size=2),
        ),
        min_size=1,
        max_size=12,
    )
)
@settings(max_examples=80, deadline=None)
def test_every_line_is_counted_once_in_a_query_or_a_dead_letter(tmp_path_factory, asked):
    rows = [{"text": text, "groups": groups, "filters": filters} for text, groups, filters in asked]
    log = load(tmp_path_factory.mktemp("log"), rows, max_characters=11)
    check_table(log.lines, LogLine, "log_lines")
    assert log.lines.num_rows == len(rows) == sum(log.queries["occurrences"].to_pylist()) + len(log.dead_letters)
    expected = []
    for text, groups, filters in asked:
        plain = " ".join(unicodedata.normalize("NFKC", text).split())
        if plain and len(text) <= 11:
            expected.append(query_id_of(plain, sorted(set(groups)), sorted(filters.items())))
    assert [one for one in log.lines["query_id"].to_pylist() if one] == expected
    assert log.queries["query_id"].to_pylist() == list(dict.fromkeys(expected))
    assert log.queries["occurrences"].to_pylist() == list(Counter(expected).values())


def test_the_bundled_log_has_its_five_bad_lines():
    log = load_query_log(EXAMPLE, QueryLogParams())
    assert reasons(log) == [(23, "empty"), (71, "empty"), (118, "over_long"), (152, "invalid"), (187, "undecodable")]
    assert log.lines.num_rows == 200
    assert log.queries.num_rows < 100


def test_real_logs_are_read_whole(shared_data):
    log = load_query_log(shared_data / "query_sets" / "msmarco_passage_dev_small.queries.parquet", QueryLogParams())
    assert (log.lines.num_rows, log.dead_letters) == (6980, [])
    assert load_query_log(shared_data / "k8s_docs" / "composite_queries.jsonl", QueryLogParams()).queries.num_rows == 32
