"""Lease: one process at a time works on a run, and says so with a heartbeat.

Leases of a folder are numbered files, `<folder>/lease/000001.json` and so on; the highest number is the
one that counts. Who wants a lease that is free creates the next number, and since a file is created once,
one of several wins. The holder writes its own file again with each heartbeat, and a last time, as released.
Numbers only rise, so a number tells an earlier holder from a later one.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pydantic import BaseModel, ConfigDict

from checkpoints.processes import has_ended, identity
from checkpoints.records import sealed, unsealed
from checkpoints.store import Store
from contracts.errors import CheckpointError, CorruptArtifactError, RunHeldError

HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 60.0

_NAME = re.compile(r"/lease/([0-9]{6}|[1-9][0-9]{6,})\.json")


class LeaseRecord(BaseModel):
    """What stands in a lease file: `token` is new each time a folder is held; `process` outlives no process."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    holder: str
    token: str
    process: str | None
    beat_at: float
    released: bool

    @property
    def age(self) -> float:
        """Seconds since the last heartbeat; clocks of two machines may differ a little."""
        return max(0.0, time.time() - self.beat_at)

    @property
    def said(self) -> str:
        """Who holds it, and since when nothing was heard of it."""
        return f"{self.holder}, last heard of {self.age:.0f} s ago"

    @property
    def is_free(self) -> bool:
        """Whether nobody holds it any more: released, too long silent, of a clock far ahead, or of an ended process."""
        return self.released or abs(time.time() - self.beat_at) > STALE_SECONDS or has_ended(self.process)


class Lease:
    """A folder of the store that this process holds.

    Args:
        store: where the folder lies.
        folder: what is held, `runs/<run id>` say.
        what: how errors name it.

    Attributes:
        number: higher than that of every earlier holder of the folder.
    """

    def __init__(self, store: Store, folder: str, what: str) -> None:
        self.number = 0
        self._store = store
        self._folder = folder
        self._what = what
        self._holder = f"{socket.gethostname()}:{os.getpid()}"
        self._token = uuid.uuid4().hex
        self._process = identity(os.getpid())
        self._renewed = _clocks()
        self._lost: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease heartbeat", daemon=True)

    def check(self) -> None:
        """Makes sure that the folder is this process's still; a thread that outlives the holding finds it is not.

        Raises:
            RunHeldError: as `_check_kept`, or the folder was let go.
        """
        if self._stop.is_set():
            raise RunHeldError(
                self._what, "was let go by this process", next_step="Start again; what is committed is kept."
            )
        self._check_kept()

    def _check_kept(self) -> None:
        """Makes sure that the folder is still this process's, without asking the store.

        Raises:
            RunHeldError: another process took it over, somebody removed the lease, or no heartbeat reached
                the store for so long that another process may have taken it over.
        """
        # One clock may be set while the process works, the other may stand still while the machine sleeps.
        silent = max(abs(now - then) for now, then in zip(_clocks(), self._renewed, strict=True))
        if self._lost is None and silent > STALE_SECONDS:
            self._lost = f"no heartbeat that reached the store for {silent:.0f} s"
        if self._lost is not None:
            raise RunHeldError(
                self._what,
                "is no longer held by this process",
                got=self._lost,
                next_step="Leave it to its holder, or start again when there is none; what is committed is kept.",
            )

    def _take(self) -> None:
        """Creates the next number, unless somebody holds the one before."""
        found = _latest(self._store, self._folder)
        if found is not None and not found[1].is_free:
            raise _held(self._what, found[1].said)
        self.number = 1 if found is None else found[0] + 1
        self._renewed, entry = _clocks(), self._entry()
        try:
            self._store.create(self._path, entry)
        except CheckpointError:
            # Another process was faster, or the file was created and only the answer was lost, or the store is down.
            found = _latest(self._store, self._folder)
            if found is None or found[0] < self.number:
                raise
        self._make_sure()
        self._thread.start()

    def _make_sure(self) -> None:
        """Looks who has the highest number, and removes the lower ones.

        A process that was paused before its `create` may have made a number that had been taken and
        removed long ago.
        """
        loss = self._loss()
        if loss is not None:
            raise _held(self._what, loss)
        for number in _numbers(self._store, self._folder):
            if number < self.number:
                with suppress(CheckpointError):  # the next holder will do it
                    self._store.delete(_path(self._folder, number))

    def _beat(self) -> None:
        while self._lost is None and not self._stop.wait(HEARTBEAT_SECONDS):
            # The store may answer at the next beat; until then the lease ages, as it should.
            with suppress(CheckpointError):
                self._renew()

    def _renew(self, *, released: bool = False) -> None:
        clocks, entry = _clocks(), self._entry(released=released)
        loss = self._loss()
        if loss is None:
            self._store.write(self._path, entry)
            self._renewed = clocks
        else:
            self._lost = loss

    def _release(self) -> None:
        """Says that nobody holds the folder any more; where that does not reach the store, the lease goes stale."""
        self._stop.set()
        self._thread.join()
        with suppress(CheckpointError):
            self._renew(released=True)

    def _loss(self) -> str | None:
        """Why the folder is no longer this process's; None while it is."""
        try:
            found = _latest(self._store, self._folder)
        except CorruptArtifactError as error:
            # A damaged file of its own is mended by the next beat.
            return None if error.where == self._path else f"another lease, {error.where}, that cannot be read"
        if found is None or found[0] < self.number:
            return f"no file {self._path} any more"
        return None if found[1].token == self._token else found[1].said

    @property
    def _path(self) -> str:
        return _path(self._folder, self.number)

    def _entry(self, *, released: bool = False) -> bytes:
        return sealed(
            LeaseRecord(
                holder=self._holder, token=self._token, process=self._process, beat_at=time.time(), released=released
            )
        )


def holder_of(store: Store, folder: str) -> tuple[str, float] | None:
    """Who holds a folder and how many seconds ago it last said so; None when nobody does.

    Raises:
        CorruptArtifactError: a lease file that cannot be read.
    """
    found = _latest(store, folder)
    return None if found is None or found[1].is_free else (found[1].holder, found[1].age)


@contextmanager
def hold(store: Store, folder: str, what: str) -> Iterator[Lease]:
    """Holds a folder's lease while the block runs, with a heartbeat from a thread of its own.

    Args:
        store: where the folder lies.
        folder: what is held, `runs/<run id>` say; the lease lies in `lease` below it.
        what: how errors name it, `run nightly` say.

    Raises:
        RunHeldError: another process holds it, or this one lost it before the block ended; an abandoned
            lease is taken over.
        CorruptArtifactError: a lease file that cannot be read.
    """
    lease = Lease(store, folder, what)
    lease._take()  # noqa: SLF001 - only this block takes and releases
    try:
        yield lease
    finally:
        lease._release()  # noqa: SLF001
    lease._check_kept()  # noqa: SLF001


def _path(folder: str, number: int) -> str:
    return f"{folder}/lease/{number:06d}.json"


def _numbers(store: Store, folder: str) -> list[int]:
    found = (_NAME.fullmatch(path.removeprefix(folder)) for path in store.files(f"{folder}/lease"))
    return sorted(int(name[1]) for name in found if name is not None)


def _latest(store: Store, folder: str) -> tuple[int, LeaseRecord] | None:
    """The lease that counts, with its number; None where there never was one."""
    while numbers := _numbers(store, folder):
        path = _path(folder, numbers[-1])
        data = store.read_if_there(path)
        if data is not None:
            next_step = "Make sure that no process holds it, and remove the file."
            return numbers[-1], unsealed(data, LeaseRecord, path, next_step=next_step)
        # A later holder has removed it since it was listed.
    return None


def _held(what: str, got: str) -> RunHeldError:
    return RunHeldError(
        what,
        "is held by another process",
        got=got,
        want="nobody",
        next_step=f"Wait for it; a lease that is silent for {STALE_SECONDS:.0f} s can be taken over.",
    )


def _clocks() -> tuple[float, float]:
    return time.time(), time.monotonic()
