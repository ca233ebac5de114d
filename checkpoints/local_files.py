"""LocalFiles: files on this disk that are there whole or not at all, whatever is killed and whenever the power goes."""

from __future__ import annotations

import os
import time
import uuid
from contextlib import suppress
from pathlib import Path

_UNFINISHED = ".unfinished"  # no path of a store can name it, so a file that a crash left here is never listed or read


class LocalFiles:
    """Puts and deletes files below a root.

    A file is written and synced under a name that nobody reads, then gets its own name in one step, then
    the folder that holds the name is synced: even a power cut leaves the old file or the new. What the
    disk itself does (`write` to `sync_folder`) is a method for each step, so that another disk can stand
    in for it, one that fails, is killed or loses what was not synced.

    Args:
        root: the folder that all paths are below.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._kept: set[Path] = set()

    def put(self, path: str, data: bytes, *, replace: bool) -> None:
        """Puts a file in place; it is on the disk when this returns.

        Args:
            path: relative to the root, with `/`.
            data: the whole content.
            replace: whether a file of this name is replaced, or left as it is and refused.

        Raises:
            FileExistsError: it is there already, and must not be replaced.
            OSError: what the disk says.
        """
        target = self.root / path
        unfinished = self.root / _UNFINISHED / uuid.uuid4().hex
        self.keep_folder(unfinished.parent)
        self.keep_folder(target.parent)
        try:
            self.write(unfinished, data)
            self.sync_file(unfinished)
            if replace:
                self.rename(unfinished, target)
            else:
                self.link(unfinished, target)
            self.sync_folder(target.parent)
        finally:
            self.unlink(unfinished)

    def delete(self, path: str) -> None:
        """Removes a file, for good when this returns; one that is not there is no error.

        Raises:
            OSError: what the disk says.
        """
        target = self.root / path
        self.unlink(target)
        # Also when it was gone: who removed it may have been killed before this step, and then it could come back.
        if target.parent.is_dir():
            self.sync_folder(target.parent)

    def tags(self, folder: str, ending: str) -> dict[str, str]:
        """What the disk knows of the files right below a folder, by name; see `Store.tags`.

        Raises:
            OSError: what the disk says, unless there is no such folder.
        """
        found: dict[str, str] = {}
        with suppress(FileNotFoundError), os.scandir(self.root / folder) as entries:
            for entry in entries:
                if entry.name.endswith(ending) and entry.is_file():
                    with suppress(FileNotFoundError):  # it has just been removed
                        file = entry.stat()
                        # Nobody can set back st_ctime_ns, the time of the last change of anything.
                        found[entry.name] = f"{file.st_ino} {file.st_mtime_ns} {file.st_ctime_ns} {file.st_size}"
        return found

    def sweep(self, older_than_seconds: float) -> int:
        """Removes what killed writers left unfinished, and says how many files that were.

        Args:
            older_than_seconds: younger ones are left, since they may be at work still; no write takes as
                long as an hour.

        Raises:
            OSError: what the disk says.
        """
        folder = self.root / _UNFINISHED
        before = time.time() - older_than_seconds
        removed = 0
        for file in list(folder.glob("*")):
            try:
                if file.stat().st_mtime > before:
                    continue
            except FileNotFoundError:
                continue  # its writer has just finished
            self.unlink(file)
            removed += 1
        return removed

    def keep_folder(self, folder: Path) -> None:
        """Makes a folder, and those above it, so that they outlive a power cut.

        A folder is safe when the one that names it is synced. Below the root that is done once for each
        folder even where it is there already: who made it may have been killed before the sync.
        """
        if folder.is_dir() and (folder in self._kept or self.root not in folder.parents):
            return
        self.keep_folder(folder.parent)
        self.make_folder(folder)
        self.sync_folder(folder.parent)
        self._kept.add(folder)

    def write(self, file: Path, data: bytes) -> None:
        """Writes a new file, which may still be in memory alone when this returns."""
        with file.open("xb") as opened:
            opened.write(data)

    def sync_file(self, file: Path) -> None:
        """Waits until the content of a file is on the disk."""
        _sync(file)

    def rename(self, source: Path, target: Path) -> None:
        """Gives a file another name in one step, in place of what had that name."""
        source.replace(target)

    def link(self, source: Path, target: Path) -> None:
        """Gives a file a second name in one step, unless another file has it."""
        os.link(source, target)

    def unlink(self, file: Path) -> None:
        """Takes a name away; one that is not there is no error."""
        file.unlink(missing_ok=True)

    def make_folder(self, folder: Path) -> None:
        """Makes one folder; one that is there is no error."""
        folder.mkdir(exist_ok=True)

    def sync_folder(self, folder: Path) -> None:
        """Waits until the names in a folder are on the disk."""
        _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
