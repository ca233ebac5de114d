"""The bundled example with the real models, against answers worked out by hand (examples/README.md)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.example import CORPUS, RUN, row_of, table_of

CHUNKS = {chunk["chunk_id"]: chunk for chunk in map(json.loads, Path(CORPUS).read_text().splitlines())}

# Lines whose third family lies beyond both searches, and that family's chunks.
ONLY_RESCUE_FINDS = {
    "log-0125": ("approval", {"matrices/signatory-levels#00", "matrices/signatory-levels#01"}),
    "log-0177": ("approval", {"matrices/signatory-levels#00", "matrices/signatory-levels#01"}),
    "log-0017": ("form", {"forms/rma-7#00", "forms/rma-7#01"}),
    "log-0091": ("form", {"forms/rma-7#00", "forms/rma-7#01"}),
    "log-0079": ("form", {"forms/rma-7#00", "forms/rma-7#01"}),
}


def _candidates(store: Path, stage: str, line: str) -> dict[str, dict]:
    return {candidate["chunk_id"]: candidate for candidate in row_of(store, RUN, stage, line)["candidates"]}


@pytest.mark.parametrize("line", ONLY_RESCUE_FINDS)
def test_a_third_family_that_only_rescue_finds_is_in_the_context(example_store, line):
    family, members = ONLY_RESCUE_FINDS[line]
    assert not members & _candidates(example_store, "oversample", line).keys()
    assert not members & _candidates(example_store, "rrf_merge", line).keys()
    rescued = {chunk for chunk, one in _candidates(example_store, "family_rescue", line).items() if one["rescued"]}
    assert rescued & members
    context = row_of(example_store, RUN, "context", line)
    found = {passage["chunk_id"]: passage for passage in context["candidates"]}
    assert members & found.keys()
    assert all(found[chunk]["families"] == [family] and found[chunk]["rescued"] for chunk in members & found.keys())
    assert (context["missing"], context["evidence_family_recall"]) == ([], 1.0)
    assert len(context["required"]) == 3


def test_two_of_three_families_are_a_recall_of_two_thirds(example_store):
    # Every passage of the family `incident` is for the group `security` alone.
    public = row_of(example_store, RUN, "context", "log-0029")
    assert public["required"] == ["policy", "procedure", "incident"]
    assert (public["covered"], public["missing"]) == (["policy", "procedure"], ["incident"])
    assert round(public["evidence_family_recall"], 2) == 0.67
    assert all("public" in CHUNKS[passage["chunk_id"]]["acl"] for passage in public["candidates"])

    security = row_of(example_store, RUN, "context", "log-0074")
    assert security["text"] == public["text"]
    assert (security["missing"], security["evidence_family_recall"]) == ([], 1.0)
    assert any(passage["source"].startswith("incidents/restricted/") for passage in security["candidates"])


@pytest.mark.parametrize("line", ["log-0134", "log-0195"])
def test_a_family_takes_the_passage_of_an_allowed_tier_though_another_ranks_first(example_store, line):
    first = row_of(example_store, RUN, "sparse_search", line)["candidates"][0]
    assert first["chunk_id"] == "checklists/key-cutover-partner-draft#00"
    context = {p["chunk_id"]: p for p in row_of(example_store, RUN, "context", line)["candidates"]}
    assert context["checklists/key-cutover#00"]["families"] == ["checklist"]
    draft = context.get("checklists/key-cutover-partner-draft#00")
    assert draft is None or draft["families"] == []


def test_an_incorrect_passage_leaves_unless_it_is_the_last_one_of_a_required_family(example_store):
    graded = {row["query_id"]: row for row in table_of(example_store, RUN, "crag_grading").to_pylist()}
    left, restored = 0, 0
    for row in table_of(example_store, RUN, "context").to_pylist():
        in_context = {passage["chunk_id"]: passage for passage in row["candidates"]}
        kept = [p for p in graded[row["query_id"]]["candidates"] if p["kept"]]
        for passage in graded[row["query_id"]]["candidates"]:
            assert passage["kept"] <= (passage["grade"] != "incorrect")
            if passage["grade"] != "incorrect":
                continue
            back = in_context.get(passage["chunk_id"])
            if back is None:
                left += 1
                continue
            restored += 1
            assert back["restored"]
            (family,) = [f for f in back["families"] if f in back["restored_because"]]
            assert family in row["required"]
            assert not any(family in other["families"] for other in kept)
        assert sum(p["restored"] for p in row["candidates"]) == sum(
            p["grade"] == "incorrect" for p in row["candidates"]
        )
    assert left > 20
    assert restored >= 5


def test_the_restored_form_says_why(example_store):
    passages = row_of(example_store, RUN, "context", "log-0017")["candidates"]
    (form,) = [passage for passage in passages if passage["restored"]]
    assert form["chunk_id"] in ONLY_RESCUE_FINDS["log-0017"][1]
    assert (form["grade"], form["families"]) == ("incorrect", ["form"])
    assert form["crag_grading_score"] < 0.01
    assert "form" in form["restored_because"]
    assert "incorrect" in form["restored_because"]


def test_a_blended_score_is_the_stated_sum_of_its_parts(example_store):
    for row in table_of(example_store, RUN, "blended_rerank").to_pylist():
        assert row["rerank_status"] == "cross_encoder"
        for one in row["candidates"]:
            parts = 0.4 * (one["cross_encoder"] or 0.0) + 0.3 * one["retrieval"] + 0.3 * one["lexical"]
            assert one["score"] == pytest.approx(min(1.0, parts + one["exact_bonus"]), abs=1e-12)


def test_the_parts_of_one_passage_by_hand(example_store):
    line = "log-0065"
    assert row_of(example_store, RUN, "queries", line)["text"] == "ERR-1103"
    fused = row_of(example_store, RUN, "rrf_merge", line)
    assert fused["best_possible"] == pytest.approx(0.4 / 6 + 1 / 6)
    first = row_of(example_store, RUN, "blended_rerank", line)["candidates"][0]
    origin = _candidates(example_store, "rrf_merge", line)[first["chunk_id"]]
    by_rank = 0.4 / (5 + origin["greedy_selection_rank"]) + 1 / (5 + origin["sparse_search_rank"])
    assert first["retrieval"] == pytest.approx(by_rank / (1.4 / 6))
    # Both terms, err and 1103, and the identifier itself stand in the passage.
    assert "ERR-1103" in CHUNKS[first["chunk_id"]]["text"]
    assert (first["lexical"], first["exact_bonus"]) == (1.0, 0.1)


CITED = {
    "oversample": "oversample", "greedy_selection": "greedy_selection", "sparse_search": "sparse_search",
    "rrf_merge": "rrf_merge", "blended_rerank": "blended_rerank", "crag_grading": "crag_grading",
}  # fmt: skip


def test_every_passage_cites_its_source_span_and_every_stage(example_store):
    tables = {
        stage: {
            (row["query_id"], one["chunk_id"]): one
            for row in table_of(example_store, RUN, stage).to_pylist()
            for one in row["candidates"]
        }
        for stage in CITED
    }
    seen = dict.fromkeys(CITED, 0)
    for row in table_of(example_store, RUN, "context").to_pylist():
        for passage in row["candidates"]:
            chunk = CHUNKS[passage["chunk_id"]]
            for column in ("source", "document_id", "title", "version", "authority_tier"):
                assert passage[column] == chunk[column]
            assert passage["text"] == chunk["text"][passage["span_start"] : passage["span_end"]]
            for stage in CITED:
                found = tables[stage].get((row["query_id"], passage["chunk_id"]))
                seen[stage] += found is not None
                assert passage[f"{stage}_rank"] == (found and found["rank"])
                assert passage[f"{stage}_score"] == (found and found["score"])
    assert all(seen.values()), seen


def test_equal_texts_stand_once_in_a_context(example_store):
    for row in table_of(example_store, RUN, "context").to_pylist():
        texts = [passage["text"] for passage in row["candidates"]]
        assert len(texts) == len(set(texts))


def test_no_stage_lets_a_query_see_what_its_groups_or_filters_exclude(example_store):
    asked = {row["query_id"]: row for row in table_of(example_store, RUN, "queries").to_pylist()}
    for stage in (*CITED, "family_rescue", "context"):
        for row in table_of(example_store, RUN, stage).to_pylist():
            query = asked[row["query_id"]]
            for one in row["candidates"]:
                chunk = CHUNKS[one["chunk_id"]]
                assert set(query["groups"]) & set(chunk["acl"])
                assert all(chunk[pair["key"]] == pair["value"] for pair in query["filters"])


def test_repeated_lines_share_one_answer_and_exports_reach_every_line(dartflow, tmp_path):
    status, _, _ = dartflow("export", RUN, str(tmp_path / "out.jsonl"))
    assert status == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(rows) == 89
    lines = [line for row in rows for line in row["logged_ids"]]
    assert len(lines) == len(set(lines)) == 195
    assert max(len(row["logged_ids"]) for row in rows) == 13


def test_a_trec_export_is_read_by_ir_measures_in_our_order(dartflow, tmp_path):
    import ir_measures

    dartflow("export", RUN, str(tmp_path / "run.trec"), "--format", "trec", "--stage", "blended_rerank")
    run = list(ir_measures.read_trec_run(str(tmp_path / "run.trec")))
    ours = [c["chunk_id"] for c in row_of(dartflow.store, RUN, "blended_rerank", "log-0017")["candidates"]]
    theirs = sorted((line for line in run if line.query_id == "log-0017"), key=lambda line: -line.score)
    assert [line.doc_id for line in theirs] == ours
    qrels = list(ir_measures.read_trec_qrels(str(Path(CORPUS).with_name("qrels.tsv"))))
    found = ir_measures.calc_aggregate([ir_measures.nDCG @ 10], qrels, run)
    assert found[ir_measures.nDCG @ 10] > 0.7


def test_inspect_prints_one_query_of_one_stage(dartflow):
    assert dartflow.json("inspect", RUN, "rrf_merge", "log-0017") == row_of(
        dartflow.store, RUN, "rrf_merge", "log-0017"
    )
    status, out, _ = dartflow("inspect", RUN, "context", "log-0017")
    assert status == 0
    for passage in row_of(dartflow.store, RUN, "context", "log-0017")["candidates"]:
        assert passage["chunk_id"] in out
