"""Manifests: where the commit records of a run lie, and what of them can be trusted; no table is opened here."""

from __future__ import annotations

from checkpoints.digests import key_of, sha256
from checkpoints.records import unsealed
from checkpoints.store import Store
from contracts.errors import CorruptArtifactError
from contracts.manifest import Manifest, RunPlan, StagePlan

_NEXT_STEP = "Run `dartflow verify RUN`, then rerun from the stage that wrote it."


def stage_folder(run_id: str, number: int, stage: str) -> str:
    """Where the artifacts of a stage of a run lie."""
    return f"runs/{run_id}/{number:02d}-{stage}"


def manifest_path(run_id: str, number: int, stage: str, shard: int) -> str:
    """Where the manifest of one artifact lies."""
    return f"{stage_folder(run_id, number, stage)}/part-{shard:05d}.json"


def run_digest(plan: RunPlan) -> str:
    """The digest of the run's plan, which every manifest of the run carries.

    Fields at their defaults take no part, so that a field which a later version adds changes no digest.
    """
    return sha256(plan.model_dump_json(exclude_defaults=True).encode())[:32]


def read_manifest(store: Store, plan: RunPlan, entry: StagePlan, part: int) -> Manifest | None:
    """The manifest of a planned artifact, or None when it was never committed.

    Raises:
        CorruptArtifactError: a manifest that is not what was written, is that of another artifact, or was
            made under another plan than the run's.
    """
    return _read_manifest(store, plan.run_id, run_digest(plan), entry, part)


def manifests(store: Store, plan: RunPlan, entry: StagePlan) -> list[Manifest | None]:
    """The manifests of a stage, one a planned part; None where nothing is committed.

    Raises:
        CorruptArtifactError: as `read_manifest`.
    """
    digest = run_digest(plan)
    return [_read_manifest(store, plan.run_id, digest, entry, part) for part in entry.shards]


def _read_manifest(store: Store, run_id: str, digest: str, entry: StagePlan, part: int) -> Manifest | None:
    path = manifest_path(run_id, entry.number, entry.stage, part)
    data = store.read_if_there(path)
    if data is None:
        return None
    manifest = unsealed(data, Manifest, path, next_step=_NEXT_STEP)
    if (manifest.run_id, manifest.stage, manifest.shard) != (run_id, entry.stage, part):
        got = f"{manifest.run_id}/{manifest.stage}/{manifest.shard}"
        raise corrupt(path, "belongs to another artifact", got=got, want=f"{run_id}/{entry.stage}/{part}")
    if manifest.key != key_of(manifest.key_parts):
        raise corrupt(path, "has a key that its parts do not give", got=manifest.key, want=key_of(manifest.key_parts))
    if manifest.plan != digest:
        raise CorruptArtifactError(
            path,
            "was made under another plan than the run's",
            got=manifest.plan,
            want=digest,
            next_step="Start a new run under another run id; leftovers of a deleted run are not taken over.",
        )
    return manifest


def corrupt(path: str, problem: str, *, got: object, want: object) -> CorruptArtifactError:
    """The error for a manifest, or what it names, that cannot be trusted."""
    return CorruptArtifactError(path, problem, got=got, want=want, next_step=_NEXT_STEP)
