"""Planning: the whole work of a run or a rerun, written down before any of it is done."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from checkpoints.commit import read_manifest
from checkpoints.corpora import load_snapshot
from checkpoints.digests import sha256
from checkpoints.run import stage_entry
from checkpoints.store import Store
from contracts.corpus import CorpusSnapshot
from contracts.errors import ChangedRunError, InputError
from contracts.manifest import RunPlan, StagePlan
from flows.fingerprint import Facts, difference, loaded_inputs, lock_digest, package_versions, stage_inputs
from flows.resources import cross_encoder_id, embedder_id, plan_digest
from flows.settings import Settings, validated
from loading.query_log import QueryLog, load_query_log
from stages.pipeline import LOADED, RUNS_ONCE, numbered_stages


def now() -> str:
    """The time for people, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


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
    data = read_query_log_bytes(query_log)
    log = open_query_log(query_log, settings, snapshot)
    shards = _shards(log.queries.num_rows, settings)
    facts = Facts(
        snapshot_id=snapshot_id,
        cross_encoder_id=cross_encoder_id(settings),
        embedder_id=embedder_id(settings, snapshot),
        plan_digest=plan_digest(settings),
        query_log_sha256=sha256(data),
        filter_keys=snapshot.filter_keys,
        shards=shards,
    )
    return RunPlan(
        run_id=run_id,
        created_at=now(),
        query_log=str(query_log.resolve()),
        query_log_sha256=facts.query_log_sha256,
        snapshot_id=snapshot_id,
        log_lines=log.lines.num_rows,
        distinct_queries=log.queries.num_rows,
        dead_letters=len(log.dead_letters),
        dead_letters_allowed=_allowed(settings, log),
        shards=shards,
        access_control=snapshot.access_control,
        stages=_entries(settings, facts),
        settings=settings.model_dump(mode="json"),
        packages=package_versions(),
        lock_sha256=lock_digest(),
        parent_run_id=None,
    )


def open_query_log(path: Path, settings: Settings, snapshot: CorpusSnapshot) -> QueryLog:
    """A query log, read as a run over this snapshot reads it."""
    precomputed = settings.embedder.provider == "precomputed"
    return load_query_log(path, settings.query_log, filter_keys=snapshot.filter_keys, with_vectors=precomputed)


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
        ConfigurationError: no such stage.
    """
    if from_stage is not None:
        stage_entry(parent, from_stage)
    shards = _shards(parent.distinct_queries, settings)
    facts = replace(_facts(store, settings, parent), shards=shards)
    reads = {stage.name: stage.reads for _, stage in numbered_stages()} | dict.fromkeys(LOADED, ())
    fresh = _entries(settings, facts)
    computed: set[str] = set()
    stages = []
    for entry in fresh:
        because = _why_computed(store, parent, entry, from_stage, [r for r in reads[entry.stage] if r in computed])
        if because is not None:
            computed.add(entry.stage)
        borrowed = {"borrowed_from": parent.run_id, "because": "nothing it depends on has changed"}
        stages.append(entry.model_copy(update=borrowed if because is None else {"because": because}))
    return parent.model_copy(
        update={
            "run_id": run_id,
            "created_at": now(),
            "shards": shards,
            "stages": stages,
            "settings": settings.model_dump(mode="json"),
            "packages": package_versions(),
            "lock_sha256": lock_digest(),
            "parent_run_id": parent.run_id,
        }
    )


def _why_computed(
    store: Store, parent: RunPlan, entry: StagePlan, from_stage: str | None, changed_reads: Sequence[str]
) -> str | None:
    """Why a stage of a rerun must be computed, or None when the parent's artifacts serve."""
    before = stage_entry(parent, entry.stage)
    changed = difference(before.inputs, entry.inputs)
    if changed is not None:
        return f"changed: {changed}"
    if entry.stage == from_stage:
        return f"asked for: --from {from_stage}"
    if changed_reads:
        return f"reads {changed_reads[-1]}, computed again"
    for part in range(before.parts):
        if read_manifest(store, parent.run_id, before.number, before.stage, part) is None:
            return f"not finished in {parent.run_id}"
    return None


def check_unchanged(store: Store, plan: RunPlan) -> Settings:
    """The settings of a run that is to be resumed, after making sure that nothing else has changed.

    Raises:
        ChangedRunError: code, lock file, models or plan are not those the run was planned with.
    """
    settings = validated(plan.settings)
    fresh = {entry.stage: entry for entry in _entries(settings, _facts(store, settings, plan))}
    for entry in plan.stages:
        changed = difference(entry.inputs, fresh[entry.stage].inputs)
        if changed is not None:
            raise ChangedRunError(
                f"run {plan.run_id}, stage {entry.stage}",
                "has changed since the run was planned",
                got=changed,
                next_step=f"Use `dartflow rerun {plan.run_id}`, which computes again what has changed.",
            )
    return settings


def _facts(store: Store, settings: Settings, plan: RunPlan) -> Facts:
    snapshot = load_snapshot(store, plan.snapshot_id)
    return Facts(
        snapshot_id=plan.snapshot_id,
        cross_encoder_id=cross_encoder_id(settings),
        embedder_id=embedder_id(settings, snapshot),
        plan_digest=plan_digest(settings),
        query_log_sha256=plan.query_log_sha256,
        filter_keys=snapshot.filter_keys,
        shards=plan.shards,
    )


def _entries(settings: Settings, facts: Facts) -> list[StagePlan]:
    entries = [
        _entry(0, name, 1 if name == "log_lines" else facts.shards, loaded_inputs(name, settings, facts))
        for name in LOADED
    ]
    for number, stage in numbered_stages():
        parts = 1 if stage.name in RUNS_ONCE else facts.shards
        entries.append(_entry(number, stage.name, parts, stage_inputs(stage, settings, facts)))
    return entries


def _entry(number: int, stage: str, parts: int, inputs: dict[str, Any]) -> StagePlan:
    return StagePlan(number=number, stage=stage, parts=parts, inputs=inputs, borrowed_from=None, because="a new run")


def _shards(queries: int, settings: Settings) -> int:
    """How many shards; an empty log makes one empty shard, so that nothing is complete by silence."""
    return max(1, -(-queries // settings.run.shard_size))


def _allowed(settings: Settings, log: QueryLog) -> int:
    """How many dead letters the error budget allows."""
    by_share = int(settings.run.dead_letter_share * log.lines.num_rows)
    by_count = settings.run.dead_letter_count
    return by_share if by_count is None else min(by_share, by_count)
