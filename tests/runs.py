"""Runs made by hand: a plan, its corpus, and its artifacts, committed without a flow or a stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from checkpoints.commit import borrow, commit
from checkpoints.corpora import save_snapshot
from checkpoints.digests import sha256
from checkpoints.manifests import manifest_path, manifests, read_manifest
from checkpoints.records import sealed
from checkpoints.run import replay_of, stage_entries, stage_names
from checkpoints.store import Store
from contracts.corpus import CorpusSnapshot, SnapshotFile
from contracts.manifest import Account, DeadLetter, Manifest, Replay, ReplayedQuery, RunPlan, StagePlan

# What the lines of the log asked, in two shards of three and two queries.
ASKED = ("q0", "q0", "q1", "q2", "q2", "q3", "q4")
LINES_OF = Counter(ASKED)
QUERIES = tuple(LINES_OF)
SHARD_SIZE = 3
# Number, name and parts of each stage; rescue searches are run once for all queries.
STAGES = ((0, "log_lines", 1), (0, "queries", 2), (1, "oversample", 2), (2, "rescue_searches", 1), (3, "context", 2))
PARTS = tuple((stage, part) for _, stage, parts in STAGES for part in range(parts))
ONCE = ("log_lines", "rescue_searches")
CORPUS_FILES = {"chunks.parquet": b"chunks" * 20, "vectors.npy": b"vectors" * 20}

# The queries that a stage takes out of a part.
Taken = Mapping[tuple[str, int], Sequence[str]]


def make_plan(run_id: str = "run-a", *, bad_lines: int = 0, **more: Any) -> RunPlan:
    """The plan of a run over the log above and `bad_lines` lines that ask nothing."""
    lines = len(ASKED) + bad_lines
    rows = {"log_lines": lines, "rescue_searches": None}
    inputs = {"lock": "abc", "params": {"sigma": 0.1, "groups": ("a", "b")}}
    stages = [
        StagePlan(
            number=number, stage=stage, parts=parts, rows=rows.get(stage, len(QUERIES)),
            inputs={"stage": stage, **inputs}, borrowed_from=None, because="a new run",
        )
        for number, stage, parts in STAGES
    ]  # fmt: skip
    given = {
        "run_id": run_id, "created_at": "2026-11-30T02:15:00+00:00", "query_log": "queries.jsonl",
        "query_log_sha256": "0" * 64, "snapshot_id": "corpus-1", "log_lines": lines,
        "distinct_queries": len(QUERIES), "dead_letters": bad_lines, "dead_letters_allowed": 4, "shards": 2,
        "shard_size": SHARD_SIZE, "allow_emptied_stages": False, "access_control": False, "stages": stages,
        "settings": {"store": "here"}, "packages": {"pyarrow": "1"}, "lock_sha256": "abc", "parent_run_id": None,
    }  # fmt: skip
    return RunPlan(**{**given, **more})


def make_replay(shard: int, from_stage: str, *letters: DeadLetter) -> Replay:
    """A shard that takes dead letters up again."""
    queries = [
        ReplayedQuery(query_id=str(letter.query_id), shard=letter.shard, log_lines=letter.log_lines)
        for letter in letters
    ]
    attempt = 1 + max(letter.attempt for letter in letters)
    return Replay(shard=shard, from_stage=from_stage, attempt=attempt, queries=queries)


def plan_with(parent: RunPlan, *replays: Replay, run_id: str = "run-b") -> RunPlan:
    """The plan of a run that borrows all that its parent has, and replays some of its dead letters."""
    names = stage_names(parent)
    stages = []
    for name in names:
        entries = stage_entries(parent, name)
        stages += [entry.model_copy(update={"borrowed_from": parent.run_id}) for entry in entries]
        mine = [replay for replay in replays if names.index(replay.from_stage) <= names.index(name)]
        if mine and name not in ONCE:
            rows = sum(len(replay.queries) for replay in mine)
            added = {"first_part": mine[0].shard, "parts": len(mine), "rows": rows}
            stages.append(entries[0].model_copy(update={"borrowed_from": None, **added}))
    update = {"run_id": run_id, "parent_run_id": parent.run_id, "stages": stages}
    return parent.model_copy(update={**update, "replays": [*parent.replays, *replays]})


def make_letter(query_id: str | None, stage: str = "oversample", shard: int = 0, **more: Any) -> DeadLetter:
    """The dead letter of a query, or of a line of the log."""
    given = {
        "run_id": "run-a", "stage": stage, "shard": shard, "reason": "ModelError: no answer", "attempt": 1,
        "line_number": None, "query_id": query_id, "log_lines": LINES_OF.get(query_id, 1), "original": '{"text": "?"}',
    }  # fmt: skip
    return DeadLetter(**{**given, **more})


def queries_of(plan: RunPlan, part: int) -> list[str]:
    """The queries of a shard."""
    replay = replay_of(plan, part)
    if replay is not None:
        return [query.query_id for query in replay.queries]
    return list(QUERIES[part * plan.shard_size : (part + 1) * plan.shard_size])


def commit_part(
    store: Store, plan: RunPlan, entry: StagePlan, part: int, taken: Taken | None = None, **more: Any
) -> Manifest:
    """Commits one part of a stage, without the queries that this stage and those before it take out of it."""
    rows, letters, left_out = _contents(plan, entry, part, taken or {})
    account = Account(
        candidates_in=3 * len(rows), added={"found": len(rows)}, removed={"cut": 2 * len(rows)},
        candidates_out=2 * len(rows),
    )  # fmt: skip
    given = {
        "table": table_of(rows, f"{entry.stage}-{part}"), "letters": letters, "left_out": len(left_out),
        "key_parts": {**entry.inputs, "part": part, "parents": {}, "left_out": left_out},
        "account": account if entry.number else None, "started_at": "now", "seconds": 0.5,
    }  # fmt: skip
    return commit(store, plan=plan, entry=entry, part=part, **{**given, **more})


def table_of(query_ids: Sequence[str | None], made_by: str) -> pa.Table:
    """One row a query; `made_by` makes tables of different parts differ."""
    return pa.table({"query_id": pa.array(query_ids, pa.string()), "made_by": [made_by] * len(query_ids)})


def _contents(
    plan: RunPlan, entry: StagePlan, part: int, taken: Taken
) -> tuple[Sequence[str | None], list[DeadLetter], list[str]]:
    """The rows of a part, its dead letters, and the queries that earlier stages took out."""
    if entry.stage == "log_lines":
        bad = range(plan.dead_letters)
        letters = [make_letter(None, "log_lines", line_number=line, reason="empty") for line in bad]
        return [*ASKED, *[None] * len(bad)], letters, []
    if entry.stage == "rescue_searches":
        return ["guides", "references"], [], []
    names, replay = stage_names(plan), replay_of(plan, part)
    before = [
        query
        for (stage, one), queries in taken.items()
        if one == part and names.index(stage) < names.index(entry.stage)
        for query in queries
    ]
    here = taken.get((entry.stage, part), ())
    more = {"run_id": plan.run_id, "attempt": 1 if replay is None else replay.attempt}
    rows = [query for query in queries_of(plan, part) if query not in {*before, *here}]
    return rows, [make_letter(query, entry.stage, part, **more) for query in here], sorted(before)


def commit_all(
    store: Store, plan: RunPlan, *, but: Sequence[tuple[str, int]] = (), taken: Taken | None = None, **more: Any
) -> None:
    """Commits everything of a run that it computes itself, but for some (stage, part)."""
    for entry in plan.stages:
        for part in entry.shards if entry.borrowed_from is None else ():
            if (entry.stage, part) not in but:
                commit_part(store, plan, entry, part, taken, **more)


def borrow_all(store: Store, parent: RunPlan, plan: RunPlan) -> None:
    """Borrows everything that a run takes from its parent."""
    for entry in plan.stages:
        if entry.borrowed_from is not None:
            for manifest in manifests(store, parent, entry):
                assert manifest is not None
                borrow(store, manifest, plan=plan, entry=entry)


def manifest_of(store: Store, plan: RunPlan, stage: str, part: int = 0) -> Manifest:
    """The manifest of a part that is committed."""
    manifest = read_manifest(store, plan, entry_of(plan, stage, part), part)
    assert manifest is not None
    return manifest


def entry_of(plan: RunPlan, stage: str, part: int = 0) -> StagePlan:
    """The entry of a stage that has a part."""
    return next(entry for entry in stage_entries(plan, stage) if part in entry.shards)


def path_of(plan: RunPlan, stage: str, part: int = 0) -> str:
    """Where the manifest of a part lies."""
    return manifest_path(plan.run_id, entry_of(plan, stage, part).number, stage, part)


def rewrite(store: Store, plan: RunPlan, stage: str, part: int = 0, **changes: Any) -> None:
    """Changes a manifest and seals it again, so that nothing but what it says is wrong."""
    manifest = manifest_of(store, plan, stage, part)
    store.write(path_of(plan, stage, part), sealed(manifest.model_copy(update=changes)))


def save_corpus(store: Store) -> None:
    """Writes the snapshot that the plans name."""
    files = [SnapshotFile(name=name, sha256=sha256(data), bytes=len(data)) for name, data in CORPUS_FILES.items()]
    snapshot = CorpusSnapshot(
        snapshot_id="corpus-1", chunks=3, documents=1, quarantined=0, dimension=2, embedding_model="none",
        access_control=False, filter_keys=[], settings={}, files=files, source_file="corpus.jsonl",
        created_at="2026-11-30T02:00:00+00:00", seconds=0.1,
    )  # fmt: skip
    save_snapshot(store, snapshot, CORPUS_FILES)
