"""Commit, read, verify and borrow artifacts: one Parquet file and its manifest for each (run, stage, shard).

The Parquet file is written first, under a name that carries its key; then the manifest, which alone
is the commit. Readers start from manifests, never from what lies in a folder, and compare the whole
file with the manifest's SHA-256 before they parse a byte of it.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from checkpoints.digests import key_of, logical_digest, sha256
from checkpoints.records import sealed, unsealed
from checkpoints.store import Store
from contracts.errors import CheckpointError, CorruptArtifactError, MissingArtifactError
from contracts.manifest import Account, Manifest

_NEXT_STEP = "Run `dartflow verify RUN`, then rerun from the stage that wrote it."


def stage_folder(run_id: str, number: int, stage: str) -> str:
    """Where the artifacts of a stage of a run lie."""
    return f"runs/{run_id}/{number:02d}-{stage}"


def manifest_path(run_id: str, number: int, stage: str, shard: int) -> str:
    """Where the manifest of one artifact lies."""
    return f"{stage_folder(run_id, number, stage)}/part-{shard:05d}.json"


def parquet_bytes(table: pa.Table) -> bytes:
    """A table as one Parquet file; equal tables give equal bytes under one version of Arrow."""
    sink = io.BytesIO()
    # Chunks would show in the bytes as borders of pages.
    pq.write_table(table.combine_chunks(), sink, compression="zstd", write_page_checksum=True)
    return sink.getvalue()


def commit(
    store: Store,
    table: pa.Table,
    *,
    run_id: str,
    number: int,
    stage: str,
    shard: int,
    key_parts: Mapping[str, Any],
    account: Account | None,
    started_at: str,
    seconds: float,
) -> Manifest:
    """Writes the Parquet file, then its manifest, once: what is committed is never written again.

    Args:
        table: one row a query, or what the stage's contract says.
        number: the stage's place in the pipeline, from 1; 0 for what is loaded.
        key_parts: everything that can change the result, see `contracts.manifest.Manifest`.
        account: where the candidates came from and went; None for tables without candidates.
        started_at: ISO time, for people; takes no part in keys.
        seconds: how long it took to compute.

    Returns:
        The manifest in the store: the earlier one when the same data are committed already.

    Raises:
        CheckpointError: other data are committed already, as by a process that took the run over.
    """
    data = parquet_bytes(table)
    key = key_of(key_parts)
    path = f"{stage_folder(run_id, number, stage)}/part-{shard:05d}.{key}.parquet"
    manifest = Manifest(
        run_id=run_id,
        stage=stage,
        shard=shard,
        file=path,
        sha256=sha256(data),
        bytes=len(data),
        rows=table.num_rows,
        logical_digest=logical_digest(table),
        key=key,
        key_parts=dict(key_parts),
        account=account,
        borrowed_from=None,
        started_at=started_at,
        seconds=seconds,
    )
    if read_manifest(store, run_id, number, stage, shard) is None:
        store.write(path, data)
    return _commit_once(store, manifest, number)


def _commit_once(store: Store, manifest: Manifest, number: int) -> Manifest:
    path = manifest_path(manifest.run_id, number, manifest.stage, manifest.shard)
    try:
        store.create(path, sealed(manifest))
    except CheckpointError:
        found = read_manifest(store, manifest.run_id, number, manifest.stage, manifest.shard)
        if found is None:
            raise
        if (found.key, found.logical_digest) == (manifest.key, manifest.logical_digest):
            return found
        raise CheckpointError(
            path,
            "is committed already, with other data",
            got=f"key {manifest.key}, digest {manifest.logical_digest}",
            want=f"key {found.key}, digest {found.logical_digest}",
            next_step="Make sure that one process alone works on the run, then resume it.",
        ) from None
    return manifest


def read_manifest(store: Store, run_id: str, number: int, stage: str, shard: int) -> Manifest | None:
    """The manifest of an artifact, or None when it was never committed.

    Raises:
        CorruptArtifactError: a manifest that is not what was written, or is that of another artifact.
    """
    path = manifest_path(run_id, number, stage, shard)
    data = store.read_if_there(path)
    if data is None:
        return None
    manifest = unsealed(data, Manifest, path, next_step=_NEXT_STEP)
    if (manifest.run_id, manifest.stage, manifest.shard) != (run_id, stage, shard):
        got = f"{manifest.run_id}/{manifest.stage}/{manifest.shard}"
        raise _corrupt(path, "belongs to another artifact", got=got, want=f"{run_id}/{stage}/{shard}")
    if manifest.key != key_of(manifest.key_parts):
        raise _corrupt(path, "has a key that its parts do not give", got=manifest.key, want=key_of(manifest.key_parts))
    return manifest


def read_table(store: Store, manifest: Manifest) -> pa.Table:
    """The table of an artifact, after its whole file was compared with the manifest.

    Raises:
        CorruptArtifactError: the bytes are not what was committed, or no table of as many rows.
    """
    data = verified_bytes(store, manifest)
    try:
        table = pq.read_table(io.BytesIO(data))
    except (pa.ArrowException, OSError) as error:
        raise _corrupt(manifest.file, "is not a Parquet file that can be read", got=error, want=None) from error
    if table.num_rows != manifest.rows:
        raise _corrupt(manifest.file, "has another number of rows", got=table.num_rows, want=manifest.rows)
    return table


def verified_bytes(store: Store, manifest: Manifest) -> bytes:
    """The bytes of an artifact's file.

    Raises:
        CorruptArtifactError: the file is gone, or its SHA-256 is not the committed one.
    """
    try:
        data = store.read(manifest.file)
    except MissingArtifactError as error:
        raise _corrupt(manifest.file, "is missing", got="no file", want=f"{manifest.bytes} bytes") from error
    got = sha256(data)
    if got != manifest.sha256:
        raise _corrupt(manifest.file, "is not what was committed", got=f"SHA-256 {got}", want=manifest.sha256)
    return data


def verify_artifact(store: Store, manifest: Manifest) -> None:
    """Reads an artifact again: its bytes, its rows, and the data in them.

    Raises:
        CorruptArtifactError: anything differs from what was committed.
    """
    got = logical_digest(read_table(store, manifest))
    if got != manifest.logical_digest:
        raise _corrupt(manifest.file, "holds other data", got=f"digest {got}", want=manifest.logical_digest)


def borrow(store: Store, manifest: Manifest, *, run_id: str, number: int) -> Manifest:
    """Commits an artifact of an earlier run to a new run, without copying its file.

    The file is verified first: nothing unproven enters a run. To borrow again changes nothing.

    Raises:
        CorruptArtifactError: the file is not what was committed.
        CheckpointError: the run has committed other data already.
    """
    verified_bytes(store, manifest)
    borrowed = manifest.model_copy(
        update={"run_id": run_id, "borrowed_from": manifest.borrowed_from or manifest.run_id}
    )
    return _commit_once(store, borrowed, number)


def _corrupt(path: str, problem: str, *, got: object, want: object) -> CorruptArtifactError:
    return CorruptArtifactError(path, problem, got=got, want=want, next_step=_NEXT_STEP)
