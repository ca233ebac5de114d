"""A part of scifact through the command line: ingest, run, verdict complete, a TREC run that ir-measures reads."""

from __future__ import annotations

import ir_measures
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq


def test_judged_claims_run_to_a_complete_verdict_and_a_trec_file(dartflow, shared_data, tmp_path):
    scifact = shared_data / "scifact"
    qrels = list(ir_measures.read_trec_qrels(str(scifact / "qrels_test.tsv")))
    asked = sorted({judgement.query_id for judgement in qrels})[:40]
    wanted = {judgement.doc_id for judgement in qrels if judgement.query_id in asked}
    corpus = pq.read_table(scifact / "corpus.parquet")
    rows = pc.or_(
        pc.is_in(corpus["chunk_id"], value_set=pa.array(sorted(wanted))),
        pa.array([row % 25 == 0 for row in range(len(corpus))]),
    )
    pq.write_table(corpus.filter(rows), tmp_path / "corpus.parquet")
    queries = pq.read_table(scifact / "queries.parquet", columns=["query_id", "text"])
    queries = queries.filter(pc.is_in(queries["query_id"], value_set=pa.array(asked)))
    pq.write_table(queries, tmp_path / "queries.parquet")

    status, out, err = dartflow("ingest", str(tmp_path / "corpus.parquet"), "--without-prefect")
    assert status == 0, err
    assert "left out, since they hold lists or structs: sentences" in out
    words = ("--set", "blended_rerank.top_k=10", "--set", "cross_encoder.provider=none", "--without-prefect")
    status, out, err = dartflow("run", str(tmp_path / "queries.parquet"), "--run-id", "scifact", *words)
    assert status == 0, err
    assert "no access control: the corpus has no acl column" in out
    assert dartflow.json("status", "scifact")["verdict"] == "complete"

    (tmp_path / "qrels.tsv").write_text(
        "".join(f"{j.query_id} 0 {j.doc_id} {j.relevance}\n" for j in qrels if j.query_id in asked)
    )
    measured = dartflow.json("evaluate", "scifact", "--qrels", str(tmp_path / "qrels.tsv"))["rankings"]
    for stage in ("oversample", "greedy_selection", "sparse_search", "rrf_merge", "blended_rerank"):
        trec = tmp_path / f"{stage}.trec"
        assert dartflow("export", "scifact", str(trec), "--format", "trec", "--stage", stage)[0] == 0
        run = ir_measures.read_trec_run(str(trec))
        judged = ir_measures.read_trec_qrels(str(tmp_path / "qrels.tsv"))
        found = ir_measures.calc_aggregate([ir_measures.nDCG @ 10, ir_measures.R @ 5], judged, run)
        assert abs(found[ir_measures.nDCG @ 10] - measured[stage]["nDCG@10"]) < 1e-9
        assert found[ir_measures.nDCG @ 10] > 0.6
