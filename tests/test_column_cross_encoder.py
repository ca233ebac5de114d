"""The cross-encoder `column`: scores made elsewhere, found by text, and never made up where the file has none."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from contracts.errors import ModelError, StageError
from flows.estimate import estimate
from flows.export import stage_tables
from flows.quarantine import is_fault_of_data
from loading.identity import normalised
from models.column_cross_encoder import ColumnCrossEncoder
from models.cross_encoder import CorpusTexts, model_id_of, open_cross_encoder, probabilities
from models.cross_encoder_settings import ColumnParams, CrossEncoderParams
from tests.small import planned, session_of, small_settings, small_store

TEXTS = {"c-1": "Reset it here.", "c-2": "Bananas.", "c-3": "Bananas."}
CORPUS = CorpusTexts(lambda ids: [TEXTS.get(one) for one in ids], normalised)


def written(folder, rows, name="scores.parquet"):
    pq.write_table(pa.Table.from_pylist(rows), folder / name)
    return str(folder / name)


def row(query, chunk_id, score):
    return {"query": query, "chunk_id": chunk_id, "score": score}


def encoder_over(folder, rows, **settings):
    return ColumnCrossEncoder(ColumnParams(file=written(folder, rows), **settings), CORPUS)


def test_a_pair_has_the_score_of_its_row(tmp_path):
    encoder = encoder_over(tmp_path, [row("reset", "c-1", 0.9), row("reset", "c-2", 0.1), row("eat", "c-2", 1.0)])
    found = probabilities(encoder, ["eat", "reset", "reset"], ["Bananas.", "Bananas.", "Reset it here."])
    np.testing.assert_allclose(found, [1 - 1e-9, 0.1, 0.9], atol=1e-7)
    assert encoder.score([], []).shape == (0,)


def test_logits_are_taken_as_they_are(tmp_path):
    encoder = encoder_over(tmp_path, [row("reset", "c-1", -7.5)], scores="logit")
    assert encoder.score(["reset"], ["Reset it here."]).tolist() == [-7.5]


def test_whole_numbers_and_other_kinds_of_text_will_do(tmp_path):
    table = pa.table({
        "query": pa.array(["reset"]).dictionary_encode(), "chunk_id": pa.array(["c-1"], pa.large_string()),
        "score": pa.array([1], pa.int8()), "more": [None],
    })  # fmt: skip
    pq.write_table(table, tmp_path / "scores.parquet")
    encoder = ColumnCrossEncoder(ColumnParams(file=str(tmp_path / "scores.parquet"), scores="logit"), CORPUS)
    assert encoder.score(["reset"], ["Reset it here."]).tolist() == [1.0]


def test_a_query_is_known_however_its_spaces_and_forms_were_written(tmp_path):
    encoder = encoder_over(tmp_path, [row("  \uff52eset \n it", "c-1", 0.5)])
    assert encoder.score(["reset it"], ["Reset it here."]).tolist() == [0.0]


def test_a_pair_that_the_file_lacks_is_an_error_that_says_how_many(tmp_path):
    encoder = encoder_over(tmp_path, [row("reset", "c-1", 0.9), row("reset", "gone", 0.2)])
    with pytest.raises(ModelError, match="lacks pairs that are to be ranked: got 2 of 3 without a score") as found:
        encoder.score(["reset", "reset", "eat"], ["Reset it here.", "Bananas.", "Bananas."])
    assert is_fault_of_data(found.value)
    assert "of query 'reset' and passage 'Bananas.'; 1 of its rows name chunks that the corpus" in str(found.value)


def test_chunks_with_equal_texts_share_a_row_and_may_not_differ(tmp_path):
    """A cross-encoder reads texts: one row is enough, two that agree are too, and two that differ are a mistake."""
    encoder_over(tmp_path, [row("eat", "c-3", 0.4), row("eat", "c-2", 0.4)])
    for other in (row("eat", "c-3", 0.5), row("eat ", "c-2", 0.5)):
        with pytest.raises(ModelError, match="gives two scores to one pair of texts: got query 'eat', chunk c-"):
            encoder_over(tmp_path, [row("eat", "c-2", 0.4), other])


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"query": "a", "chunk_id": "c-1"}], "cannot be read"),
        ([row("a", 7, "high")], "cannot be read"),
        ([row(None, "c-1", 0.5), row("a", "c-1", 0.5)], "has nulls"),
        ([row("a", None, 0.5), row("a", "c-1", 0.5)], "has nulls"),
        ([row("a", "c-1", None), row("a", "c-1", 0.5)], "has nulls"),
        ([row("a", "c-1", 0.5), row("b", "c-1", 1.5)], "has scores that are none: got 1.5 in row 1, 1 in all"),
        ([row("a", "c-1", -0.5)], "has scores that are none: got -0.5 in row 0"),
        ([row("a", "c-1", float("nan"))], "has scores that are none: got nan in row 0"),
    ],
)
def test_a_file_that_is_unusable_is_refused_as_a_whole(tmp_path, rows, problem):
    with pytest.raises(ModelError, match=problem):
        encoder_over(tmp_path, rows)


def test_a_file_that_is_not_there_is_named(tmp_path):
    params = CrossEncoderParams(provider="column", column=ColumnParams(file=str(tmp_path / "none.parquet")))
    for ask in (model_id_of, lambda params: open_cross_encoder(params, CORPUS)):
        with pytest.raises(ModelError, match=r"none\.parquet: cannot be read: got No such file"):
            ask(params)
    (tmp_path / "none.parquet").write_bytes(b"no parquet")
    with pytest.raises(ModelError, match="cannot be read: got ArrowInvalid"):
        open_cross_encoder(params, CORPUS)
    with pytest.raises(ValidationError, match=r"needs column\.file"):
        CrossEncoderParams(provider="column")


def test_the_id_is_that_of_the_content_and_of_what_its_scores_are(tmp_path):
    def id_of(name, **settings):
        params = CrossEncoderParams(provider="column", column=ColumnParams(file=str(tmp_path / name), **settings))
        return model_id_of(params)

    written(tmp_path, [row("a", "c-1", 0.5)], "one.parquet")
    written(tmp_path, [row("a", "c-1", 0.5)], "same.parquet")
    written(tmp_path, [row("a", "c-1", 0.25)], "other.parquet")
    assert id_of("one.parquet") == id_of("same.parquet")
    assert len({id_of("one.parquet"), id_of("other.parquet"), id_of("one.parquet", scores="logit")}) == 3


def pairs_of_small(folder):
    """Every pair of the small log and corpus, with a score of its own."""
    chunks = [json.loads(line) for line in (folder / "corpus.jsonl").read_text().splitlines()]
    queries = dict.fromkeys(json.loads(line)["text"] for line in (folder / "queries.jsonl").read_text().splitlines())
    pairs = [(query, chunk["chunk_id"]) for query in queries if query.strip() for chunk in chunks]
    return [row(query, chunk, (number * 37 % 1009) / 1009) for number, (query, chunk) in enumerate(pairs)]


def run_over(folder, rows, run_id="one", *assignments):
    store = small_store(folder)
    file = written(folder, rows)
    return store, planned(
        store, folder, run_id, "cross_encoder.provider=column", f"cross_encoder.column.file={file}", *assignments
    )


def test_a_run_ranks_by_the_scores_of_the_file(tmp_path):
    small_store(tmp_path)
    rows = pairs_of_small(tmp_path)
    store, plan = run_over(tmp_path, rows)
    assert session_of(store, plan).execute().verdict == "partial"  # the log has a bad line
    score_of = {(one["query"], one["chunk_id"]): one["score"] for one in rows}
    texts = {one["query_id"]: one["text"] for one in pa.concat_tables(stage_tables(store, plan, "queries")).to_pylist()}
    seen = 0
    for ranked in pa.concat_tables(stage_tables(store, plan, "blended_rerank")).to_pylist():
        for candidate in ranked["candidates"]:
            if candidate["cross_encoder"] is not None:
                seen += 1
                want = np.clip(score_of[texts[ranked["query_id"]], candidate["chunk_id"]], 1e-9, 1 - 1e-9)
                np.testing.assert_allclose(candidate["cross_encoder"], want, atol=1e-6)
    assert seen > 100
    assert not store.files("pair_scores"), "what a file has need not be kept again"


def test_a_query_without_its_scores_is_a_dead_letter_and_is_never_ranked_without_them(tmp_path):
    small_store(tmp_path)
    rows = [one for one in pairs_of_small(tmp_path) if "option 4" not in one["query"]]
    store, plan = run_over(tmp_path, rows)
    verdict = session_of(store, plan).execute()
    assert {stage.stage: stage.dead_letters for stage in verdict.stages}["blended_rerank"] == 1
    texts = pa.concat_tables(stage_tables(store, plan, "context"))["query_id"]
    assert len(texts) == 9


def test_a_file_for_other_queries_stops_the_run(tmp_path):
    store, plan = run_over(tmp_path, [row("something else", "c-001", 0.5)], "one", "run.dead_letter_share=0.2")
    with pytest.raises(StageError, match=r"more queries fail than the error budget allows.*lacks pairs"):
        session_of(store, plan).execute()


def test_an_estimate_needs_no_score_of_the_file(tmp_path):
    small_store(tmp_path)
    store, _ = run_over(tmp_path, pairs_of_small(tmp_path)[:1])
    file = tmp_path / "scores.parquet"
    settings = small_settings(tmp_path, "cross_encoder.provider=column", f"cross_encoder.column.file={file}")
    told = estimate(store, settings, tmp_path / "queries.jsonl")
    assert told.model_pairs.seconds_a_pair == 0


def test_a_path_means_the_same_from_everywhere(tmp_path, monkeypatch):
    small_store(tmp_path)
    written(tmp_path, pairs_of_small(tmp_path))
    monkeypatch.chdir(tmp_path)
    store = small_store(tmp_path)
    plan = planned(store, tmp_path, "one", "cross_encoder.provider=column", "cross_encoder.column.file=scores.parquet")
    monkeypatch.chdir("/")
    assert session_of(store, plan).execute().verdict == "partial"
