"""Disk: what a power cut leaves of a store, from the journal of what was done to its files."""

from __future__ import annotations

import base64
import json
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.crash.files import lines_of


@dataclass
class _File:
    """A file on the disk: what was written, and whether that was synced."""

    data: bytes
    synced: bool


@dataclass
class Disk:
    """What a disk holds after a power cut.

    A file's content is there once it was synced, a name once its folder was; likewise names that were
    taken away. Everything else is lost: a name without content is an empty file.

    Attributes:
        names: (folder, name) to file: what is on the disk for good.
        folders: those that are on the disk for good.
    """

    names: dict[tuple[str, str], _File] = field(default_factory=dict)
    folders: set[str] = field(default_factory=lambda: {"."})
    _seen: dict[str, _File] = field(default_factory=dict)  # by path, what the processes see
    _pending: list[tuple[str, str, _File | None]] = field(default_factory=list)  # names given, or taken away
    _promised: dict[str, list[bytes | None]] = field(default_factory=dict)  # by path, what may be there

    @classmethod
    def after(cls, before: Path, journal: Path) -> Disk:
        """A disk that held `before`, when the power went at the end of the journal."""
        disk = cls()
        for path in sorted(before.rglob("*")):
            name = str(path.relative_to(before))
            if path.is_dir():
                disk.folders.add(name)
            else:
                disk._seen[name] = disk.names[_split(name)] = _File(path.read_bytes(), synced=True)
        for line in lines_of(journal):
            disk._replay(*json.loads(line))
        return disk

    def _replay(self, step: str, path: str, *more: Any) -> None:
        if step == "write":
            self._seen[path] = _File(base64.b64decode(more[0]), synced=False)
            self._pending.append((*_split(path), self._seen[path]))
        elif step == "sync_file":
            self._seen[path].synced = True
        elif step in {"rename", "link"}:
            self._seen[more[0]] = self._seen[path]
            self._pending.append((*_split(more[0]), self._seen[path]))
        elif step == "sync_folder":
            self._sync_folder(path, more[0])
        elif step in {"begin put", "begin delete"}:
            self._promised.setdefault(path, [self._read(path)]).append(base64.b64decode(more[0]) if more else None)
        elif step in {"end put", "end delete"}:
            self._promised[path] = self._promised[path][-1:]
        if step in {"rename", "unlink"}:
            self._seen.pop(path, None)
            self._pending.append((*_split(path), None))

    def _sync_folder(self, folder: str, folders: list[str]) -> None:
        self.folders.update(os.path.normpath(f"{folder}/{name}") for name in folders)
        for where, name, file in self._pending:
            if where == folder:
                self._set(where, name, file)
        self._pending = [change for change in self._pending if change[0] != folder]

    def _set(self, folder: str, name: str, file: _File | None) -> None:
        if file is None:
            self.names.pop((folder, name), None)
        else:
            self.names[folder, name] = file

    def broken_promises(self) -> list[str]:
        """Paths that are on the disk neither as the last finished put or delete left them, nor as one under way may."""
        return [path for path, allowed in self._promised.items() if self._read(path) not in allowed]

    def _read(self, path: str) -> bytes | None:
        file = self.names.get(_split(path))
        if file is None or not self._is_there(_split(path)[0]):
            return None
        return file.data if file.synced else b""

    def _is_there(self, folder: str) -> bool:
        return folder == "." or (folder in self.folders and self._is_there(_split(folder)[0]))

    def write_to(self, target: Path, chance: random.Random | None = None) -> None:
        """Writes down what is left.

        Args:
            target: a folder that is not there yet.
            chance: each step that was not synced survives with probability 1/2, in any combination, since
                real file systems reorder; without it none does.
        """
        if chance is not None:
            self._let_some_survive(chance)
        target.mkdir()
        for folder in sorted(filter(self._is_there, self.folders)):
            (target / folder).mkdir(exist_ok=True)
        for (folder, name), file in self.names.items():
            if self._is_there(folder):
                (target / folder / name).write_bytes(file.data if file.synced else _torn(file.data, chance))

    def _let_some_survive(self, chance: random.Random) -> None:
        folders = {folder for folder, _, _ in self._pending} - self.folders
        for folder in sorted({above for name in folders for above in _with_parents(name)}):
            if chance.random() < 0.5:
                self.folders.add(folder)
        for change in self._pending:
            if chance.random() < 0.5:
                self._set(*change)


def _torn(data: bytes, chance: random.Random | None) -> bytes:
    """What a file that was never synced may hold."""
    if chance is None:
        return b""
    return chance.choice([b"", data[: chance.randrange(len(data) + 1)], bytes(len(data)), data])


def _split(path: str) -> tuple[str, str]:
    folder, _, name = path.rpartition("/")
    return folder or ".", name


def _with_parents(folder: str) -> list[str]:
    parts = folder.split("/")
    return ["/".join(parts[: end + 1]) for end in range(len(parts))]
