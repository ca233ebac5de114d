"""Runs: the plan, what has been committed of it, and the verdict."""

from __future__ import annotations

import json
import re

from pydantic import ValidationError

from checkpoints.commit import read_manifest, stage_folder, verified_bytes
from checkpoints.lease import holder_of
from checkpoints.store import Store
from contracts.errors import ConfigurationError, CorruptArtifactError, DartflowError, MissingArtifactError
from contracts.manifest import DeadLetter, Manifest, RunPlan, StagePlan, StageStatus, Verdict, VerdictName

_RUN_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


def check_run_id(run_id: str) -> str:
    """A run id that is safe as a folder name.

    Raises:
        ConfigurationError: anything else; ids come from outside.
    """
    if not _RUN_ID.fullmatch(run_id) or ".." in run_id:
        raise ConfigurationError(
            "run id",
            "is not allowed",
            got=repr(run_id),
            want="lower-case letters, digits, '.', '_' and '-', at most 64",
            next_step="Choose another run id.",
        )
    return run_id


def create_run(store: Store, plan: RunPlan) -> None:
    """Writes run.json, the whole planned work; a run id is used once."""
    store.create(f"runs/{check_run_id(plan.run_id)}/run.json", plan.model_dump_json(indent=1).encode())


def load_plan(store: Store, run_id: str) -> RunPlan:
    """The plan of a run.

    Raises:
        MissingArtifactError: no such run; names the runs that are there.
        CorruptArtifactError: a plan that cannot be read.
    """
    data = store.read_if_there(f"runs/{check_run_id(run_id)}/run.json")
    if data is None:
        known = ", ".join(run_ids(store)[:5]) or "no run yet"
        raise MissingArtifactError(
            f"store {store.uri}", "has no such run", got=run_id, want=known, next_step="Check --store and the run id."
        )
    try:
        return RunPlan.model_validate_json(data)
    except ValidationError as error:
        raise CorruptArtifactError(
            f"runs/{run_id}/run.json",
            "is not a run plan",
            got=error.errors()[0]["msg"],
            next_step="Restore the file, or start a new run.",
        ) from error


def run_ids(store: Store) -> list[str]:
    """All runs, the youngest first."""
    plans = []
    for run_id in store.folders("runs"):
        data = store.read_if_there(f"runs/{run_id}/run.json")
        if data is not None:
            plans.append((json.loads(data)["created_at"], run_id))
    return [run_id for _, run_id in sorted(plans, reverse=True)]


def manifests(store: Store, plan: RunPlan, entry: StagePlan) -> list[Manifest | None]:
    """The manifests of a stage, one a planned part; None where nothing is committed."""
    return [read_manifest(store, plan.run_id, entry.number, entry.stage, part) for part in range(entry.parts)]


def stage_entry(plan: RunPlan, stage: str) -> StagePlan:
    """A stage of a plan by name.

    Raises:
        ConfigurationError: names the stages that there are.
    """
    for entry in plan.stages:
        if entry.stage == stage:
            return entry
    raise ConfigurationError(
        f"run {plan.run_id}",
        "has no such stage",
        got=stage,
        want=f"one of {', '.join(entry.stage for entry in plan.stages)}",
        next_step="Correct the stage name.",
    )


def record_failure(store: Store, run_id: str, error: DartflowError) -> None:
    """Leaves a note of what stopped a run, until it is resumed."""
    store.write(f"runs/{run_id}/failure.json", json.dumps({"error": str(error), "kind": type(error).__name__}).encode())


def clear_failure(store: Store, run_id: str) -> None:
    """Removes the note of an earlier failure."""
    store.delete(f"runs/{run_id}/failure.json")


def write_dead_letters(store: Store, run_id: str, stage: str, letters: list[DeadLetter]) -> None:
    """Keeps the dead letters of a stage, one JSON object a line, in their order; replaces earlier ones."""
    lines = "".join(letter.model_dump_json() + "\n" for letter in letters)
    store.write(f"runs/{run_id}/dead_letters/{stage}.jsonl", lines.encode())


def read_dead_letters(store: Store, run_id: str) -> list[DeadLetter]:
    """All dead letters of a run, stage by stage."""
    lines = [
        line for path in store.files(f"runs/{run_id}/dead_letters") for line in store.read(path).decode().splitlines()
    ]
    return [DeadLetter.model_validate_json(line) for line in lines]


def verdict(store: Store, plan: RunPlan) -> Verdict:
    """What is true of a run, from its plan, manifests, dead letters, failure note and lease."""
    letters = len(read_dead_letters(store, plan.run_id))
    stages = [_stage_status(store, plan, entry) for entry in plan.stages]
    missing = sum(stage.missing for stage in stages)
    return Verdict(
        run_id=plan.run_id,
        verdict=_verdict_name(store, plan, missing, letters),
        stages=stages,
        log_lines=plan.log_lines,
        distinct_queries=plan.distinct_queries,
        dead_letters=letters,
        snapshot_id=plan.snapshot_id,
        access_control=plan.access_control,
        results=f"{store.uri}/{stage_folder(plan.run_id, plan.stages[-1].number, plan.stages[-1].stage)}",
    )


def _verdict_name(store: Store, plan: RunPlan, missing: int, letters: int) -> VerdictName:
    if holder_of(store, plan.run_id) is not None:
        return "running"
    if store.read_if_there(f"runs/{plan.run_id}/failure.json") is not None:
        return "failed"
    if missing:
        return "interrupted"
    if letters > plan.dead_letters_allowed:
        return "failed"
    return "partial" if letters else "complete"


def _stage_status(store: Store, plan: RunPlan, entry: StagePlan) -> StageStatus:
    found = [manifest for manifest in manifests(store, plan, entry) if manifest is not None]
    loaded = entry.stage == "log_lines"
    return StageStatus(
        stage=entry.stage,
        rows_in=plan.log_lines if loaded else plan.distinct_queries,
        rows_out=sum(manifest.rows for manifest in found),
        dead_letters=plan.dead_letters if loaded else 0,
        computed=sum(manifest.borrowed_from is None for manifest in found),
        borrowed=sum(manifest.borrowed_from is not None for manifest in found),
        missing=entry.parts - len(found),
        seconds=round(sum(manifest.seconds for manifest in found if manifest.borrowed_from is None), 3),
    )


def verify(store: Store, plan: RunPlan) -> list[tuple[str, str]]:
    """Re-reads and re-hashes every artifact of a run.

    Returns:
        One (artifact, finding) a planned part, in order; the finding is `ok` or what is wrong.
    """
    findings = []
    for entry in plan.stages:
        for part in range(entry.parts):
            name = f"{entry.stage}/part-{part:05d}"
            try:
                manifest = read_manifest(store, plan.run_id, entry.number, entry.stage, part)
                if manifest is None:
                    findings.append((name, "not committed"))
                    continue
                verified_bytes(store, manifest)
                findings.append((name, "ok"))
            except DartflowError as error:
                findings.append((name, str(error)))
    return findings
