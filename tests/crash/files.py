"""Files that die on purpose: local files that stop the process at a named point, and tell what they did.

A point is named by the moment, the step and the file: `after rename runs/r/06-rrf_merge/part-00001.*.parquet`, where
the key is left out. Names do not depend on which thread comes first.

SIGKILL takes nothing back that the kernel has. So for a power cut there is the journal: what every step did, in
order, of which `tests.crash.disk` keeps only what was synced.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints.local_files import LocalFiles

_KEY = re.compile(r"\.[0-9a-f]{32}\.")


@dataclass(frozen=True)
class Orders:
    """What a process under test does beside its work.

    Attributes:
        kill_at: the point at which it kills itself; None lets it finish.
        points: a file that takes the name of every point it comes to.
        journal: a file that takes every step, for `Disk`.
        forgets: a step of the protocol that is left out (`sync_file`, `sync_folder`, `rename`), to see the tests fail.
    """

    kill_at: str | None = None
    points: Path | None = None
    journal: Path | None = None
    forgets: str | None = None


def append_line(file: Path, line: str) -> None:
    """Adds a line that no kill can take back: one write to the kernel, no buffer of this process."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(descriptor, line.encode() + b"\n")
    finally:
        os.close(descriptor)


def lines_of(file: Path) -> list[str]:
    """The whole lines of such a file; none when nothing was added."""
    return file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []


class _Here(threading.local):
    """What a thread is at: what it does to which path, and the folder that it made last."""

    path = ""
    action = ""
    folder = ""


class CrashFiles(LocalFiles):
    """Local files under orders.

    Args:
        root: the store.
        orders: where to stop, and what to write down.
    """

    def __init__(self, root: Path, orders: Orders) -> None:
        super().__init__(root)
        self._root = root
        self._orders = orders
        self._here = _Here()
        self._put: set[str] = set()
        self._journal_lock = threading.Lock()

    def put(self, path: str, data: bytes, *, replace: bool) -> None:
        self._here.path, self._here.action = path, "again " if path in self._put else ""
        self._put.add(path)
        self._note("begin put", path, data)
        if self._orders.forgets == "rename":
            self.keep_folder((self._root / path).parent)
            self.write(self._root / path, data)
        else:
            super().put(path, data, replace=replace)
        self._note("end put", path)

    def delete(self, path: str) -> None:
        self._here.path, self._here.action = path, "deleting "
        self._note("begin delete", path)
        super().delete(path)
        self._note("end delete", path)

    def write(self, file: Path, data: bytes) -> None:
        with self._step("write", self._name()), self._noted("write", file, data):
            if self._orders.kill_at == self._point("during", "write", self._name()):
                super().write(file, data[: len(data) // 2])
            self._reach("during", "write", self._name())
            super().write(file, data)

    def sync_file(self, file: Path) -> None:
        if self._orders.forgets == "sync_file":
            return
        with self._step("sync_file", self._name()), self._noted("sync_file", file):
            super().sync_file(file)

    def rename(self, source: Path, target: Path) -> None:
        with self._step("rename", self._name()), self._noted("rename", source, target):
            super().rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        with self._step("link", self._name()), self._noted("link", source, target):
            super().link(source, target)

    def unlink(self, file: Path) -> None:
        with self._step("unlink", self._name()), self._noted("unlink", file):
            super().unlink(file)

    def make_folder(self, folder: Path) -> None:
        self._here.folder = f"{folder.relative_to(self._root)}/"
        with self._step("make_folder", self._here.folder):
            super().make_folder(folder)

    def sync_folder(self, folder: Path) -> None:
        if self._orders.forgets == "sync_folder":
            return
        if folder != self._root and self._root not in folder.parents:
            super().sync_folder(folder)  # what holds the store is not the store's
            return
        # What was made in it without a note of ours: folders. Listed before the sync, so none is taken for synced.
        folders = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        own = folder == (self._root / self._here.path).parent
        # Of another folder it is the sync that makes a new folder safe: named by that one.
        with (
            self._step("sync_folder", self._name() if own else self._here.folder),
            self._noted("sync_folder", folder, folders),
        ):
            super().sync_folder(folder)

    def _name(self) -> str:
        return self._here.action + _KEY.sub(".*.", self._here.path)

    @contextmanager
    def _step(self, step: str, name: str) -> Iterator[None]:
        self._reach("before", step, name)
        yield
        self._reach("after", step, name)

    def _reach(self, moment: str, step: str, name: str) -> None:
        point = self._point(moment, step, name)
        if self._orders.points is not None:
            append_line(self._orders.points, point)
        if point == self._orders.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    @staticmethod
    def _point(moment: str, step: str, name: str) -> str:
        return f"{moment} {step} {name}"

    @contextmanager
    def _noted(self, step: str, *what: Any) -> Iterator[None]:
        """Notes a step that was done; the lock makes the journal's order that of the steps."""
        if self._orders.journal is None:
            yield
            return
        with self._journal_lock:
            yield
            self._append(step, *what)

    def _note(self, step: str, *what: Any) -> None:
        if self._orders.journal is not None:
            with self._journal_lock:
                self._append(step, *what)

    def _append(self, step: str, *what: Any) -> None:
        append_line(self._orders.journal, json.dumps([step, *map(self._plain, what)]))  # type: ignore[arg-type]

    def _plain(self, value: Any) -> Any:
        if isinstance(value, bytes):
            return base64.b64encode(value).decode()
        return str(value.relative_to(self._root)) if isinstance(value, Path) else value
