"""Corpus snapshots in the store: written whole, made current by a pointer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from checkpoints.digests import sha256
from checkpoints.moves import Move, moving, user_and_host
from checkpoints.pointer import Action, Pointer, PointerRecord
from checkpoints.records import sealed, unsealed
from checkpoints.store import Store
from contracts.corpus import CorpusSnapshot
from contracts.errors import CheckpointError, CorruptArtifactError, MissingArtifactError

_NO_SNAPSHOTS = frozenset({"history", "lease"})  # the pointer's


@dataclass(frozen=True)
class StoredSnapshot:
    """A snapshot as it is found: its manifest, or why that cannot be read."""

    snapshot_id: str
    snapshot: CorpusSnapshot | None
    problem: str | None


def corpus_pointer(store: Store) -> Pointer:
    """Which snapshot new runs use."""
    return Pointer(
        store,
        "corpora",
        what="the corpus pointer",
        empty="holds no corpus",
        first_step="Run `dartflow ingest CORPUS` first.",
        way_out="Run `dartflow corpus use ID` with an id of `dartflow corpus list`, or ingest the corpus again.",
    )


def snapshot_folder(snapshot_id: str) -> str:
    """Where the files of a snapshot lie."""
    return f"corpora/{snapshot_id}"


def manifest_path(snapshot_id: str) -> str:
    """Where the manifest of a snapshot lies."""
    return f"{snapshot_folder(snapshot_id)}/snapshot.json"


def save_snapshot(store: Store, snapshot: CorpusSnapshot, files: Mapping[str, bytes], *, by: str | None = None) -> None:
    """Writes the files, then the manifest, then makes the snapshot current, unless it is current already.

    One that is there and whole is left as it is; one that is damaged, or that another version made with other
    settings, is written again.

    Args:
        store: where to.
        snapshot: its manifest.
        files: its files by name.
        by: who ingested it; the user of this process when None.

    Raises:
        CheckpointError: the files are not those that the manifest names.
        RunHeldError: another process moves the pointer, or removes snapshots.
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
    # Written under the pointer's lease, so that a snapshot that is not current yet is not taken for a leftover.
    with moving(corpus_pointer(store)) as move:
        if not _is_there(store, snapshot):
            for name, data in files.items():
                store.write(f"{snapshot_folder(snapshot.snapshot_id)}/{name}", data)
            store.write(manifest_path(snapshot.snapshot_id), sealed(snapshot))
        _move(move, snapshot, action="ingest", by=by, why=None)


def use_snapshot(store: Store, snapshot_id: str, *, by: str | None = None, why: str | None) -> PointerRecord | None:
    """Makes a snapshot current after its files were verified; None when it is current already.

    Raises:
        MissingArtifactError: no such snapshot.
        CorruptArtifactError: a file of it is not what was written.
        RunHeldError: another process moves the pointer.
    """
    with moving(corpus_pointer(store)) as move:
        return _move(move, check_snapshot(store, snapshot_id), action="use", by=by, why=why)


def roll_back_corpus(store: Store, *, by: str | None = None, why: str | None) -> PointerRecord:
    """Makes the snapshot current again that was so before, after its files were verified.

    Raises:
        MissingArtifactError: there is nothing before, or the snapshot is gone.
        CorruptArtifactError: a file of the snapshot, or the record of it, is not what was written.
        RunHeldError: another process moves the pointer.
    """
    with moving(corpus_pointer(store)) as move:
        record = move.earlier()
        check_snapshot(store, record.target)
        return move.back(record, by=by or user_and_host(), why=why)


def _move(
    move: Move, snapshot: CorpusSnapshot, *, action: Action, by: str | None, why: str | None
) -> PointerRecord | None:
    if move.found is not None and move.found.target == snapshot.snapshot_id:
        return None
    details: dict[str, object] = {"chunks": snapshot.chunks, "source_file": snapshot.source_file}
    return move.to(snapshot.snapshot_id, action=action, by=by or user_and_host(), why=why, details=details)


def current_snapshot_id(store: Store) -> str:
    """The snapshot that new runs use.

    Raises:
        MissingArtifactError: nothing has been ingested yet, or the pointer is gone.
        CorruptArtifactError: a pointer that is not what was written.
    """
    return corpus_pointer(store).current().target


def snapshot_ids(store: Store) -> list[str]:
    """All folders of snapshots, also of those whose manifest is damaged or missing."""
    return [name for name in store.folders("corpora") if name not in _NO_SNAPSHOTS]


def stored_snapshots(store: Store) -> list[StoredSnapshot]:
    """All snapshots, the youngest first; those whose manifest cannot be read last."""
    found = []
    for snapshot_id in snapshot_ids(store):
        try:
            found.append(StoredSnapshot(snapshot_id, load_snapshot(store, snapshot_id), None))
        except (MissingArtifactError, CorruptArtifactError) as error:
            found.append(StoredSnapshot(snapshot_id, None, str(error)))
    return sorted(found, key=lambda one: "" if one.snapshot is None else one.snapshot.created_at, reverse=True)


def load_snapshot(store: Store, snapshot_id: str) -> CorpusSnapshot:
    """The manifest of a snapshot.

    Raises:
        MissingArtifactError: no such snapshot; names those that are there.
        CorruptArtifactError: a manifest that is not what was written, or is that of another snapshot.
    """
    path = manifest_path(snapshot_id)
    data = store.read_if_there(path)
    if data is None:
        raise MissingArtifactError(
            f"store {store.uri}",
            "has no such corpus snapshot",
            got=f"{snapshot_id}, no file {path}",
            want=", ".join(snapshot_ids(store)) or "no snapshot yet",
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


def check_snapshot(store: Store, snapshot_id: str) -> CorpusSnapshot:
    """The manifest of a snapshot, after every file was compared with it.

    Raises:
        MissingArtifactError: no such snapshot.
        CorruptArtifactError: the manifest, or the first file that is not what it names.
    """
    snapshot = load_snapshot(store, snapshot_id)
    for file in snapshot.files:
        path = f"{snapshot_folder(snapshot_id)}/{file.name}"
        data = store.read_if_there(path)
        got = "no file" if data is None else f"SHA-256 {sha256(data)}"
        if got != f"SHA-256 {file.sha256}":
            raise CorruptArtifactError(
                path,
                "is not what was written",
                got=got,
                want=file.sha256,
                next_step="Ingest the corpus again, or use another snapshot.",
            )
    return snapshot


def _is_there(store: Store, snapshot: CorpusSnapshot) -> bool:
    """Whether a snapshot is there with all its settings, and every file of it is what its manifest says."""
    try:
        found = check_snapshot(store, snapshot.snapshot_id)
    except (MissingArtifactError, CorruptArtifactError):
        return False
    return _names(found.settings) == _names(snapshot.settings)


def _names(settings: Mapping[str, object]) -> dict[str, set[str]]:
    """The names of all settings, by section."""
    return {name: set(section) if isinstance(section, Mapping) else set() for name, section in settings.items()}
