"""Verify: reads and hashes again everything that a run stands on, and tells artifact by artifact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from checkpoints.commit import read_table, verify_artifact
from checkpoints.corpora import load_snapshot, snapshot_folder
from checkpoints.digests import sha256
from checkpoints.manifests import manifests, read_manifest
from checkpoints.run import open_letters, stage_entries, stage_manifests, stage_names
from checkpoints.store import Store
from checkpoints.summary import summary_of
from checkpoints.verdict import Found, account_problems, lost_log_lines
from contracts.errors import DartflowError
from contracts.manifest import RunPlan, StagePlan


def verify(store: Store, plan: RunPlan) -> list[tuple[str, str]]:
    """Reads everything of a run again: the files of its snapshot, its manifests, tables and dead letters.

    Returns:
        One (artifact, finding) a file of the snapshot and a planned part, in order; the finding is `ok` or
        what is wrong. When all are `ok`, the accounts follow: queries, candidates and log lines, end to end.
    """
    findings = [*_snapshot_findings(store, plan.snapshot_id)]
    for entry in plan.stages:
        findings += [(f"{entry.stage}/part-{part:05d}", _finding(store, plan, entry, part)) for part in entry.shards]
    if all(finding == "ok" for _, finding in findings):
        found = _found(store, plan)
        problems = account_problems(plan, found) or list(_line_problems(store, plan, found))
        findings.append(("accounts", problems[0] if problems else "ok"))
    return findings


def _snapshot_findings(store: Store, snapshot_id: str) -> Iterator[tuple[str, str]]:
    try:
        snapshot = load_snapshot(store, snapshot_id)
    except DartflowError as error:
        yield snapshot_id, str(error)
        return
    for file in snapshot.files:
        name = f"{snapshot_id}/{file.name}"
        try:
            got = sha256(store.read(f"{snapshot_folder(snapshot_id)}/{file.name}"))
        except DartflowError as error:
            yield name, str(error)
            continue
        yield name, "ok" if got == file.sha256 else f"is not what was written: got SHA-256 {got}, want {file.sha256}"


def _finding(store: Store, plan: RunPlan, entry: StagePlan, part: int) -> str:
    try:
        manifest = read_manifest(store, plan, entry, part)
        if manifest is None:
            return "not committed"
        verify_artifact(store, manifest)
    except DartflowError as error:
        return str(error)
    return "ok"


def _found(store: Store, plan: RunPlan) -> Found:
    """What the manifests themselves say, whatever summary is kept beside them."""
    return {
        stage: [summary_of(plan, entry, manifests(store, plan, entry)) for entry in stage_entries(plan, stage)]
        for stage in stage_names(plan)
    }


def _line_problems(store: Store, plan: RunPlan, found: Found) -> Iterator[str]:
    """Every line of the log is answered, or a dead letter, or waits for a query that is one."""
    lines: Counter[str | None] = Counter()
    for manifest in stage_manifests(store, plan, "log_lines"):
        lines.update(read_table(store, manifest).column("query_id").to_pylist())
    answered: set[str] = set()
    for manifest in stage_manifests(store, plan, plan.stages[-1].stage):
        answered |= set(read_table(store, manifest).column("query_id").to_pylist())
    lost = {letter.query_id for letter in open_letters(store, plan) if letter.query_id is not None}
    bad = lines.pop(None, 0)
    if bad != plan.dead_letters:
        yield f"{bad} lines of the log are dead letters, {plan.dead_letters} were planned"
    asked = {query_id for query_id in lines if query_id is not None}
    for query_id in sorted(asked - answered - lost):
        yield f"query {query_id} of the log is neither answered nor a dead letter"
    for query_id in sorted((answered & lost) | (answered - asked)):
        yield f"query {query_id} is answered, but is a dead letter or no query of the log"
    unanswered, told = bad + sum(lines[query_id] for query_id in lost), lost_log_lines(plan, found)
    if unanswered != told:
        yield f"{unanswered} lines of the log have no answer, but the dead letters tell of {told}"
