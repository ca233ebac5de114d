"""Evidence families on real data: `python -m bench.families DATA [--store FOLDER]`.

DATA is a folder with `k8s_docs` (corpus.parquet, queries.parquet, qrels.tsv, composite_queries.jsonl). One log of all
questions is run twice with five passages, without a plan and with config/k8s_evidence_plan.yaml. Besides the composite
questions of DATA it holds bench/family_wordings.jsonl: other wordings of the same shapes and near misses, written
before and after the plan. Results go to bench/families.json, the tables to docs/benchmarks.md; what each chosen chunk
answers was judged by hand in bench/family_judgements.jsonl.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from checkpoints.corpora import current_snapshot_id
from checkpoints.run import create_run
from checkpoints.store import Store
from contracts.manifest import RunPlan
from evaluation.measures import rank_measures
from flows.engine import Session, plain_step
from flows.evaluate import load_qrels
from flows.export import read_logged_ids, stage_tables
from flows.planning import new_run_id, plan_run
from flows.progress_bars import progress_bars
from flows.settings import load_settings, validated
from flows.snapshots import make_snapshot

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "families.json"
WORDINGS = ROOT / "bench" / "family_wordings.jsonl"
JUDGEMENTS = ROOT / "bench" / "family_judgements.jsonl"
PLAN = ROOT / "config" / "k8s_evidence_plan.yaml"
_BEGIN, _END = "<!-- written by bench.families: begin -->", "<!-- written by bench.families: end -->"
_SLOTS = 5
_RANKINGS = {
    "oversample": "dense, top 5",
    "greedy_selection": "Dartboard, top 5",
    "sparse_search": "keyword, top 5",
    "rrf_merge": "fused, top 5",
    "blended_rerank": "reranked, top 5",
}
_WORDINGS = ("before the plan", "after the plan")
_SETS = ("composite", *_WORDINGS)
Row = dict[str, Any]


def questions(data: Path) -> dict[str, list[Row]]:
    """The questions by set, each with its id, text, shape (or None) and the families that it needs."""
    composite = _lines(data / "composite_queries.jsonl")
    families = {one["shape"]: one["families"] for one in composite}
    derived = pq.read_table(data / "queries.parquet", columns=["query_id", "text"]).to_pylist()
    return {
        "composite": composite,
        **{
            label: [{**one, "families": families[one["shape"]]} for one in _lines(WORDINGS) if one["written"] == label]
            for label in _WORDINGS
        },
        "derived": [{**one, "shape": None, "families": []} for one in derived],
    }


def _lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def carried_out(store: Path, log: Path, assignments: Sequence[str]) -> tuple[Store, RunPlan]:
    """A whole run of the log over the current snapshot."""
    settings = load_settings(
        None, assignments=[f"store={store}", f"blended_rerank.top_k={_SLOTS}", *assignments], environment={}
    )
    opened = Store(settings.store)
    plan = plan_run(opened, settings, log, new_run_id(), current_snapshot_id(opened))
    create_run(opened, plan)
    with progress_bars() as report:
        verdict = Session(opened, plan, validated(plan.settings), report).execute()
    if verdict.verdict != "complete":
        raise RuntimeError(f"run {plan.run_id} is {verdict.verdict}")
    return opened, plan


def rows_of(store: Store, plan: RunPlan, stage: str) -> dict[str, Row]:
    """The rows of a stage by the ids of the log."""
    ids = read_logged_ids(store, plan)
    rows = pa.concat_tables(stage_tables(store, plan, stage)).to_pylist()
    return {logged: row for row in rows for logged in ids.answered_by(row["query_id"])}


def first_chunks(rows: Mapping[str, Row]) -> dict[str, list[str]]:
    """The first chunks of each ranking."""
    return {name: [one["chunk_id"] for one in row["candidates"][:_SLOTS]] for name, row in rows.items()}


def selected_chunks(rows: Mapping[str, Row]) -> dict[str, list[str]]:
    """The selection of each query."""
    found = {}
    for name, row in rows.items():
        taken = [(one["selected_rank"], one["chunk_id"]) for one in row["candidates"] if one["selected_rank"]]
        found[name] = [chunk for _, chunk in sorted(taken)]
    return found


def family_measures(
    chunks: Mapping[str, Sequence[str]], asked: Sequence[Row], source_of: Mapping[str, str]
) -> dict[str, float]:
    """Evidence-family recall and all-families rate over the questions that need families."""
    shares = []
    for one in asked:
        if one["families"]:
            sources = [source_of[chunk] for chunk in chunks[one["query_id"]]]
            found = [any(re.search(family["source"], source) for source in sources) for family in one["families"]]
            shares.append(float(np.mean(found)))
    return {"recall": float(np.mean(shares)), "all": float(np.mean(np.array(shares) == 1.0))}


def measured(data: Path, store: Path) -> dict[str, Any]:
    """Ingests where needed, runs the log without and with the plan, and measures both."""
    asked = questions(data)
    log = store / "families.parquet"
    store.mkdir(parents=True, exist_ok=True)
    every = [one for rows in asked.values() for one in rows]
    pq.write_table(pa.table({name: [one[name] for one in every] for name in ("query_id", "text")}), log)
    folder = store / "k8s_docs"
    with progress_bars() as report:
        settings = load_settings(None, assignments=[f"store={folder}"], environment={})
        make_snapshot(data / "corpus.parquet", settings, plain_step, report)
    runs = {
        "without": carried_out(folder, log, []),
        "with": carried_out(folder, log, [f"family_rescue.plan={PLAN}"]),
    }
    corpus = pq.read_table(data / "corpus.parquet", columns=["chunk_id", "source"]).to_pydict()
    source_of = dict(zip(corpus["chunk_id"], corpus["source"], strict=True))
    stages = {name: {stage: rows_of(*run, stage) for stage in _STAGES} for name, run in runs.items()}
    lists = {label: first_chunks(stages["without"][stage]) for stage, label in _RANKINGS.items()}
    for name in ("without", "with"):
        lists[f"selection {name} a plan"] = selected_chunks(stages[name]["blended_rerank"])
        lists[f"context {name} a plan"] = first_chunks(stages[name]["context"])
    return {
        "families": {
            label: {name: family_measures(chunks, asked[name], source_of) for name in _SETS}
            for label, chunks in lists.items()
        },
        **_recognised(asked, stages["with"]["family_rescue"]),
        "unchanged": _unchanged(asked, stages),
        "ndcg": _ndcg(data, stages, lists),
        "chosen": _chosen(asked["composite"], stages["with"]["context"]),
    }


_STAGES = (*_RANKINGS, "family_rescue", "context")


def _recognised(asked: Mapping[str, Sequence[Row]], rescued: Mapping[str, Row]) -> dict[str, Any]:
    """How many questions have the shape that they should have, and how many have one that should have none."""
    right, wrong = {}, {}
    for name, rows in asked.items():
        needing = [one for one in rows if one["shape"]]
        plain = [one for one in rows if not one["shape"]]
        hits = sum(rescued[one["query_id"]]["shape"] == one["shape"] for one in needing)
        right[name] = [hits, len(needing)]
        wrong[name] = [sum(rescued[one["query_id"]]["shape"] is not None for one in plain), len(plain)]
    return {"recognised": right, "plain_recognised": wrong}


def _unchanged(asked: Mapping[str, Sequence[Row]], stages: Mapping[str, Mapping[str, Mapping[str, Row]]]) -> list[int]:
    """How many questions that need no family have the very same context with the plan, and how many there are."""
    plain = [one["query_id"] for rows in asked.values() for one in rows if not one["shape"]]
    return [sum(stages["with"]["context"][one] == stages["without"]["context"][one] for one in plain), len(plain)]


def _ndcg(
    data: Path, stages: Mapping[str, Mapping[str, Mapping[str, Row]]], lists: Mapping[str, Mapping[str, Sequence[str]]]
) -> dict[str, float]:
    """nDCG@10 of the derived questions: of the whole reranked list, and of five passages."""
    qrels = load_qrels(data / "qrels.tsv")
    found: dict[str, Mapping[str, Sequence[str]]] = {}
    for name in ("without", "with"):
        rows = stages[name]["blended_rerank"]
        ranked = {key: [one["chunk_id"] for one in row["candidates"]] for key, row in rows.items()}
        found[f"reranked list {name} a plan"] = ranked
        found |= {f"{kind} {name} a plan": lists[f"{kind} {name} a plan"] for kind in ("selection", "context")}
    return {label: rank_measures(chunks, qrels, ["nDCG@10"])["nDCG@10"] for label, chunks in found.items()}


def _chosen(asked: Sequence[Row], contexts: Mapping[str, Row]) -> list[Row]:
    """For each required family of each question the passage of the context that serves it first."""
    chosen = []
    for one in asked:
        for family in one["families"]:
            serving = [p for p in contexts[one["query_id"]]["candidates"] if re.search(family["source"], p["source"])]
            chunk = serving[0]["chunk_id"] if serving else None
            chosen.append({"query_id": one["query_id"], "family": family["name"], "chunk_id": chunk})
    return chosen


def page_text(results: Mapping[str, Any]) -> str:
    """The generated part of the page."""
    lines = [
        "| five passages of | composite: recall | all | wordings before: recall | all | wordings after: recall | all |",
        f"|---|{'---|---|' * len(_SETS)}",
    ]
    for label, sets in results["families"].items():
        figures = (f"{sets[name][key]:.3f}" for name in _SETS for key in ("recall", "all"))
        lines.append(f"| {label} | {' | '.join(figures)} |")
    lines += ["", "| questions | have the right shape | have none, and got one |", "|---|---|---|"]
    for name in results["recognised"]:
        hits, wrong = results["recognised"][name], results["plain_recognised"][name]
        lines.append(f"| {name} | {hits[0]} of {hits[1]} | {wrong[0]} of {wrong[1]} |")
    same, plain = results["unchanged"]
    lines += ["", f"Contexts of questions without a shape that the plan leaves as they are: {same} of {plain}.", ""]
    lines += ["| nDCG@10 of the derived questions | |", "|---|---|"]
    lines += [f"| {label} | {value:.3f} |" for label, value in results["ndcg"].items()]
    return "\n".join([*lines, "", *_judged(results["chosen"])]) + "\n"


def _judged(chosen: Sequence[Row]) -> list[str]:
    """The table of what each chosen chunk answers, by hand."""
    judged = {(one["query_id"], one["family"], one["chunk_id"]): one for one in _lines(JUDGEMENTS)}
    rows, counts = [], dict.fromkeys(("yes", "partly", "no", "not judged"), 0)
    for one in chosen:
        found = judged.get((one["query_id"], one["family"], one["chunk_id"]), {"answers": "not judged", "why": ""})
        counts[found["answers"]] += 1
        chunk = "none" if one["chunk_id"] is None else f"`{one['chunk_id'].rsplit('/', 1)[-1]}`"
        rows.append(f"| {one['query_id']} | {one['family']} | {chunk} | {found['answers']} | {found['why']} |")
    total = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return [
        f"Does the passage answer its part of the question? By hand, for the {len(chosen)} families: {total}.", "",
        "| question | family | passage | answers its part | |", "|---|---|---|---|---|", *rows,
    ]  # fmt: skip


def write_page(results: Mapping[str, Any]) -> None:
    """Puts the tables between the markers of docs/benchmarks.md."""
    page = ROOT / "docs" / "benchmarks.md"
    before, rest = page.read_text(encoding="utf-8").split(_BEGIN)
    _, after = rest.split(_END)
    page.write_text(f"{before}{_BEGIN}\n{page_text(results)}{_END}{after}", encoding="utf-8")


def main() -> None:
    """Measures, or with `--page` only writes the page from what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--store", type=Path, default=Path(".dartflow/quality"))
    parser.add_argument("--page", action="store_true", help="only write the page")
    words = parser.parse_args()
    if not words.page:
        if words.data is None:
            parser.error("DATA is needed")
        results = measured(words.data / "k8s_docs", words.store)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    write_page(json.loads(RESULTS.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
