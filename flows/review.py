"""Review: ambiguous passages written out for people, and their decisions taken over into a new run."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from checkpoints.decisions import keep_decisions
from checkpoints.digests import canonical_json, sha256
from checkpoints.store import Store
from contracts.errors import InputError
from contracts.manifest import RunPlan
from corpus.corpus import Corpus
from flows.decision_files import open_decisions, read_file
from flows.export import stage_tables, whole_file
from flows.planning import plan_rerun
from flows.resources import Resources
from flows.settings import load_settings, validated
from models.file_grader import Decision, form_of, read_decisions, refuse

COLUMNS = ("query_id", "query", "chunk_id", "source", "text", "score", "grade", "decision")


def write_review(store: Store, plan: RunPlan, out: Path) -> int:
    """Writes the ambiguous passages of a run to a JSONL or CSV file, with an empty `decision`; says how many.

    What matters most comes first: queries without a correct passage before those that have one, then queries
    that more log lines ask, and of a query what stays for the context before what does not, in rank order.
    What people have graded already is not asked again.

    Raises:
        InputError: another ending than .jsonl or .csv.
        ConfigurationError: a file that cannot be written.
        MissingArtifactError: a shard that was never committed.
    """
    form = form_of(str(out))
    lines = review_lines(store, plan)
    with whole_file(out) as file:
        if form == "csv":
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)
        else:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    return len(lines)


def review_lines(store: Store, plan: RunPlan) -> list[dict[str, Any]]:
    """What `write_review` writes, in its order; `text` is what a model reads of the passage."""
    asked: dict[str, tuple[str, int]] = {}
    for table in stage_tables(store, plan, "queries"):
        for row in table.select(["query_id", "text", "occurrences"]).to_pylist():
            asked[row["query_id"]] = (row["text"], row["occurrences"])
    ambiguous = [one for table in stage_tables(store, plan, "crag_grading") for one in _ambiguous(table)]
    ambiguous.sort(
        key=lambda one: (
            one["action"] == "correct", -asked[one["query_id"]][1], one["query_id"], not one["kept"], one["rank"],
        )
    )  # fmt: skip
    if not ambiguous:
        return []
    corpus: Corpus = Resources(store, validated(plan.settings), plan.snapshot_id).corpus
    rows = corpus.rows(pa.array([one["chunk_id"] for one in ambiguous], pa.string()))
    sources = corpus.column("source").take(pa.array(rows)).to_pylist()
    return [
        {
            "query_id": one["query_id"], "query": asked[one["query_id"]][0], "chunk_id": one["chunk_id"],
            "source": source, "text": text, "score": one["score"], "grade": one["grade"], "decision": "",
        }
        for one, source, text in zip(ambiguous, sources, corpus.passage_texts(rows), strict=True)
    ]  # fmt: skip


def _ambiguous(table: pa.Table) -> Iterator[dict[str, Any]]:
    """The ambiguous passages of a graded table that nobody has read, each with its query and the query's action."""
    for row in table.select(["query_id", "action", "candidates"]).to_pylist():
        for one in row["candidates"]:
            if one["grade"] == "ambiguous" and one["graded_by"] != "file":
                yield {**one, "query_id": row["query_id"], "action": row["action"]}


def plan_review(store: Store, parent: RunPlan, file: str, config: Path | None) -> RunPlan:
    """Keeps the decisions of a file in the store, and plans a run that grades with them and borrows the rest.

    Decisions that the parent was graded with stay; where the file says otherwise, it wins. The run's id is
    derived from the parent and the decisions, so that the same file imported twice is the same run.

    Args:
        store: of the parent; decisions are kept there.
        parent: the plan of the run that was reviewed.
        file: JSONL or CSV, as `write_review` writes it, with decisions filled in.
        config: a YAML file with settings that differ from the parent's; None for none.

    Raises:
        InputError: a line that is no decision, or about a passage that the parent has not graded; a file that
            decides nothing.
        MissingArtifactError: the parent has not been graded to the end.
    """
    decisions = read_decisions(read_file(file), file)
    if not decisions:
        raise InputError(
            file, "decides nothing", want="a decision in at least one line", next_step="Fill in `decision`: correct, "
            "ambiguous or incorrect.",
        )  # fmt: skip
    refuse(list(_unknown(store, parent, decisions)), file, f"passages that run {parent.run_id} has graded")
    earlier = validated(parent.settings).grader.file
    merged = dict(open_decisions(store, earlier)) if earlier is not None else {}
    merged |= {(one.query_id, one.chunk_id): one.grade for one in decisions}
    kept = keep_decisions(store, merged)
    settings = load_settings(config, assignments=[f"grader.file={kept}"], base=parent.settings)
    plan = plan_rerun(store, parent, settings, from_stage="crag_grading", run_id=parent.run_id)
    inputs = {entry.stage: entry.inputs for entry in plan.stages}
    identity = {"parent": parent.run_id, "decisions": kept, "inputs": inputs, "allowed": plan.dead_letters_allowed}
    run_id = f"{parent.run_id[:48]}-review-{sha256(canonical_json(identity))[:8]}"
    return plan.model_copy(update={"run_id": run_id})


def _unknown(store: Store, parent: RunPlan, decisions: Sequence[Decision]) -> Iterator[str]:
    """The lines that decide on what the parent has not graded."""
    query_ids = pa.array(sorted({one.query_id for one in decisions}), pa.string())
    graded: dict[str, set[str]] = {}
    for table in stage_tables(store, parent, "crag_grading"):
        found: Mapping[str, Any]
        for found in table.filter(pc.is_in(table["query_id"], value_set=query_ids)).to_pylist():
            graded[found["query_id"]] = {one["chunk_id"] for one in found["candidates"]}
    for one in decisions:
        if one.query_id not in graded:
            yield f"line {one.line}: no query {one.query_id}"
        elif one.chunk_id not in graded[one.query_id]:
            yield f"line {one.line}: no passage {one.chunk_id} of query {one.query_id}"
