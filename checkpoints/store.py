"""Store: named bytes on local disk or object storage, behind one set of calls."""

from __future__ import annotations

import os
from pathlib import Path

import obstore
from obstore.exceptions import AlreadyExistsError, NotFoundError
from obstore.store import LocalStore, from_url

from contracts.errors import CheckpointError, ConfigurationError, MissingArtifactError


class Store:
    """Bytes by path. A path is relative, with `/`; a write shows whole or not at all.

    Args:
        uri: a folder, a `file://` URI, or the URI of a bucket that obstore knows (`s3://bucket/prefix`).

    Raises:
        ConfigurationError: a URI that obstore does not know.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.root: Path | None = None
        if "://" not in uri or uri.startswith("file://"):
            self.root = Path(uri.removeprefix("file://")).resolve()
            self._objects: obstore.store.ObjectStore = LocalStore(self.root, mkdir=True)
            return
        try:
            self._objects = from_url(uri)
        except Exception as error:
            raise ConfigurationError(
                "store",
                "cannot be opened",
                got=uri,
                want="a folder or a URI such as s3://bucket/prefix",
                next_step="Correct --store or the setting `store`.",
            ) from error

    def read(self, path: str) -> bytes:
        """The bytes of a path.

        Raises:
            MissingArtifactError: nothing there.
        """
        try:
            return bytes(obstore.get(self._objects, path).bytes())
        except (FileNotFoundError, NotFoundError) as error:
            raise MissingArtifactError(
                f"store {self.uri}", "has no such file", got=path, next_step="Check the run id and the store."
            ) from error

    def read_if_there(self, path: str) -> bytes | None:
        """The bytes of a path, or None."""
        try:
            return self.read(path)
        except MissingArtifactError:
            return None

    def write(self, path: str, data: bytes) -> None:
        """Writes or replaces a file; on local disk it is on the disk when this returns."""
        obstore.put(self._objects, path, data)
        self._sync(path)

    def create(self, path: str, data: bytes) -> None:
        """Writes a file that must not be there yet.

        Raises:
            CheckpointError: it is there already; it is left as it was.
        """
        try:
            obstore.put(self._objects, path, data, mode="create")
        except AlreadyExistsError as error:
            raise CheckpointError(
                f"store {self.uri}", "already has the file", got=path, next_step="Choose another run id, or resume."
            ) from error
        self._sync(path)

    def delete(self, path: str) -> None:
        """Removes a file; one that is not there is no error."""
        try:
            obstore.delete(self._objects, path)
        except (FileNotFoundError, NotFoundError):
            return

    def files(self, prefix: str) -> list[str]:
        """All paths below a prefix, sorted."""
        return sorted(entry["path"] for batch in obstore.list(self._objects, prefix) for entry in batch)

    def folders(self, prefix: str) -> list[str]:
        """The names of the folders right below a prefix, sorted."""
        found = obstore.list_with_delimiter(self._objects, prefix)
        return sorted(path.rsplit("/", 1)[-1] for path in found["common_prefixes"])

    def local_folder(self, prefix: str) -> Path:
        """A prefix as a folder on this disk, for memory maps.

        Raises:
            ConfigurationError: an object store; snapshots are then read from a local copy.
        """
        if self.root is None:
            raise ConfigurationError(
                f"store {self.uri}",
                "cannot be memory-mapped",
                want="a local folder",
                next_step="Copy the snapshot to local disk and use that store.",
            )
        return self.root / prefix

    def _sync(self, path: str) -> None:
        """Object stores are durable when put returns; a local disk is after fsync of the file and its folder."""
        if self.root is None:
            return
        target = self.root / path
        for place in (target, target.parent):
            descriptor = os.open(place, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
