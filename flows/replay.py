"""Replay: the plan of a run that borrows all that a run has finished, and takes its dead letters up again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from checkpoints.corpora import load_snapshot
from checkpoints.digests import canonical_json, sha256
from checkpoints.manifests import manifests
from checkpoints.run import open_letters, stage_names
from checkpoints.store import Store
from contracts.errors import ChangedRunError, StageError
from contracts.manifest import DeadLetter, Replay, ReplayedQuery, RunPlan, StagePlan
from flows.fingerprint import difference, lock_digest, package_versions
from flows.planning import allowed_dead_letters, fresh_entries, now
from flows.preflight import settings_of_run
from flows.settings import Settings
from flows.shard_inputs import passes


def plan_replay(store: Store, parent: RunPlan, settings: Settings) -> RunPlan | None:
    """The plan of a run that borrows every shard of its parent and adds shards for the dead letters.

    A query goes on from the stage that took it out, with today's code and models; what it had before is
    borrowed. The run's id is derived from what is replayed and with what, so that the same replay of the
    same run is the same run. Lines of the log that could not be read are not replayed: they need a
    corrected log, and a run of their own.

    Returns:
        The plan, or None when no query is a dead letter.

    Raises:
        StageError: the parent is not finished.
        CorruptArtifactError: a manifest or a file of dead letters that cannot be trusted.
    """
    snapshot = load_snapshot(store, parent.snapshot_id)
    settings = settings_of_run(settings, snapshot)
    _check_finished(store, parent)
    letters = [letter for letter in open_letters(store, parent) if letter.query_id is not None]
    if not letters:
        return None
    replays = _replays(parent, letters)
    fresh = {entry.stage: entry for entry in fresh_entries(parent, settings, snapshot)}
    _check_settings(parent, fresh)
    allowed = allowed_dead_letters(settings, parent.log_lines)
    stages = []
    for stage in stage_names(parent):
        stages += [
            entry.model_copy(update={"borrowed_from": parent.run_id, "because": "finished"})
            for entry in parent.stages
            if entry.stage == stage
        ]
        stages += _added(parent, fresh[stage], replays)
    inputs = {entry.stage: entry.inputs for entry in stages if entry.borrowed_from is None}
    identity = {
        "parent": parent.run_id, "replays": [one.model_dump(mode="json") for one in replays], "inputs": inputs,
        "allowed": allowed,
    }  # fmt: skip
    return parent.model_copy(
        update={
            "run_id": f"{parent.run_id[:48]}-replay-{sha256(canonical_json(identity))[:8]}",
            "created_at": now(),
            "dead_letters_allowed": allowed,
            "settings": settings.model_dump(mode="json"),
            "stages": stages,
            "replays": [*parent.replays, *replays],
            "packages": package_versions(),
            "lock_sha256": lock_digest(),
            "parent_run_id": parent.run_id,
        }
    )


def _check_settings(parent: RunPlan, fresh: Mapping[str, StagePlan]) -> None:
    """A replay brings back what the run would have given: other settings of a stage are a rerun's business."""
    for entry in parent.stages:
        changed = difference({"params": entry.inputs["params"]}, {"params": fresh[entry.stage].inputs["params"]})
        if changed is not None:
            raise ChangedRunError(
                f"run {parent.run_id}, stage {entry.stage}", "has other settings now", got=changed,
                want="those of the run", next_step=f"Use `dartflow rerun {parent.run_id}` to change settings.",
            )  # fmt: skip


def _check_finished(store: Store, parent: RunPlan) -> None:
    for entry in parent.stages:
        if None in manifests(store, parent, entry):
            raise StageError(
                f"run {parent.run_id}", "is not finished, so its dead letters are not all known", got=entry.stage,
                next_step=f"Run `dartflow resume {parent.run_id}` first, or `dartflow rerun {parent.run_id}`.",
            )  # fmt: skip


def _replays(parent: RunPlan, letters: Sequence[DeadLetter]) -> list[Replay]:
    """One shard or more for each stage that took queries out, in the order of the stages."""
    order = stage_names(parent).index
    number = max([parent.shards - 1, *(replay.shard for replay in parent.replays)])
    replays = []
    for stage, group in groupby(sorted(letters, key=lambda letter: order(letter.stage)), lambda letter: letter.stage):
        for some in _cut(list(group), parent.shard_size):
            number += 1
            queries = [
                ReplayedQuery(query_id=str(letter.query_id), shard=letter.shard, log_lines=letter.log_lines)
                for letter in some
            ]
            attempt = 1 + max(letter.attempt for letter in some)
            replays.append(Replay(shard=number, from_stage=stage, attempt=attempt, queries=queries))
    return replays


def _cut(letters: list[DeadLetter], size: int) -> Iterator[list[DeadLetter]]:
    for start in range(0, len(letters), size):
        yield letters[start : start + size]


def _added(parent: RunPlan, fresh: StagePlan, replays: Sequence[Replay]) -> list[StagePlan]:
    """The entry that a stage gets for the replayed queries which go through it; none for others."""
    mine = [replay for replay in replays if passes(parent, replay, fresh.stage)]
    if not mine:
        return []
    added = {
        "first_part": mine[0].shard,
        "parts": len(mine),
        "rows": None if fresh.rows is None else sum(len(replay.queries) for replay in mine),
        "because": "dead letters are replayed",
    }
    return [fresh.model_copy(update=added)]
