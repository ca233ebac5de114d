"""Corpus snapshots in the store: written whole, made current by a pointer."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

from checkpoints.digests import sha256
from checkpoints.records import sealed, unsealed
from checkpoints.store import Store
from contracts.corpus import CorpusSnapshot
from contracts.errors import CheckpointError, CorruptArtifactError, MissingArtifactError

_CURRENT = "corpora/current.json"


class _Pointer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    snapshot_id: str


def snapshot_folder(snapshot_id: str) -> str:
    """Where the files of a snapshot lie."""
    return f"corpora/{snapshot_id}"


def save_snapshot(store: Store, snapshot: CorpusSnapshot, files: Mapping[str, bytes]) -> None:
    """Writes the files, then the manifest, then makes the snapshot current.

    One that is there and whole is left as it is; one that is damaged is written again.

    Raises:
        CheckpointError: the files are not those that the manifest names.
    """
    wanted = {file.name: file.sha256 for file in snapshot.files}
    got = {name: sha256(data) for name, data in files.items()}
    if got != wanted:
        raise CheckpointError(
            f"corpus snapshot {snapshot.snapshot_id}",
            "has files that are not those of its manifest",
            got=", ".join(sorted(name for name in {*got, *wanted} if got.get(name) != wanted.get(name))),
            next_step="Ingest the corpus again.",
        )
    if not _is_whole(store, snapshot.snapshot_id):
        for name, data in files.items():
            store.write(f"{snapshot_folder(snapshot.snapshot_id)}/{name}", data)
        store.write(_manifest_path(snapshot.snapshot_id), sealed(snapshot))
    store.write(_CURRENT, sealed(_Pointer(snapshot_id=snapshot.snapshot_id)))


def current_snapshot_id(store: Store) -> str:
    """The snapshot that new runs use.

    Raises:
        MissingArtifactError: nothing has been ingested yet.
        CorruptArtifactError: a pointer that is not what was written.
    """
    data = store.read_if_there(_CURRENT)
    if data is None:
        raise MissingArtifactError(
            f"store {store.uri}", "holds no corpus", next_step="Run `dartflow ingest CORPUS` first."
        )
    return unsealed(data, _Pointer, _CURRENT, next_step="Ingest the corpus again.").snapshot_id


def load_snapshot(store: Store, snapshot_id: str) -> CorpusSnapshot:
    """The manifest of a snapshot.

    Raises:
        MissingArtifactError: no such snapshot; names those that are there.
        CorruptArtifactError: a manifest that is not what was written, or is that of another snapshot.
    """
    path = _manifest_path(snapshot_id)
    data = store.read_if_there(path)
    if data is None:
        raise MissingArtifactError(
            f"store {store.uri}",
            "has no such corpus snapshot",
            got=f"{snapshot_id}, no file {path}",
            want=", ".join(store.folders("corpora")) or "no snapshot yet",
            next_step="Check --store, or ingest the corpus.",
        )
    snapshot = unsealed(data, CorpusSnapshot, path, next_step="Ingest the corpus again.")
    if snapshot.snapshot_id != snapshot_id:
        raise CorruptArtifactError(
            path,
            "belongs to another snapshot",
            got=snapshot.snapshot_id,
            want=snapshot_id,
            next_step="Ingest the corpus again.",
        )
    return snapshot


def _is_whole(store: Store, snapshot_id: str) -> bool:
    """Whether a snapshot is there, and every file of it is what its manifest says."""
    try:
        files = load_snapshot(store, snapshot_id).files
        return all(sha256(store.read(f"{snapshot_folder(snapshot_id)}/{file.name}")) == file.sha256 for file in files)
    except (MissingArtifactError, CorruptArtifactError):
        return False


def _manifest_path(snapshot_id: str) -> str:
    return f"{snapshot_folder(snapshot_id)}/snapshot.json"
