"""Store: named bytes on local disk or object storage, behind one set of calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
from obstore.store import LocalStore, from_url

from checkpoints.local_files import LocalFiles
from contracts.errors import CheckpointError, ConfigurationError, MissingArtifactError

if TYPE_CHECKING:  # obstore has these names for type checkers alone
    from obstore.store import RetryConfig

# A part that starts with a letter, digit or _ can be neither `..` nor a hidden file, on disk and in a bucket alike.
_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")

# A service that is down or throttles gets six tries more over some 5 to 10 s; obstore's own ten take minutes. One
# that is silent is given up 30 to 60 s after the first request, since a request alone may take 30 s (AWS_TIMEOUT).
_RETRIES: RetryConfig = {
    "max_retries": 6,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=5), "base": 3},
}
_LONGEST_ANSWER = 32 * 2**20  # at 1 MB a second an answer of this size arrives before its time is over
_CODE = re.compile(r"<Code>(\w+)</Code>")  # what an S3 service calls an error, within its XML
_NO_BUCKET = "NoSuchBucket"


class Store:
    """Bytes by path. A path is relative, with `/`; a write shows whole or not at all.

    Everything that opens a bucket but its name comes from the environment: AWS_ENDPOINT_URL,
    AWS_ALLOW_HTTP, AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the others that obstore reads.

    Args:
        uri: a folder, a `file://` URI, or the URI of a bucket that obstore knows (`s3://bucket/prefix`).
        create: whether a folder that is not there is made; readers leave it.
        files: what writes on local disk; tests put in a disk that fails.

    Attributes:
        uri: as it was given.
        root: the folder on this disk; None for object storage.

    Raises:
        ConfigurationError: a URI that obstore does not know or that holds credentials, or a folder that is
            not there or cannot be made.
    """

    def __init__(self, uri: str, *, create: bool = True, files: Callable[[Path], LocalFiles] = LocalFiles) -> None:
        self.uri = uri
        self.root: Path | None = None
        self._local: LocalFiles | None = None
        try:
            if "://" in uri and not uri.startswith("file://"):
                _refuse_credentials(uri)
                self._objects: obstore.store.ObjectStore = from_url(uri, retry_config=_RETRIES)
            else:
                self.root = _local_path(uri).resolve()
                self._local = files(self.root)
                if create:
                    self._local.keep_folder(self.root)
                self._objects = LocalStore(self.root)
        except (BaseError, OSError, ValueError) as error:
            raise ConfigurationError(
                "store",
                "cannot be opened",
                got=f"{uri} ({_said(error)})",
                want="a folder" + ("" if create else " that is there") + " or a URI such as s3://bucket/prefix",
                next_step="Correct --store or the setting `store`.",
            ) from error

    def read(self, path: str) -> bytes:
        """The bytes of a path.

        Raises:
            MissingArtifactError: nothing there.
            CheckpointError: a path that is not allowed, or a store that does not answer.
        """
        with self._at(path):
            try:
                return self._get(path)
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError, NotFoundError) as error:
                if _NO_BUCKET in str(error):
                    raise
                raise MissingArtifactError(
                    f"store {self.uri}", "has no such file", got=path, next_step="Check the run id and the store."
                ) from error

    def _get(self, path: str) -> bytes:
        if self.root is not None:
            return (self.root / path).read_bytes()  # a tenth of the time that obstore takes for small files
        found = obstore.get(self._objects, path)
        size, version = found.meta["size"], found.meta["e_tag"]
        if size <= _LONGEST_ANSWER:
            return bytes(found.bytes())
        parts = []
        for start in range(0, size, _LONGEST_ANSWER):
            end = min(start + _LONGEST_ANSWER, size)
            # All parts are of one version, or the service refuses.
            part = obstore.get(self._objects, path, options={"range": (start, end), "if_match": version})
            parts.append(bytes(part.bytes()))
        return b"".join(parts)

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
        with self._at(path):
            if self._local is None:
                obstore.put(self._objects, path, data)
            else:
                self._local.put(path, data, replace=True)

    def create(self, path: str, data: bytes) -> None:
        """Writes a file that must not be there yet.

        Raises:
            CheckpointError: it is there already, and left as it was; or as `write`.
        """
        with self._at(path):
            try:
                if self._local is None:
                    obstore.put(self._objects, path, data, mode="create")
                else:
                    self._local.put(path, data, replace=False)
            except (FileExistsError, AlreadyExistsError) as error:
                raise CheckpointError(
                    f"store {self.uri}", "already has the file", got=path, next_step="Choose another run id, or resume."
                ) from error

    def delete(self, path: str) -> None:
        """Removes a file, on local disk for good when this returns; one that is not there is no error."""
        with self._at(path):
            if self._local is not None:
                self._local.delete(path)
                return
            try:
                obstore.delete(self._objects, path)
            except (FileNotFoundError, NotFoundError) as error:
                if _NO_BUCKET in str(error):
                    raise

    def files(self, prefix: str) -> list[str]:
        """All paths below a folder, sorted; none when there is no such folder."""
        return sorted(self.sizes(prefix))

    def sizes(self, prefix: str) -> dict[str, int]:
        """All paths below a folder, each with its bytes."""
        with self._at(prefix):
            return {entry["path"]: entry["size"] for batch in obstore.list(self._objects, prefix) for entry in batch}

    def tags(self, folder: str, ending: str = "") -> dict[str, str]:
        """What the store knows of the files right below a folder without reading them, by name.

        A tag changes when the file is replaced, written to or touched; on disk also with a copy of the store.

        Args:
            folder: whose files; of a folder that is not there, none.
            ending: of the names that are wanted.
        """
        with self._at(folder):
            if self._local is not None:
                return self._local.tags(folder, ending)
            return {
                name: f"{entry['e_tag']} {entry['last_modified'].isoformat()} {entry['size']}"
                for batch in obstore.list(self._objects, folder)
                for entry in batch
                if (name := entry["path"].removeprefix(f"{folder}/")).endswith(ending) and "/" not in name
            }

    def folders(self, prefix: str) -> list[str]:
        """The names of the folders right below a folder that hold any file, sorted."""
        with self._at(prefix):
            found = obstore.list_with_delimiter(self._objects, prefix)["common_prefixes"]
            # A bucket has no empty folders; on disk they stay behind when their files are deleted.
            return sorted(path.rsplit("/", 1)[-1] for path in found if self.root is None or self._holds_files(path))

    def _holds_files(self, folder: str) -> bool:
        return any(len(batch) for batch in obstore.list(self._objects, folder, chunk_size=1))

    def sweep_unfinished(self, older_than_seconds: float) -> int:
        """Removes what killed writers left on local disk, see `LocalFiles.sweep`; object storage keeps no such files.

        Returns:
            How many files were removed.
        """
        with self._explained("unfinished files"):
            return 0 if self._local is None else self._local.sweep(older_than_seconds)

    @contextmanager
    def _at(self, path: str) -> Iterator[None]:
        """Lets only paths inside the store pass."""
        if not _PATH.fullmatch(path):
            raise CheckpointError(
                f"store {self.uri}",
                "does not take such a path",
                got=repr(path),
                want="names of letters, digits, '.', '_' and '-', joined by '/', that do not start with '.' or '-'",
                next_step="Correct the id or name that it was made of.",
            )
        with self._explained(path):
            yield

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turns what the disk or the service says into our errors."""
        try:
            yield
        except (BaseError, OSError) as error:
            raise CheckpointError(
                f"store {self.uri}",
                "could not do what was asked",
                got=f"{what}: {_said(error)}",
                next_step="Check that the store can be reached and written, and has space.",
            ) from error


def _local_path(uri: str) -> Path:
    if uri.startswith("file://"):
        return Path(unquote(urlsplit(uri).path))
    return Path(uri).expanduser()


def _refuse_credentials(uri: str) -> None:
    """A URI is shown in errors and kept with each run."""
    scheme, _, rest = uri.partition("://")
    authority, slash, path = rest.partition("/")
    if "?" in uri or "#" in uri:
        raise ConfigurationError(
            "store",
            "has more than a bucket and a prefix",
            got=f"{uri[: min(uri.find(sign) for sign in '?#' if sign in uri)]}...",
            want="s3://bucket/prefix, and secrets in the environment alone",
            next_step="Take the rest out of --store or the setting `store`.",
        )
    if "@" in authority:
        raise ConfigurationError(
            "store",
            "holds credentials",
            got=f"{scheme}://...@{authority.rpartition('@')[2]}{slash}{path}",
            want="secrets in the environment alone, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            next_step="Take them out of --store or the setting `store`.",
        )


def _said(error: Exception) -> str:
    """The gist of an error: its first line, without XML but with the code that a service put into it."""
    text = str(error)
    code = _CODE.search(text)
    return text.partition("\n")[0].partition(": <")[0] + (f" ({code[1]})" if code else "")
