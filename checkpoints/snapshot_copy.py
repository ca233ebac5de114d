"""Snapshot copies: the files of a corpus snapshot in a folder on this disk, since memory maps need one."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from checkpoints.corpora import snapshot_folder
from checkpoints.digests import sha256
from checkpoints.local_files import LocalFiles
from checkpoints.store import Store
from contracts.corpus import CorpusSnapshot, SnapshotFile
from contracts.errors import CheckpointError, ConfigurationError, CorruptArtifactError

_A_DAY = 86_400.0


def local_snapshot(store: Store, snapshot: CorpusSnapshot, cache: Path) -> Path:
    """The folder of a snapshot on this disk: its own on a local store, else a copy below the cache.

    What the copy lacks, or has damaged, is downloaded. Several processes may do so at once: a file shows
    whole or not at all, and one that another process has mapped stays as it was for that process.

    Args:
        store: where the snapshot lies.
        snapshot: its manifest.
        cache: copies lie here by snapshot id; made when it is not there.

    Raises:
        CorruptArtifactError: the store's bytes of a file are not those of the manifest.
        MissingArtifactError: the store does not have a file of the manifest.
        CheckpointError: a store that does not answer, or a cache that cannot be written.
    """
    if store.root is not None:
        return store.root / snapshot_folder(snapshot.snapshot_id)
    copies = LocalFiles(cache)
    try:
        copies.sweep(_A_DAY)  # parts of downloads that were killed
        for file in snapshot.files:
            if not _is_whole(cache / snapshot.snapshot_id / file.name, file):
                copies.put(f"{snapshot.snapshot_id}/{file.name}", _downloaded(store, snapshot, file), replace=True)
    except OSError as error:
        raise CheckpointError(
            f"cache {cache}",
            "cannot keep a copy of the corpus snapshot",
            got=f"{snapshot.snapshot_id}: {error}",
            want=f"{sum(file.bytes for file in snapshot.files)} bytes of space in a folder that can be written",
            next_step="Make space, or set executor.cache to another folder.",
        ) from error
    return cache / snapshot.snapshot_id


def cache_folder(setting: str | None) -> Path:
    """The folder for copies: the setting, else `dartflow` in the user's cache folder.

    Raises:
        ConfigurationError: neither a setting nor a user with a home folder.
    """
    if setting is not None:
        return Path(setting).expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():  # the XDG specification has others ignored
        return base / "dartflow"
    try:
        return Path.home() / ".cache" / "dartflow"
    except RuntimeError as error:
        raise ConfigurationError(
            "setting executor.cache",
            "has no default for a user without a home folder",
            next_step="Set executor.cache or XDG_CACHE_HOME.",
        ) from error


def _is_whole(copy: Path, file: SnapshotFile) -> bool:
    if not copy.is_file() or copy.stat().st_size != file.bytes:
        return False
    with copy.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest() == file.sha256


def _downloaded(store: Store, snapshot: CorpusSnapshot, file: SnapshotFile) -> bytes:
    path = f"{snapshot_folder(snapshot.snapshot_id)}/{file.name}"
    data = store.read(path)
    got = sha256(data)
    if got != file.sha256:
        raise CorruptArtifactError(
            f"snapshot {snapshot.snapshot_id}, {path}",
            "the file is not what was committed",
            got=f"SHA-256 {got}",
            want=file.sha256,
            next_step="Ingest the corpus again, or use another snapshot.",
        )
    return data
