"""Runs: the plan, its parts, and the note of what stopped it."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterator

from checkpoints.dead_letters import letters_of, replayed_queries
from checkpoints.manifests import manifests
from checkpoints.records import sealed, unsealed
from checkpoints.store import Store
from contracts.errors import (
    CheckpointError,
    ConfigurationError,
    CorruptArtifactError,
    DartflowError,
    MissingArtifactError,
)
from contracts.manifest import DeadLetter, Manifest, Replay, RunPlan, StagePlan

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


def create_or_load(store: Store, plan: RunPlan) -> RunPlan:
    """Creates a run whose id is made of its work, or loads the one of this id: the same work was planned before.

    Raises:
        MissingArtifactError: it is neither there nor could be written; or as `load_plan`.
    """
    try:
        create_run(store, plan)
    except CheckpointError:
        return load_plan(store, plan.run_id)
    return plan


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


def stage_entries(plan: RunPlan, stage: str) -> list[StagePlan]:
    """The entries of a stage in a plan: its shards, and after them those of each replay.

    Raises:
        ConfigurationError: names the stages that there are.
    """
    found = [entry for entry in plan.stages if entry.stage == stage]
    if not found:
        raise ConfigurationError(
            f"run {plan.run_id}",
            "has no such stage",
            got=stage,
            want=f"one of {', '.join(stage_names(plan))}",
            next_step="Correct the stage name.",
        )
    return found


def stage_names(plan: RunPlan) -> list[str]:
    """The stages of a plan in their order, each once."""
    return list(dict.fromkeys(entry.stage for entry in plan.stages))


def replay_of(plan: RunPlan, part: int) -> Replay | None:
    """The replay that a shard carries out; None for a shard of the first pass."""
    return next((replay for replay in plan.replays if replay.shard == part), None)


def planned_rows(plan: RunPlan, entry: StagePlan, part: int) -> int | None:
    """How many queries (of `log_lines`, lines) one part is planned for; None where only the stage can know."""
    replay = replay_of(plan, part)
    if entry.rows is None or entry.parts == 1:
        return entry.rows
    if replay is not None:
        return len(replay.queries)
    return max(0, min(plan.shard_size, entry.rows - part * plan.shard_size))


def stage_manifests(store: Store, plan: RunPlan, stage: str) -> Iterator[Manifest]:
    """The manifests of all parts of a stage, in order.

    Raises:
        ConfigurationError: no such stage.
        MissingArtifactError: a part that was never committed.
        CorruptArtifactError: as `checkpoints.manifests.read_manifest`.
    """
    for entry in stage_entries(plan, stage):
        for part, manifest in zip(entry.shards, manifests(store, plan, entry), strict=True):
            if manifest is None:
                raise MissingArtifactError(
                    f"run {plan.run_id}, stage {stage}",
                    "is not finished",
                    got=f"no part {part}",
                    next_step=f"Run `dartflow resume {plan.run_id}`.",
                )
            yield manifest


def open_letters(store: Store, plan: RunPlan) -> list[DeadLetter]:
    """The dead letters of a run that no replay has taken up, in the order of stages, parts and queries.

    Raises:
        CorruptArtifactError: a file of dead letters that is not what was committed.
    """
    replayed = replayed_queries(plan)
    return [
        letter
        for entry in plan.stages
        for manifest in manifests(store, plan, entry)
        if manifest is not None
        for letter in letters_of(store, manifest)
        if (letter.stage, letter.shard, letter.query_id) not in replayed
    ]


def record_failure(store: Store, run_id: str, error: DartflowError) -> None:
    """Leaves a note of what stopped a run, with its traceback, until the run is resumed."""
    note = {"error": str(error), "kind": type(error).__name__, "traceback": traceback.format_exception(error)}
    store.write(_failure_path(run_id), json.dumps(note, indent=1).encode())


def failure_of(store: Store, run_id: str) -> str | None:
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
