"""Lease: one process at a time works on a run, and says so with a heartbeat."""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from checkpoints.store import Store
from contracts.errors import CheckpointError, CorruptArtifactError, RunHeldError

HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 60.0


class _Entry(BaseModel):
    """What stands in the lease file: `token` is new each time a run is held; `process` outlives no process."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    holder: str
    token: str = ""
    process: str | None = None
    beat_at: float

    @property
    def age(self) -> float:
        """Seconds since the last heartbeat; clocks of two machines may differ a little."""
        return max(0.0, time.time() - self.beat_at)

    @property
    def abandoned(self) -> bool:
        """Whether nobody holds it any more: too long silent, of a clock far ahead, or of a process that has ended."""
        return abs(time.time() - self.beat_at) > STALE_SECONDS or _has_ended(self.process)


class Lease:
    """A run that this process holds.

    Args:
        store: where the run lies.
        run_id: the run.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self._path = _path(run_id)
        self._holder = f"{socket.gethostname()}:{os.getpid()}"
        self._token = uuid.uuid4().hex
        self._process = _identity(os.getpid())
        self._stop = threading.Event()
        self._lost = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease heartbeat", daemon=True)

    def check(self) -> None:
        """Makes sure that nobody took the run over while this process was silent.

        Raises:
            RunHeldError: somebody did.
        """
        if self._lost.is_set():
            raise RunHeldError(
                f"run {self._run_id}",
                "was taken over by another process",
                got=f"no heartbeat of {self._holder} for {STALE_SECONDS:.0f} s",
                next_step="Leave the run to that process; what is committed is kept.",
            )

    def _take(self) -> None:
        """Takes the lease; of several processes that try at once, one creates the file."""
        found = _read(self._store, self._run_id)
        if found is not None:
            if not found.abandoned:
                raise _held(self._run_id, found)
            self._store.delete(self._path)
        try:
            self._store.create(self._path, self._entry())
        except CheckpointError:
            found = _read(self._store, self._run_id)
            if found is None:
                raise
            raise _held(self._run_id, found) from None
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                self._renew()
            except CheckpointError:
                continue  # the store may answer at the next beat; until then the lease ages, as it should
            if self._lost.is_set():
                return

    def _renew(self) -> None:
        if self._is_mine():
            self._store.write(self._path, self._entry())
        else:
            self._lost.set()

    def _release(self) -> None:
        self._stop.set()
        self._thread.join()
        if self._is_mine():
            self._store.delete(self._path)
        else:
            self._lost.set()

    def _is_mine(self) -> bool:
        """Whether no other process stands in the file; one that was removed or damaged is nobody else's."""
        try:
            found = _read(self._store, self._run_id)
        except CorruptArtifactError:
            return True
        return found is None or found.token == self._token

    def _entry(self) -> bytes:
        entry = _Entry(holder=self._holder, token=self._token, process=self._process, beat_at=time.time())
        return entry.model_dump_json().encode()


def holder_of(store: Store, run_id: str) -> tuple[str, float] | None:
    """Who holds the run and how many seconds ago it last said so; None when nobody does or the lease is abandoned.

    Raises:
        CorruptArtifactError: a lease file that cannot be read.
    """
    found = _read(store, run_id)
    return None if found is None or found.abandoned else (found.holder, found.age)


@contextmanager
def hold(store: Store, run_id: str) -> Iterator[Lease]:
    """Holds the run's lease while the block runs, with a heartbeat from a thread of its own.

    Raises:
        RunHeldError: another process holds it, or took it over before the block ended; an abandoned
            lease is taken over.
        CorruptArtifactError: a lease file that cannot be read.
    """
    lease = Lease(store, run_id)
    lease._take()  # noqa: SLF001 - only this block takes and releases
    try:
        yield lease
    finally:
        lease._release()  # noqa: SLF001
    lease.check()


def _path(run_id: str) -> str:
    return f"runs/{run_id}/lease.json"


def _read(store: Store, run_id: str) -> _Entry | None:
    data = store.read_if_there(_path(run_id))
    if data is None:
        return None
    try:
        return _Entry.model_validate_json(data)
    except ValidationError as error:
        raise CorruptArtifactError(
            _path(run_id),
            "is no lease",
            got=error.errors()[0]["msg"],
            next_step="Make sure that no process works on the run, and remove the file.",
        ) from error


def _held(run_id: str, found: _Entry) -> RunHeldError:
    return RunHeldError(
        f"run {run_id}",
        "is held by another process",
        got=f"{found.holder}, last heard of {found.age:.0f} s ago",
        want="nobody",
        next_step=f"Wait for it; a lease that is silent for {STALE_SECONDS:.0f} s can be taken over.",
    )


def _identity(pid: int) -> str | None:
    """Names a process for good: boot of the machine, pid namespace, pid and start time.

    None where the system does not tell (no /proc, or a hidden one); a lease is then judged by its
    heartbeat alone.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = Path("/proc/self/ns/pid").readlink()
        # The name before the last bracket may hold anything; the state follows it, and the start is field 22 of all.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    started = "ended" if fields[0] in {"Z", "X"} else fields[19]
    return f"{boot} {namespace} {pid} {started}"


def _has_ended(process: str | None) -> bool:
    """Whether a process of this machine and pid namespace is known to have ended; of others nothing is known."""
    mine = _identity(os.getpid())
    if process is None or mine is None or process.split()[:2] != mine.split()[:2]:
        return False
    pid = int(process.split()[2])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False  # it lives, under another user
    found = _identity(pid)
    return found is not None and found != process  # the pid may have passed to another process
