"""Planning: the whole work of a run or a rerun, written down before any of it is done."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from checkpoints.corpora import load_snapshot
from checkpoints.digests import sha256
from checkpoints.run import stage_entries
from checkpoints.store import Store
from checkpoints.summary import read_summary
from contracts.corpus import CorpusSnapshot
from contracts.errors import ChangedRunError, InputError
from contracts.manifest import RunPlan, StagePlan
from flows.fingerprint import Facts, difference, loaded_inputs, lock_digest, package_versions, stage_inputs
from flows.preflight import check_keys, check_plan_keys, settings_of_run
from flows.resources import cross_encoder_id, embedder_id, grader_id, load_evidence_plan, plan_digest
from flows.settings import Settings
from loading.query_log import QueryLog, load_query_log
from stages.pipeline import LOADED, RUNS_ONCE, numbered_stages

_COUNTS = ("log_lines", "distinct_queries", "dead_letters")


def now() -> str:
    """The time for people, in UTC; to the millisecond, since runs are told apart by their age."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def new_run_id() -> str:
    """A run id that sorts by time: 20261130-021500-1f2e."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def plan_run(store: Store, settings: Settings, query_log: Path, run_id: str, snapshot_id: str) -> RunPlan:
    """The plan of a new run: everything is computed.

    Raises:
        InputError: the query log cannot be used.
        ConfigurationError: a setting that cannot be met (a plan file that is not there, a model width).
    """
    snapshot = load_snapshot(store, snapshot_id)
    settings = settings_of_run(settings, snapshot)
    check_keys(settings)
    digest = sha256(read_query_log_bytes(query_log))
    counts = _counted(open_query_log(query_log, settings, snapshot))
    facts = _facts(settings, snapshot, digest, counts)
    return RunPlan(
        run_id=run_id,
        created_at=now(),
        query_log=str(query_log.resolve()),
        query_log_sha256=digest,
        snapshot_id=snapshot_id,
        log_lines=counts["log_lines"],
        distinct_queries=counts["distinct_queries"],
        dead_letters=counts["dead_letters"],
        dead_letters_allowed=allowed_dead_letters(settings, counts["log_lines"]),
        shards=facts.shards,
        shard_size=even_shard_size(counts["distinct_queries"], settings.run.shard_size),
        allow_emptied_stages=settings.run.allow_emptied_stages,
        access_control=snapshot.access_control,
        stages=_entries(settings, facts, counts),
        settings=settings.model_dump(mode="json"),
        packages=package_versions(),
        lock_sha256=lock_digest(),
        parent_run_id=None,
    )


def open_query_log(path: Path, settings: Settings, snapshot: CorpusSnapshot) -> QueryLog:
    """A query log, read as a run over this snapshot reads it."""
    precomputed = settings.embedder.provider == "precomputed"
    return load_query_log(
        path,
        settings.query_log,
        filter_keys=snapshot.filter_keys,
        with_vectors=precomputed,
        dimension=snapshot.dimension,
    )


def reopen_query_log(plan: RunPlan, settings: Settings, snapshot: CorpusSnapshot) -> QueryLog:
    """The query log of a run that was planned before.

    Raises:
        InputError: the file is gone, or is not the one that was planned with.
    """
    path = Path(plan.query_log)
    got = sha256(read_query_log_bytes(path))
    if got != plan.query_log_sha256:
        raise InputError(
            str(path), "the query log has changed since the run was planned", got=f"SHA-256 {got}",
            want=plan.query_log_sha256, next_step="Restore the log, or start a new run.",
        )  # fmt: skip
    return open_query_log(path, settings, snapshot)


def read_query_log_bytes(path: Path) -> bytes:
    """The bytes of a query log.

    Raises:
        InputError: no such file.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(
            str(path), "the query log cannot be read", got=error.strerror, next_step="Check the path."
        ) from error


def plan_rerun(store: Store, parent: RunPlan, settings: Settings, *, from_stage: str | None, run_id: str) -> RunPlan:
    """The plan of a rerun: each stage is borrowed from the parent unless something it depends on has changed.

    Args:
        store: where the parent lies.
        parent: the plan of the run that is run again.
        settings: the new settings.
        from_stage: this stage and all that depend on it are computed again in any case.
        run_id: of the new run.

    Raises:
        ConfigurationError: no such stage, or a setting that cannot be met.
        InputError: the query log must be read again, and is not the one that the parent read.
    """
    if from_stage is not None:
        stage_entries(parent, from_stage)
    snapshot = load_snapshot(store, parent.snapshot_id)
    settings = settings_of_run(settings, snapshot)
    counts = _counts_of_rerun(parent, settings, snapshot)
    facts = _facts(settings, snapshot, parent.query_log_sha256, counts)
    reads = {stage.name: tuple(stage.reads) for _, stage in numbered_stages()} | dict.fromkeys(LOADED, ())
    computed: list[str] = []
    stages = []
    for entry in _entries(settings, facts, counts):
        because = next(_reasons_to_compute(store, parent, entry, from_stage, computed, reads[entry.stage]), None)
        if because is not None:
            computed.append(entry.stage)
        borrowed = {"borrowed_from": parent.run_id, "because": "nothing it depends on has changed"}
        stages.append(entry.model_copy(update=borrowed if because is None else {"because": because}))
    return parent.model_copy(
        update={
            **counts,
            "run_id": run_id,
            "created_at": now(),
            "dead_letters_allowed": allowed_dead_letters(settings, counts["log_lines"]),
            "shards": facts.shards,
            "shard_size": even_shard_size(counts["distinct_queries"], settings.run.shard_size),
            "allow_emptied_stages": settings.run.allow_emptied_stages,
            "stages": stages,
            "replays": [],
            "settings": settings.model_dump(mode="json"),
            "packages": package_versions(),
            "lock_sha256": lock_digest(),
            "parent_run_id": parent.run_id,
        }
    )


def _counts_of_rerun(parent: RunPlan, settings: Settings, snapshot: CorpusSnapshot) -> dict[str, int]:
    """The parent's counts of lines and queries, or new ones where the log is to be read in another way."""
    counts = {name: getattr(parent, name) for name in _COUNTS}
    facts = _facts(settings, snapshot, parent.query_log_sha256, counts)
    if loaded_inputs("log_lines", settings, facts) == stage_entries(parent, "log_lines")[0].inputs:
        return counts
    return _counted(reopen_query_log(parent, settings, snapshot))


def _reasons_to_compute(
    store: Store,
    parent: RunPlan,
    entry: StagePlan,
    from_stage: str | None,
    computed: Sequence[str],
    reads: Sequence[str],
) -> Iterator[str]:
    """Why a stage of a rerun must be computed, the weightiest reason first; none when the parent's artifacts serve.

    Args:
        store: where the parent lies.
        parent: its plan.
        entry: the stage as the rerun would compute it.
        from_stage: what is to be computed again in any case.
        computed: the earlier stages that are computed again.
        reads: what the stage reads.
    """
    before, *replayed = stage_entries(parent, entry.stage)
    changed = difference(before.inputs, entry.inputs)
    if changed is not None:
        yield f"changed: {changed}"
    if entry.stage == from_stage:
        yield f"asked for: --from {from_stage}"
    for name in reversed(reads):
        if name in computed:
            yield f"reads {name}, computed again"
    if replayed:
        # Its shards lack the queries that were replayed apart: the new run has them all in their shards again.
        yield f"was replayed in {parent.run_id}"
    found = read_summary(store, parent, before)
    if found.missing:
        yield f"not finished in {parent.run_id}"
    if computed and found.left_out:
        yield f"left out queries that {computed[-1]} may let pass now"


def check_unchanged(store: Store, plan: RunPlan, settings: Settings) -> Settings:
    """The settings to resume a run with, after making sure that nothing which can change a result has changed.

    Raises:
        ChangedRunError: code, lock file, models, plan or settings are not those the run was planned with.
    """
    snapshot = load_snapshot(store, plan.snapshot_id)
    settings = settings_of_run(settings, snapshot)
    fresh = {entry.stage: entry for entry in fresh_entries(plan, settings, snapshot)}
    for entry in plan.stages:
        if plan.replays and entry.borrowed_from is not None:
            continue  # a replay borrows what was computed before the fix
        changed = difference(entry.inputs, fresh[entry.stage].inputs)
        if changed is not None:
            raise ChangedRunError(
                f"run {plan.run_id}, stage {entry.stage}",
                "has changed since the run was planned",
                got=changed,
                next_step=f"Use `dartflow rerun {plan.run_id}`, which computes again what has changed.",
            )
    return settings


def _facts(settings: Settings, snapshot: CorpusSnapshot, query_log_sha256: str, counts: Mapping[str, int]) -> Facts:
    evidence_plan = load_evidence_plan(settings)
    check_plan_keys(evidence_plan, snapshot)
    return Facts(
        snapshot_id=snapshot.snapshot_id,
        cross_encoder_id=cross_encoder_id(settings),
        grader_id=grader_id(settings),
        embedder_id=embedder_id(settings, snapshot),
        plan_digest=plan_digest(evidence_plan),
        query_log_sha256=query_log_sha256,
        dimension=snapshot.dimension,
        filter_keys=snapshot.filter_keys,
        shards=shard_count(counts["distinct_queries"], settings.run.shard_size),
    )


def fresh_entries(plan: RunPlan, settings: Settings, snapshot: CorpusSnapshot) -> list[StagePlan]:
    """The stages of a run as they would be planned now: today's code, models and evidence plan, the run's log."""
    counts = {name: getattr(plan, name) for name in _COUNTS}
    return _entries(settings, _facts(settings, snapshot, plan.query_log_sha256, counts), counts)


def _entries(settings: Settings, facts: Facts, counts: Mapping[str, int]) -> list[StagePlan]:
    queries = counts["distinct_queries"]
    entries = [
        _entry(0, "log_lines", 1, counts["log_lines"], loaded_inputs("log_lines", settings, facts)),
        _entry(0, "queries", facts.shards, queries, loaded_inputs("queries", settings, facts)),
    ]
    for number, stage in numbered_stages():
        once = stage.name in RUNS_ONCE
        inputs = stage_inputs(stage, settings, facts)
        entries.append(_entry(number, stage.name, 1 if once else facts.shards, None if once else queries, inputs))
    return entries


def _entry(number: int, stage: str, parts: int, rows: int | None, inputs: dict[str, Any]) -> StagePlan:
    return StagePlan(
        number=number, stage=stage, parts=parts, rows=rows, inputs=inputs, borrowed_from=None, because="a new run"
    )


def _counted(log: QueryLog) -> dict[str, int]:
    return {
        "log_lines": log.lines.num_rows,
        "distinct_queries": log.queries.num_rows,
        "dead_letters": len(log.dead_letters),
    }


def shard_count(queries: int, most: int) -> int:
    """As few shards of at most `most` queries as there can be; an empty log makes an empty one, not a silent none."""
    return max(1, -(-queries // most))


def even_shard_size(queries: int, most: int) -> int:
    """How many queries each of `shard_count` shards has, as equal as can be.

    1,109 queries make two shards of 555 and 554, not of 1,024 and 85, for which one worker would wait.
    """
    return -(-queries // shard_count(queries, most)) or most


def allowed_dead_letters(settings: Settings, log_lines: int) -> int:
    """How many log lines the error budget lets dead letters take out."""
    by_share = int(settings.run.dead_letter_share * log_lines)
    by_count = settings.run.dead_letter_count
    return by_share if by_count is None else min(by_share, by_count)
