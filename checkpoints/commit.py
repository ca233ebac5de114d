"""Commit, read, verify and borrow artifacts: one Parquet file and its manifest for each (run, stage, shard).

The Parquet file is written first, under a name that carries its key; then the manifest, which alone
is the commit. Readers start from manifests, never from what lies in a folder, and compare the whole
file with the manifest's SHA-256 before they parse a byte of it.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from checkpoints.dead_letters import letters_of, write_letters
from checkpoints.digests import key_of, sha256
from checkpoints.logical_digest import logical_digest
from checkpoints.manifests import corrupt, manifest_path, read_manifest, run_digest, stage_folder
from checkpoints.records import sealed
from checkpoints.store import Store
from contracts.errors import CheckpointError, MissingArtifactError
from contracts.manifest import Account, DeadLetter, Manifest, RunPlan, StagePlan


def parquet_bytes(table: pa.Table) -> bytes:
    """A table as one Parquet file; equal tables give equal bytes under one version of Arrow."""
    sink = io.BytesIO()
    pq.write_table(
        table.combine_chunks(),  # chunks would show in the bytes as borders of pages
        sink,
        compression="snappy",  # half the time of zstd for a fifth more bytes, and every reader has it
        # Floats hardly repeat: to look for repeats costs more than half of the writing, and gains nothing.
        use_dictionary=_repeating(table.schema),
        # Shards are read whole, so nothing looks at the least and the greatest of a page.
        write_statistics=False,
        write_page_checksum=True,
    )
    return sink.getvalue()


def _repeating(fields: Iterable[pa.Field], prefix: str = "") -> list[str]:
    """The paths, as Parquet names them, of all leaves but floats."""
    found: list[str] = []
    for field in fields:
        path, kind = f"{prefix}{field.name}", field.type
        while pa.types.is_list(kind) or pa.types.is_large_list(kind):
            path, kind = f"{path}.list.element", kind.value_type
        if pa.types.is_struct(kind):
            found += _repeating(kind, f"{path}.")
        elif not pa.types.is_floating(kind):
            found.append(path)
    return found


def commit(
    store: Store,
    table: pa.Table,
    *,
    plan: RunPlan,
    entry: StagePlan,
    part: int,
    key_parts: Mapping[str, Any],
    letters: Sequence[DeadLetter] = (),
    left_out: int = 0,
    account: Account | None,
    calls: Mapping[str, Mapping[str, int]] | None = None,
    tokens: int = 0,
    cost: float = 0.0,
    graded_by: Mapping[str, int] | None = None,
    started_at: str,
    seconds: float,
) -> Manifest:
    """Writes the Parquet file and the dead letters, then the manifest, once: what is committed is never written again.

    Args:
        table: one row a query, or what the stage's contract says.
        plan: of the run.
        entry: the stage in the plan.
        part: its number.
        key_parts: everything that can change the result, see `contracts.manifest.Manifest`.
        letters: the queries (or log lines) that the stage took out of this part.
        left_out: how many queries an earlier stage took out.
        account: where the candidates came from and went; None for tables without candidates.
        calls: how calls of services ended.
        tokens: that the calls were charged for.
        cost: of these tokens.
        graded_by: passages by who graded them.
        started_at: ISO time, for people; takes no part in keys.
        seconds: how long it took to compute.

    Returns:
        The manifest in the store: the earlier one when the same data are committed already.

    Raises:
        CheckpointError: other data are committed already, as by a process that took the run over.
    """
    data = parquet_bytes(table)
    key = key_of(key_parts)
    path = f"{stage_folder(plan.run_id, entry.number, entry.stage)}/part-{part:05d}.{key}.parquet"
    found = read_manifest(store, plan, entry, part)
    if found is None:
        store.write(path, data)
        dead_letters = write_letters(store, f"runs/{plan.run_id}/dead_letters/{entry.stage}-part-{part:05d}", letters)
    else:
        dead_letters = found.dead_letters
    manifest = Manifest(
        run_id=plan.run_id,
        plan=run_digest(plan),
        stage=entry.stage,
        shard=part,
        file=path,
        sha256=sha256(data),
        bytes=len(data),
        rows=table.num_rows,
        logical_digest=logical_digest(table),
        key=key,
        key_parts=dict(key_parts),
        account=account,
        left_out=left_out,
        dead_letters=dead_letters,
        calls={name: dict(counts) for name, counts in (calls or {}).items()},
        tokens=tokens,
        cost=cost,
        graded_by=dict(graded_by or {}),
        borrowed_from=None,
        started_at=started_at,
        seconds=seconds,
    )
    return _commit_once(store, manifest, plan, entry)


def _commit_once(store: Store, manifest: Manifest, plan: RunPlan, entry: StagePlan) -> Manifest:
    path = manifest_path(plan.run_id, entry.number, entry.stage, manifest.shard)
    try:
        store.create(path, sealed(manifest))
    except CheckpointError:
        found = read_manifest(store, plan, entry, manifest.shard)
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


def read_table(store: Store, manifest: Manifest, columns: Sequence[str] | None = None) -> pa.Table:
    """The table of an artifact, after its whole file was compared with the manifest.

    Args:
        store: where the file lies.
        manifest: of the artifact.
        columns: those that are wanted, in the order of the file; `candidates.chunk_id` is one field of a list of
            structs. None reads all. The whole file is compared in any case, but only these are parsed.

    Raises:
        CorruptArtifactError: the bytes are not what was committed, or no table of as many rows.
        CheckpointError: the artifact has no such column.
    """
    data = verified_bytes(store, manifest)
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        leaves = None if columns is None else _leaves(file, columns, manifest)
        # Shards are read side by side already: Arrow's own threads would only stand in their way.
        table = file.read(columns=leaves, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise corrupt(manifest.file, "is not a Parquet file that can be read", got=error, want=None) from error
    if table.num_rows != manifest.rows:
        raise corrupt(manifest.file, "has another number of rows", got=table.num_rows, want=manifest.rows)
    return table


def _leaves(file: pq.ParquetFile, columns: Sequence[str], manifest: Manifest) -> list[str]:
    """The paths, as Parquet names them, of the leaves of some columns."""
    paths = [file.schema.column(place).path for place in range(len(file.schema))]
    named = [(path.replace(".list.element", ""), path) for path in paths]
    found = {
        column: [path for name, path in named if name == column or name.startswith(f"{column}.")] for column in columns
    }
    absent = [column for column, leaves in found.items() if not leaves]
    if absent:
        raise CheckpointError(
            manifest.file, "has no such column", got=", ".join(absent), want=f"some of {', '.join(dict(named))}",
            next_step="Correct what the reading stage says it reads.",
        )  # fmt: skip
    return [leaf for leaves in found.values() for leaf in leaves]


def verified_bytes(store: Store, manifest: Manifest) -> bytes:
    """The bytes of an artifact's file.

    Raises:
        CorruptArtifactError: the file is gone, or its SHA-256 is not the committed one.
    """
    try:
        data = store.read(manifest.file)
    except MissingArtifactError as error:
        raise corrupt(manifest.file, "is missing", got="no file", want=f"{manifest.bytes} bytes") from error
    got = sha256(data)
    if got != manifest.sha256:
        raise corrupt(manifest.file, "is not what was committed", got=f"SHA-256 {got}", want=manifest.sha256)
    return data


def verify_files(store: Store, manifest: Manifest) -> None:
    """Compares the files of an artifact, table and dead letters, with what was committed, without parsing the table.

    Raises:
        CorruptArtifactError: a file is gone, or is not what was committed.
    """
    verified_bytes(store, manifest)
    letters_of(store, manifest)


def verify_artifact(store: Store, manifest: Manifest) -> None:
    """Reads an artifact again: its bytes, its rows, the data in them, and its dead letters.

    Raises:
        CorruptArtifactError: anything differs from what was committed.
    """
    got = logical_digest(read_table(store, manifest))
    if got != manifest.logical_digest:
        raise corrupt(manifest.file, "holds other data", got=f"digest {got}", want=manifest.logical_digest)
    letters_of(store, manifest)


def borrow(store: Store, manifest: Manifest, *, plan: RunPlan, entry: StagePlan) -> Manifest:
    """Commits an artifact of an earlier run to a new run, without copying its files.

    Table and dead letters are verified first: nothing unproven enters a run. To borrow again changes nothing.

    Raises:
        CorruptArtifactError: a file is not what was committed.
        CheckpointError: the run has committed other data already.
    """
    verify_files(store, manifest)
    borrowed = manifest.model_copy(
        update={
            "run_id": plan.run_id,
            "plan": run_digest(plan),
            "borrowed_from": manifest.borrowed_from or manifest.run_id,
        }
    )
    return _commit_once(store, borrowed, plan, entry)
