"""A small corpus and query log with given vectors: a whole run of files, flows and stages in about a second."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from checkpoints.corpora import current_snapshot_id
from checkpoints.run import create_run
from checkpoints.store import Store
from contracts.manifest import RunPlan
from flows.engine import Session, plain_step
from flows.planning import plan_run
from flows.progress import no_progress
from flows.settings import Settings, load_settings, validated
from flows.snapshots import make_snapshot

TOPICS = ("backup", "network", "login", "billing")
DIMENSION = 16

PLAN = """
name: small
version: "1"
shapes:
  - name: how_and_why
    recognise: ["how .* and why"]
    families:
      - {name: guide, source: "^guide/", rescue_query: "guide steps", wanted: 1, depth: 20}
      - {name: reference, source: "^reference/", rescue_query: "reference options", wanted: 1, depth: 20}
"""


def write_small_inputs(folder: Path) -> None:
    """Writes corpus.jsonl, queries.jsonl and plan.yaml: 36 chunks; 10 distinct queries, one repeat, one bad line."""
    random = np.random.default_rng(5)
    centres = random.normal(size=(len(TOPICS), DIMENSION))
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as file:
        for number in range(36):
            topic = number % len(TOPICS)
            kind = ("guide", "reference", "note")[number % 3]
            vector = centres[topic] + 0.5 * random.normal(size=DIMENSION)
            file.write(json.dumps({
                "chunk_id": f"c-{number:03d}", "document_id": f"d-{number // 3}", "source": f"{kind}/{number}.md",
                "text": f"{TOPICS[topic]} {kind} steps and options number {number}", "embedding": vector.tolist(),
            }) + "\n")  # fmt: skip
    with (folder / "queries.jsonl").open("w", encoding="utf-8") as file:
        for number in range(10):
            topic = number % len(TOPICS)
            text = f"how to set {TOPICS[topic]} option {number}" + (" and why" if number % 3 == 0 else "")
            vector = (centres[topic] + 0.3 * random.normal(size=DIMENSION)).tolist()
            for _ in range(2 if number == 7 else 1):
                file.write(json.dumps({"query_id": f"log-{number}", "text": text, "embedding": vector}) + "\n")
        file.write(json.dumps({"query_id": "log-bad", "text": "  ", "embedding": [1.0] * DIMENSION}) + "\n")
    (folder / "plan.yaml").write_text(PLAN, encoding="utf-8")


def small_settings(folder: Path, *assignments: str) -> Settings:
    """Settings for the small inputs in a folder: given vectors, no model, three shards, no pauses before retries."""
    return load_settings(
        environment={},
        assignments=[
            f"store={folder / 'store'}", "embedder.provider=precomputed", "cross_encoder.provider=none",
            "run.shard_size=4", "run.dead_letter_share=0.5", "executor.workers=2", "executor.retry_seconds=0",
            f"family_rescue.plan={folder / 'plan.yaml'}", *assignments,
        ],
    )  # fmt: skip


def small_store(folder: Path, uri: str | None = None) -> Store:
    """A store, below the folder where no URI names another, with the small corpus ingested."""
    write_small_inputs(folder)
    uri = str(folder / "store") if uri is None else uri
    make_snapshot(folder / "corpus.jsonl", small_settings(folder, f"store={uri}"), plain_step, no_progress)
    return Store(uri)


def planned(store: Store, folder: Path, run_id: str, *assignments: str) -> RunPlan:
    """A run of the small log, planned and written down."""
    settings = small_settings(folder, *assignments)
    plan = plan_run(store, settings, folder / "queries.jsonl", run_id, current_snapshot_id(store))
    create_run(store, plan)
    return plan


def session_of(store: Store, plan: RunPlan, *assignments: str) -> Session:
    """A session that carries out a plan; assignments change execution settings."""
    return Session(
        store,
        plan,
        load_settings(environment={}, assignments=assignments, base=validated(plan.settings).model_dump(mode="json")),
    )
