"""Corpus snapshots in the store: written whole, made current by a pointer."""

from __future__ import annotations

import json
from collections.abc import Mapping

from pydantic import ValidationError

from checkpoints.store import Store
from contracts.corpus import CorpusSnapshot
from contracts.errors import CorruptArtifactError, MissingArtifactError

_CURRENT = "corpora/current.json"


def snapshot_folder(snapshot_id: str) -> str:
    """Where the files of a snapshot lie."""
    return f"corpora/{snapshot_id}"


def save_snapshot(store: Store, snapshot: CorpusSnapshot, files: Mapping[str, bytes]) -> None:
    """Writes the files, then the manifest, then makes the snapshot current; one that is there is left as it is."""
    folder = snapshot_folder(snapshot.snapshot_id)
    manifest = f"{folder}/snapshot.json"
    if store.read_if_there(manifest) is None:
        for name, data in files.items():
            store.write(f"{folder}/{name}", data)
        store.write(manifest, snapshot.model_dump_json(indent=1).encode())
    store.write(_CURRENT, json.dumps({"snapshot_id": snapshot.snapshot_id}).encode())


def current_snapshot_id(store: Store) -> str:
    """The snapshot that new runs use.

    Raises:
        MissingArtifactError: nothing has been ingested yet.
    """
    data = store.read_if_there(_CURRENT)
    if data is None:
        raise MissingArtifactError(
            f"store {store.uri}", "holds no corpus", next_step="Run `dartflow ingest CORPUS` first."
        )
    return str(json.loads(data)["snapshot_id"])


def load_snapshot(store: Store, snapshot_id: str) -> CorpusSnapshot:
    """The manifest of a snapshot.

    Raises:
        MissingArtifactError: no such snapshot.
        CorruptArtifactError: a manifest that cannot be read.
    """
    path = f"{snapshot_folder(snapshot_id)}/snapshot.json"
    try:
        return CorpusSnapshot.model_validate_json(store.read(path))
    except ValidationError as error:
        raise CorruptArtifactError(
            path, "is not a snapshot manifest", got=error.errors()[0]["msg"], next_step="Ingest the corpus again."
        ) from error
