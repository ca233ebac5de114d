"""Store: named bytes on local disk or object storage, behind one set of calls."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
from obstore.store import LocalStore, from_url

from contracts.errors import CheckpointError, ConfigurationError, MissingArtifactError

# A part that starts with a letter, digit or _ can be neither `..` nor a hidden file, on disk and in a bucket alike.
_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
_UNFINISHED = ".unfinished"  # no path can name it, so a file that a crash left here is never listed or read


class Store:
    """Bytes by path. A path is relative, with `/`; a write shows whole or not at all.

    Args:
        uri: a folder, a `file://` URI, or the URI of a bucket that obstore knows (`s3://bucket/prefix`).

        create: whether a folder that is not there is made; readers leave it.

    Raises:
        ConfigurationError: a URI that obstore does not know, or a folder that is not there or cannot be made.
    """

    def __init__(self, uri: str, *, create: bool = True) -> None:
        self.uri = uri
        self.root: Path | None = None
        try:
            if "://" in uri and not uri.startswith("file://"):
                self._objects: obstore.store.ObjectStore = from_url(uri)
            else:
                self.root = _local_path(uri).resolve()
                self._objects = LocalStore(self.root, mkdir=create)
        except (BaseError, OSError, ValueError) as error:
            raise ConfigurationError(
                "store",
                "cannot be opened",
                got=uri,
                want="a folder" + ("" if create else " that is there") + " or a URI such as s3://bucket/prefix",
                next_step="Correct --store or the setting `store`.",
            ) from error

    def read(self, path: str) -> bytes:
        """The bytes of a path.

        Raises:
            MissingArtifactError: nothing there.
            CheckpointError: a path that is not allowed, or a store that does not answer.
        """
        with self._explained(path):
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
        """Writes or replaces a file; on local disk it is on the disk when this returns.

        Raises:
            CheckpointError: a path that is not allowed, or a store that cannot be written.
        """
        with self._explained(path):
            if self.root is None:
                obstore.put(self._objects, path, data)
            else:
                _write_local(self.root, path, data, replace=True)

    def create(self, path: str, data: bytes) -> None:
        """Writes a file that must not be there yet.

        Raises:
            CheckpointError: it is there already, and left as it was; or as `write`.
        """
        with self._explained(path):
            try:
                if self.root is None:
                    obstore.put(self._objects, path, data, mode="create")
                else:
                    _write_local(self.root, path, data, replace=False)
            except (FileExistsError, AlreadyExistsError) as error:
                raise CheckpointError(
                    f"store {self.uri}", "already has the file", got=path, next_step="Choose another run id, or resume."
                ) from error

    def delete(self, path: str) -> None:
        """Removes a file; one that is not there is no error."""
        with self._explained(path):
            try:
                obstore.delete(self._objects, path)
            except (FileNotFoundError, NotFoundError):
                return

    def files(self, prefix: str) -> list[str]:
        """All paths below a folder, sorted; none when there is no such folder."""
        with self._explained(prefix):
            return sorted(entry["path"] for batch in obstore.list(self._objects, prefix) for entry in batch)

    def folders(self, prefix: str) -> list[str]:
        """The names of the folders right below a folder, sorted."""
        with self._explained(prefix):
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
        with self._explained(prefix):
            return self.root / prefix

    @contextmanager
    def _explained(self, path: str) -> Iterator[None]:
        """Lets only paths inside the store pass, and turns what the disk or the service says into our errors."""
        if not _PATH.fullmatch(path):
            raise CheckpointError(
                f"store {self.uri}",
                "does not take such a path",
                got=repr(path),
                want="names of letters, digits, '.', '_' and '-', joined by '/', that do not start with '.' or '-'",
                next_step="Correct the id or name that it was made of.",
            )
        try:
            yield
        except (BaseError, OSError) as error:
            raise CheckpointError(
                f"store {self.uri}",
                "could not do what was asked",
                got=f"{path}: {str(error).partition(chr(10))[0]}",
                next_step="Check that the store can be reached and written, and has space.",
            ) from error


def _local_path(uri: str) -> Path:
    if uri.startswith("file://"):
        return Path(unquote(urlsplit(uri).path))
    return Path(uri).expanduser()


def _write_local(root: Path, path: str, data: bytes, *, replace: bool) -> None:
    """Puts a file in place when it is whole and on the disk, so that even a power cut leaves the old one or the new.

    obstore renames too, but syncs neither before nor after.
    """
    target = root / path
    unfinished = root / _UNFINISHED / uuid.uuid4().hex
    _make_folder(unfinished.parent)
    _make_folder(target.parent)
    try:
        with unfinished.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            unfinished.replace(target)
        else:
            os.link(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
    _sync_folder(target.parent)


def _make_folder(folder: Path) -> None:
    """A new folder outlives a power cut only when the folder that names it is synced too."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
