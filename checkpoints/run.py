"""Runs: the plan, what has been committed of it, and the verdict."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Sequence

from pydantic import ValidationError

from checkpoints.commit import manifest_path, read_manifest, stage_folder, verify_artifact
from checkpoints.digests import canonical_json
from checkpoints.lease import holder_of
from checkpoints.records import sealed, unsealed
from checkpoints.store import Store
from contracts.errors import ConfigurationError, CorruptArtifactError, DartflowError, MissingArtifactError
from contracts.manifest import DeadLetter, Manifest, RunPlan, StagePlan, StageStatus, Verdict, VerdictName

_RUN_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


def check_run_id(run_id: str) -> str:
    """A run id that is safe as a folder name.

    Raises:
        ConfigurationError: anything else; ids come from outside.
    """
    if not _is_run_id(run_id):
        raise ConfigurationError(
            "run id",
            "is not allowed",
            got=repr(run_id),
            want="lower-case letters, digits, '.', '_' and '-', at most 64",
            next_step="Choose another run id.",
        )
    return run_id


def _is_run_id(name: str) -> bool:
    return _RUN_ID.fullmatch(name) is not None and ".." not in name


def create_run(store: Store, plan: RunPlan) -> None:
    """Writes run.json, the whole planned work; a run id is used once."""
    store.create(f"runs/{check_run_id(plan.run_id)}/run.json", sealed(plan))


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
    return _opened_plan(data, run_id)


def _opened_plan(data: bytes, run_id: str) -> RunPlan:
    path, next_step = f"runs/{run_id}/run.json", "Restore the file, or start a new run."
    plan = unsealed(data, RunPlan, path, next_step=next_step)
    if plan.run_id != run_id:
        raise CorruptArtifactError(path, "belongs to another run", got=plan.run_id, want=run_id, next_step=next_step)
    return plan


def run_ids(store: Store) -> list[str]:
    """All runs, the youngest first; those whose plan is damaged last."""
    found = []
    for run_id in store.folders("runs"):
        data = store.read_if_there(f"runs/{run_id}/run.json") if _is_run_id(run_id) else None
        if data is None:
            continue
        try:
            found.append((_opened_plan(data, run_id).created_at, run_id))
        except CorruptArtifactError:
            found.append(("", run_id))
    return [run_id for _, run_id in sorted(found, reverse=True)]


def manifests(store: Store, plan: RunPlan, entry: StagePlan) -> list[Manifest | None]:
    """The manifests of a stage, one a planned part; None where nothing is committed.

    Raises:
        CorruptArtifactError: a manifest that is damaged, of another artifact, or made under another plan.
    """
    return [_planned_manifest(store, plan, entry, part) for part in range(entry.parts)]


def _planned_manifest(store: Store, plan: RunPlan, entry: StagePlan, part: int) -> Manifest | None:
    manifest = read_manifest(store, plan.run_id, entry.number, entry.stage, part)
    if manifest is not None:
        planned = json.loads(canonical_json(entry.inputs))
        other = [name for name, value in planned.items() if manifest.key_parts.get(name) != value]
        if other:
            raise CorruptArtifactError(
                manifest_path(plan.run_id, entry.number, entry.stage, part),
                "was made under another plan than the run's",
                got=f"another {', '.join(other)}",
                next_step="Start a new run under another run id; leftovers of a deleted run are not taken over.",
            )
    return manifest


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
    """Leaves a note of what stopped a run, with its traceback, until the run is resumed."""
    note = {"error": str(error), "kind": type(error).__name__, "traceback": traceback.format_exception(error)}
    store.write(_failure_path(run_id), json.dumps(note, indent=1).encode())


def _failure(store: Store, run_id: str) -> str | None:
    """What stopped the run, in words; None when nothing did."""
    data = store.read_if_there(_failure_path(run_id))
    if data is None:
        return None
    try:
        return str(json.loads(data)["error"])
    except (ValueError, KeyError, TypeError):
        return f"a failure whose note cannot be read: {_failure_path(run_id)}"


def _failure_path(run_id: str) -> str:
    return f"runs/{run_id}/failure.json"


def clear_failure(store: Store, run_id: str) -> None:
    """Removes the note of an earlier failure."""
    store.delete(_failure_path(run_id))


def write_dead_letters(store: Store, run_id: str, stage: str, letters: list[DeadLetter]) -> None:
    """Keeps the dead letters of a stage, one JSON object a line, in their order; replaces earlier ones."""
    lines = "".join(letter.model_dump_json() + "\n" for letter in letters)
    store.write(f"runs/{run_id}/dead_letters/{stage}.jsonl", lines.encode())


def read_dead_letters(store: Store, run_id: str) -> list[DeadLetter]:
    """All dead letters of a run, stage by stage.

    Raises:
        CorruptArtifactError: names the file and the line that is no dead letter.
    """
    return [letter for path in store.files(f"runs/{run_id}/dead_letters") for letter in _letters_of(store, path)]


def _letters_of(store: Store, path: str) -> list[DeadLetter]:
    letters: list[DeadLetter] = []
    data = store.read(path)
    if not data:
        return letters
    # Only \n ends a line here: an original may hold other characters that str.splitlines takes for line ends.
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n"), start=1):
        try:
            letters.append(DeadLetter.model_validate_json(line))
        except ValidationError as error:
            raise CorruptArtifactError(
                f"{path}, line {number}",
                "is no dead letter",
                got=error.errors()[0]["msg"],
                next_step="Restore the file, or rerun from the stage that wrote it.",
            ) from error
    return letters


def verdict(store: Store, plan: RunPlan) -> Verdict:
    """What is true of a run, from its plan, manifests, dead letters, failure note and lease."""
    # A file of dead letters that was lost must not make a run look complete.
    letters = max(len(read_dead_letters(store, plan.run_id)), plan.dead_letters)
    stages = [stage_status(store, plan, entry) for entry in plan.stages]
    name, because = _judged(store, plan, stages, letters)
    return Verdict(
        run_id=plan.run_id,
        verdict=name,
        because=because,
        stages=stages,
        log_lines=plan.log_lines,
        distinct_queries=plan.distinct_queries,
        dead_letters=letters,
        snapshot_id=plan.snapshot_id,
        access_control=plan.access_control,
        results=f"{store.uri.rstrip('/')}/{stage_folder(plan.run_id, plan.stages[-1].number, plan.stages[-1].stage)}",
    )


def _judged(store: Store, plan: RunPlan, stages: Sequence[StageStatus], letters: int) -> tuple[VerdictName, str | None]:
    """The verdict, and why it is not complete."""
    holder = holder_of(store, plan.run_id)
    if holder is not None:
        return "running", f"{holder[0]} is at it, last heard of {holder[1]:.0f} s ago"
    failure = _failure(store, plan.run_id)
    if failure is not None:
        return "failed", failure
    if letters > plan.dead_letters_allowed:
        return "failed", f"{letters} dead letters, {plan.dead_letters_allowed} are within the error budget"
    missing = [f"{stage.stage} ({stage.missing})" for stage in stages if stage.missing]
    if missing:
        return "interrupted", f"missing parts: {', '.join(missing)}"
    for entry, stage in zip(plan.stages, stages, strict=True):
        if entry.rows is not None and stage.rows_out != entry.rows:
            return "failed", f"{entry.stage} has {stage.rows_out} rows where {entry.rows} were planned"
    return ("partial", f"{letters} dead letters") if letters else ("complete", None)


def stage_status(store: Store, plan: RunPlan, entry: StagePlan) -> StageStatus:
    """Rows, shards and time of one stage, from its manifests."""
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
    """Reads every artifact of a run again: its manifest, its bytes, and the data in them.

    Returns:
        One (artifact, finding) a planned part, in order; the finding is `ok` or what is wrong. After
        them the dead letters, only when they are not what the plan counted.
    """
    findings = [
        (f"{entry.stage}/part-{part:05d}", _finding(store, plan, entry, part))
        for entry in plan.stages
        for part in range(entry.parts)
    ]
    problem = _dead_letter_problem(store, plan)
    return findings if problem is None else [*findings, ("dead_letters", problem)]


def _finding(store: Store, plan: RunPlan, entry: StagePlan, part: int) -> str:
    try:
        manifest = _planned_manifest(store, plan, entry, part)
        if manifest is None:
            return "not committed"
        verify_artifact(store, manifest)
    except DartflowError as error:
        return str(error)
    return "ok"


def _dead_letter_problem(store: Store, plan: RunPlan) -> str | None:
    try:
        found = len(read_dead_letters(store, plan.run_id))
    except DartflowError as error:
        return str(error)
    if found < plan.dead_letters:
        return f"runs/{plan.run_id}/dead_letters: letters are missing: got {found}, want {plan.dead_letters}"
    return None
