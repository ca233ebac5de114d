"""Audit: each gate finds what it is for, on its own, and a run that passes has passed all of them."""

from __future__ import annotations

import unicodedata

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.commit import borrow, commit, read_table
from checkpoints.manifests import manifests
from checkpoints.run import create_run, load_plan, stage_entries, stage_manifests
from checkpoints.store import Store
from contracts.errors import ConfigurationError, InputError
from contracts.evidence import Context
from contracts.table import schema
from flows.audit import audit, context_shares
from flows.evaluate import evaluate_run, load_qrels
from flows.settings import PublishParams, load_settings
from tests.small import planned, session_of, small_store

DEFAULT_GATES = ["verdict", "verify", "lost_line_share", "duplicate_share", "empty_context_share"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A store with a finished run, one that stopped early, and one without families."""
    folder = tmp_path_factory.mktemp("audited")
    store = small_store(folder)
    session_of(store, planned(store, folder, "good")).execute()
    session_of(store, planned(store, folder, "plain", "family_rescue.plan=null")).execute()
    planned(store, folder, "waiting")
    return folder


@pytest.fixture
def store(folder):
    return Store(str(folder / "store"))


@pytest.fixture
def good(store):
    return load_plan(store, "good")


@pytest.fixture(scope="module")
def qrels(folder):
    """Judgements by which the keyword ranking is perfect and the diverse one is not."""
    path = folder / "qrels.tsv"
    store = Store(str(folder / "store"))
    plan = load_plan(store, "good")
    lines = {
        line["query_id"]: line["logged_id"] for table in tables(store, plan, "log_lines") for line in table.to_pylist()
    }
    with path.open("w") as file:
        for table in tables(store, plan, "sparse_search"):
            for row in table.to_pylist():
                for candidate in row["candidates"][:3]:
                    file.write(f"{lines[row['query_id']]} 0 {candidate['chunk_id']} {4 - candidate['rank']}\n")
    return path


def tables(store, plan, stage):
    return [read_table(store, manifest) for manifest in stage_manifests(store, plan, stage)]


def gates_of(store, plan, approved_by=None, **params):
    return {gate.gate: gate for gate in audit(store, plan, PublishParams(**params), approved_by=approved_by).gates}


def failed(store, plan, approved_by=None, **params):
    return [name for name, gate in gates_of(store, plan, approved_by, **params).items() if not gate.passed]


def changed_run(store, parent, run_id, change):
    """A run that borrows all of its parent but the contexts, whose rows are changed."""
    stages = [
        entry.model_copy(update={"borrowed_from": None if entry.stage == "context" else parent.run_id})
        for entry in parent.stages
    ]
    plan = parent.model_copy(update={"run_id": run_id, "stages": stages})
    create_run(store, plan)
    for entry in plan.stages:
        (source,) = stage_entries(parent, entry.stage)
        for manifest in manifests(store, parent, source):
            if entry.borrowed_from is not None:
                borrow(store, manifest, plan=plan, entry=entry)
                continue
            rows = [change(row) for row in read_table(store, manifest).to_pylist()]
            commit(
                store, pa.Table.from_pylist(rows, schema=schema(Context)), plan=plan, entry=entry, part=manifest.shard,
                key_parts={"changed": run_id, "part": manifest.shard}, account=manifest.account, started_at="now",
                seconds=0.1,
            )  # fmt: skip
    return plan


def test_a_good_run_passes_every_gate(store, good):
    found = audit(store, good, PublishParams(max_lost_line_share=0.1))
    assert found.passed
    assert found.verdict.verdict == "partial"
    assert [gate.gate for gate in found.gates] == DEFAULT_GATES
    values = {gate.gate: gate.value for gate in found.gates}
    assert values["verdict"] == "partial (1 dead letters)"
    assert len(set(values["verify"].split(" of "))) == 1
    assert (values["duplicate_share"], values["empty_context_share"]) == (0.0, 0.0)


def test_the_share_of_lost_lines_is_bounded(store, good):
    # 12 lines of the log: 10 queries, one of them twice, and a bad line.
    assert gates_of(store, good, max_lost_line_share=0.2)["lost_line_share"].value == 0.083333
    assert failed(store, good, max_lost_line_share=0.2) == []
    assert failed(store, good, max_lost_line_share=0.08) == ["lost_line_share"]
    assert failed(store, good, max_lost_line_share=0.0) == ["lost_line_share"]
    assert "lost_line_share" not in gates_of(store, good, max_lost_line_share=None)


def test_a_partial_run_passes_only_where_that_is_allowed(store, good):
    assert failed(store, good, max_lost_line_share=None, allow_partial=False) == ["verdict"]
    # What is not finished is not measured.
    assert list(gates_of(store, good, allow_partial=False)) == ["verdict"]


def test_a_run_that_is_not_finished_fails_and_is_not_measured(store):
    gates = gates_of(store, load_plan(store, "waiting"), max_lost_line_share=None)
    assert list(gates) == ["verdict"]
    assert gates["verdict"].value.startswith("interrupted (missing parts: log_lines (1)")
    assert gates["verdict"].want == "complete or partial"


def test_a_run_with_a_damaged_file_fails_by_its_name_and_is_not_measured(store, good):
    (manifest, *_) = stage_manifests(store, good, "rrf_merge")
    data = store.read(manifest.file)
    store.write(manifest.file, data + b"x")
    try:
        gates = gates_of(store, good)
    finally:
        store.write(manifest.file, data)
    assert list(gates) == ["verdict", "verify"]
    assert not gates["verify"].passed
    assert "; rrf_merge/part-00000: " in gates["verify"].value


def test_a_text_that_repeats_in_a_context_is_a_duplicate(store, good):
    def repeat_the_first(row):
        passages = row["candidates"]
        if len(passages) > 1:
            passages[1]["text"] = f" {passages[0]['text']}  "
        return row

    contexts = [row for table in tables(store, good, "context") for row in table.to_pylist()]
    passages = sum(len(row["candidates"]) for row in contexts)
    repeated = sum(len(row["candidates"]) > 1 for row in contexts)
    assert repeated > 0
    plan = changed_run(store, good, "repeats", repeat_the_first)
    assert failed(store, plan, max_lost_line_share=None) == ["duplicate_share"]
    assert gates_of(store, plan)["duplicate_share"].value == round(repeated / passages, 6)
    assert failed(store, plan, max_lost_line_share=None, max_duplicate_share=repeated / passages) == []
    assert failed(store, plan, max_lost_line_share=None, max_duplicate_share=None) == []


def test_a_query_without_passages_is_an_empty_context(store, good):
    emptied = []

    def empty_every_fourth(row):
        emptied.append(len(emptied) % 4 == 0)
        return {**row, "candidates": []} if emptied[-1] else row

    plan = changed_run(store, good, "empties", empty_every_fourth)
    share = sum(emptied) / len(emptied)
    assert gates_of(store, plan)["empty_context_share"].value == round(share, 6) == 0.3
    assert failed(store, plan, max_lost_line_share=None) == ["empty_context_share"]
    assert failed(store, plan, max_lost_line_share=None, max_empty_context_share=0.3) == []
    assert failed(store, plan, max_lost_line_share=None, max_empty_context_share=None) == []


def test_families_are_asked_for_only_when_wanted(store, good):
    recalls = [
        row["evidence_family_recall"]
        for table in tables(store, good, "context")
        for row in table.to_pylist()
        if row["evidence_family_recall"] is not None
    ]
    mean = sum(recalls) / len(recalls)
    rate = sum(recall == 1.0 for recall in recalls) / len(recalls)
    gates = gates_of(store, good, max_lost_line_share=None, min_family_recall=mean, min_all_families_rate=rate)
    assert (gates["evidence_family_recall"].value, gates["all_families_rate"].value) == (round(mean, 6), round(rate, 6))
    assert all(gate.passed for gate in gates.values())

    def lose_one(row):
        return {**row, "evidence_family_recall": None if row["evidence_family_recall"] is None else 0.5}

    plan = changed_run(store, good, "loses", lose_one)
    bounds = {"max_lost_line_share": None, "min_family_recall": 0.5, "min_all_families_rate": 0.1}
    assert failed(store, plan, **bounds) == ["all_families_rate"]
    assert failed(store, plan, **{**bounds, "min_family_recall": 0.51}) == [
        "evidence_family_recall", "all_families_rate",
    ]  # fmt: skip


def test_what_cannot_be_measured_has_not_passed(store):
    gates = gates_of(store, load_plan(store, "plain"), max_lost_line_share=None, min_family_recall=0.0)
    gate = gates["evidence_family_recall"]
    assert (gate.value, gate.want, gate.passed) == ("no query needs families", "at least 0", False)


def test_rankings_are_measured_as_by_evaluate(store, good, qrels):
    rankings, _ = evaluate_run(store, good, load_qrels(qrels))
    assert rankings["sparse_search"]["nDCG@10"] == pytest.approx(1.0)
    value = rankings["greedy_selection"]["nDCG@10"]
    assert value < 0.99
    given_parts = {"max_lost_line_share": None, "qrels": str(qrels), "fused_tolerance": None}
    metrics = {"greedy_selection.nDCG@10": value, "sparse_search.nDCG@10": 1.0}
    gates = gates_of(store, good, **given_parts, min_metrics=metrics)
    assert list(gates) == [*[name for name in DEFAULT_GATES if name != "lost_line_share"], *metrics]
    assert gates["greedy_selection.nDCG@10"].value == round(value, 6)
    assert all(gate.passed for gate in gates.values())
    too_much = {**metrics, "greedy_selection.nDCG@10": value + 0.01}
    assert failed(store, good, **given_parts, min_metrics=too_much) == ["greedy_selection.nDCG@10"]


def test_a_fusion_that_loses_to_its_better_input_fails(store, good, qrels):
    rankings, _ = evaluate_run(store, good, load_qrels(qrels))
    loss = 1.0 - rankings["rrf_merge"]["nDCG@10"]
    assert loss > 0.001
    given_parts = {"max_lost_line_share": None, "qrels": str(qrels)}
    assert failed(store, good, **given_parts, fused_tolerance=0.0) == ["fused_loss"]
    gate = gates_of(store, good, **given_parts, fused_tolerance=loss)["fused_loss"]
    assert gate.passed
    assert gate.value == round(loss, 6)
    assert gate.want.endswith("nDCG@10 below sparse_search")


def test_without_judgements_no_ranking_is_measured(store, good):
    assert "fused_loss" not in gates_of(store, good, fused_tolerance=0.0)


def test_a_metric_that_is_not_measured_names_the_nearest_one(store, good, qrels):
    for name in ("context.ndcg@10", "contxt.nDCG@10"):
        with pytest.raises(ConfigurationError, match=r"Did you mean 'context\.nDCG@10'\?") as caught:
            audit(store, good, PublishParams(qrels=str(qrels), min_metrics={name: 0.5}))
        assert (caught.value.where, caught.value.got) == ("setting publish.min_metrics", name)


def test_judgements_that_cannot_be_used_are_refused(store, good, tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        audit(store, good, PublishParams(qrels=str(tmp_path / "nowhere.tsv")))
    (tmp_path / "other.tsv").write_text("other 0 c-000 1\n")
    with pytest.raises(InputError, match="judge no query of the run"):
        audit(store, good, PublishParams(qrels=str(tmp_path / "other.tsv")))


@pytest.mark.parametrize(("approved_by", "passed"), [("Ann Lee", True), (None, False), ("", False)])
def test_an_approval_is_asked_for_only_when_required(store, good, approved_by, passed):
    assert "approval" not in gates_of(store, good, approved_by)
    gate = gates_of(store, good, approved_by, approval_required=True)["approval"]
    assert (gate.passed, gate.value) == (passed, approved_by or "nobody")


@pytest.mark.parametrize(
    ("assignment", "want"),
    [
        ("publish.max_duplicate_share=1.1", "less than or equal to 1"),
        ("publish.max_empty_context_share=-0.1", "greater than or equal to 0"),
        ("publish.min_metrics={context.nDCG@10: 2}", "less than or equal to 1"),
        ("publish.min_metrics={context.nDCG@10: 0.5}", "publish.qrels names none"),
        ("publish.approval_required=1", "valid boolean"),
    ],
)
def test_impossible_gates_are_refused_as_settings(assignment, want):
    with pytest.raises(ConfigurationError, match=want):
        load_settings(environment={}, assignments=[assignment])


TEXTS = st.lists(st.sampled_from(["a", "b", " a", "a  b", "a b", "ﬁ", "fi", "A", ""]), max_size=5)


@given(contexts=st.lists(TEXTS, max_size=6), cut=st.integers(0, 6))
@settings(max_examples=150, deadline=None)
def test_shares_are_those_of_a_plain_loop_however_the_contexts_are_cut_into_shards(contexts, cut):
    kind = pa.list_(pa.struct([pa.field("text", pa.string())]))
    shards = [contexts[:cut], contexts[cut:]]
    made = [pa.table({"candidates": pa.array([[{"text": t} for t in row] for row in shard], kind)}) for shard in shards]
    found = context_shares(made)

    duplicates = 0
    for texts in contexts:
        seen = set()
        for text in texts:
            same = " ".join(unicodedata.normalize("NFKC", text).split())
            duplicates += same in seen
            seen.add(same)
    passages = sum(map(len, contexts))
    assert found.duplicates == pytest.approx(duplicates / passages if passages else 0)
    assert found.empty == pytest.approx(sum(not texts for texts in contexts) / len(contexts) if contexts else 0)
